"""A decoder on one device, as a function of named tensors: tokens in, loss and all gradients out.

Activations are [sequence, batch, hidden]. Parameters are named by layer (`query7`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphguard.bench.models.sizes import Sizes

Parameters = dict[str, Tensor]


def sequential(sizes: Sizes, tokens: Tensor, target: Tensor, **params: Tensor) -> dict[str, Any]:
    p = leaves(params)
    x = F.embedding(tokens, p["embedding"])
    if not sizes.turns_positions:
        x = x + p["positions"].unsqueeze(1)
    turn = turning(sizes)
    for layer in range(sizes.layers):
        own = of_layer(p, layer)
        x = x + projected(
            attention(sizes, inner_of(sizes, normed(sizes, x, own, "attention_norm"), own), own, turn), own, "out"
        )
        h = normed(sizes, x, own, "mlp_norm")
        x = x + (routed(sizes, h, own) if sizes.has_experts(layer) else projected(mlp(sizes, h, own), own, "down"))
    logits = F.linear(normed(sizes, x, p, "norm"), p["unembedding"])
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


def leaves(params: Parameters) -> Parameters:
    return {name: tensor.detach().requires_grad_() for name, tensor in params.items()}


def gradients(loss: Tensor, params: Parameters) -> Parameters:
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def of_layer(params: Parameters, layer: int) -> Parameters:
    """A layer's own parameters, without its number."""
    ending = f"{layer}"
    return {name.removesuffix(ending): each for name, each in params.items() if name.rstrip("0123456789") + ending == name}


# ---------------------------------------------------------------------- what a layer does, whoever runs it
def normed(sizes: Sizes, x: Tensor, p: Parameters, name: str) -> Tensor:
    if sizes.is_gated:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * p[name]
    return F.layer_norm(x, x.shape[-1:], p[name], p[f"{name}_bias"])


def projected(x: Tensor, p: Parameters, name: str) -> Tensor:
    return F.linear(x, p[name], p.get(f"{name}_bias"))


def inner_of(sizes: Sizes, x: Tensor, p: Parameters) -> Tensor:
    """What queries, keys and values are made of: the token itself, or the narrow vectors of it, one after the other."""
    if sizes.latent is None:
        return x
    queries = normed(sizes, F.linear(x, p["query_down"]), p, "query_norm")
    keys, turned = F.linear(x, p["key_down"]).split([sizes.latent.keys, sizes.latent.rope], -1)
    return torch.cat((queries, normed(sizes, keys, p, "key_norm"), turned), -1)


def attention(sizes: Sizes, h: Tensor, p: Parameters, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Of the heads whose weights are there."""
    y = F.scaled_dot_product_attention(*heads(sizes, h, p, turn), is_causal=True, enable_gqa=sizes.groups != sizes.heads)
    return y.permute(2, 0, 1, 3).flatten(2)


def heads(sizes: Sizes, h: Tensor, p: Parameters, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [batch, head, token, feature] each."""
    if sizes.latent is not None:
        return _latent_heads(sizes, h, p, turn)
    q, k, v = (by_head(projected(h, p, name), sizes.head) for name in ("query", "key", "value"))
    return (turned(q, turn), turned(k, turn), v) if sizes.turns_positions else (q, k, v)


def _latent_heads(sizes: Sizes, h: Tensor, p: Parameters, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    latent = sizes.latent
    assert latent is not None
    queries, keys, shared = h.split([latent.queries, latent.keys, latent.rope], -1)
    q = by_head(F.linear(queries, p["query"]), latent.plain + latent.rope)
    plain, rope = q.split([latent.plain, latent.rope], -1)
    k, v = by_head(F.linear(keys, p["key"]), latent.plain + latent.values).split([latent.plain, latent.values], -1)
    for_all = turned(by_head(shared, latent.rope), turn).expand(-1, k.size(1), -1, -1)
    return torch.cat((plain, turned(rope, turn)), -1), torch.cat((k, for_all), -1), v


def by_head(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size)).permute(1, 2, 0, 3)


def turning(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angle, for each feature of a head that is turned."""
    features = sizes.head if sizes.latent is None else sizes.latent.rope
    speeds = 500000.0 ** (-torch.arange(0, features, 2, dtype=torch.float32) / features)
    angles = torch.outer(torch.arange(sizes.sequence).float(), speeds)
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-second, first), -1) * turn[1]


def mlp(sizes: Sizes, h: Tensor, p: Parameters) -> Tensor:
    if sizes.is_gated:
        return F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"])
    return F.gelu(projected(h, p, "up"))


# ---------------------------------------------------------------------- experts
def routed(sizes: Sizes, h: Tensor, p: Parameters) -> Tensor:
    """Each expert has room for every token, and zeros for those that did not choose it."""
    x = h.flatten(0, 1)
    gates = gated(sizes, x, p)
    y = combined(gates, expert_mlp(dispatched(gates, x), p))
    return y.view_as(h) + F.linear(mlp(sizes, h, {"gate": p["shared_gate"], "up": p["shared_up"]}), p["shared_down"])


def gated(sizes: Sizes, x: Tensor, p: Parameters) -> Tensor:
    """[token, expert]: the scores of those that a token chose, which sum to one."""
    assert sizes.experts is not None
    scores = torch.sigmoid(F.linear(x, p["router"]))
    values, chosen = scores.topk(sizes.experts.chosen, -1)
    return torch.zeros_like(scores).scatter(-1, chosen, values / values.sum(-1, keepdim=True))


def dispatched(gates: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("te,th->eth", (gates > 0).to(x.dtype), x)


def combined(gates: Tensor, rows: Tensor) -> Tensor:
    return torch.einsum("te,eth->th", gates, rows)


def expert_mlp(rows: Tensor, p: Parameters) -> Tensor:
    """rows: [expert, token, hidden]."""
    return torch.bmm(F.silu(torch.bmm(rows, p["expert_gate"])) * torch.bmm(rows, p["expert_up"]), p["expert_down"])
