"""A Llama decoder as functions of named tensors: on one device, and under tensor + sequence parallelism, or tensor
parallelism alone, as Megatron has them.

Activations are [sequence, batch, hidden]. Outside attention and MLP a rank holds its part of the sequence, or all of it;
inside, its heads or its part of the inner features, of the whole sequence. Embedding and head are split by rows of the
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from graphguard.capture.torch.relation.inputs import Input

_BEFORE_SPLIT = ("attention_norm", "mlp_norm", "norm")  # parameters that meet one rank's tokens only


@dataclass(frozen=True)
class Llama:
    """Sizes that 1024 ranks divide; nothing is computed with them."""

    layers: int
    batch: int = 2
    sequence: int = 8192
    hidden: int = 16384
    heads: int = 8192
    groups: int = 2048  # of heads that share a key and a value
    head: int = 128
    inner: int = 53248
    vocab: int = 131072
    splits_sequence: bool = True  # else tensor parallelism alone: every rank has all tokens between attention and MLP

    def layout(self) -> dict[str, tuple[tuple[int, ...], Placement]]:
        """Each parameter's shape, and how the ranks split it."""
        whole, column, row = Replicate(), Shard(0), Shard(1)
        found: dict[str, tuple[tuple[int, ...], Placement]] = {"embedding": ((self.vocab, self.hidden), column)}
        for layer in range(self.layers):
            found |= {
                f"attention_norm{layer}": ((self.hidden,), whole),
                f"query{layer}": ((self.heads * self.head, self.hidden), column),
                f"key{layer}": ((self.groups * self.head, self.hidden), column),
                f"value{layer}": ((self.groups * self.head, self.hidden), column),
                f"out{layer}": ((self.hidden, self.heads * self.head), row),
                f"mlp_norm{layer}": ((self.hidden,), whole),
                f"gate{layer}": ((self.inner, self.hidden), column),
                f"up{layer}": ((self.inner, self.hidden), column),
                f"down{layer}": ((self.hidden, self.inner), row),
            }
        return found | {"norm": ((self.hidden,), whole), "unembedding": ((self.vocab, self.hidden), column)}

    def inputs(self) -> dict[str, Input]:
        ids = {
            name: Input((self.sequence, self.batch), dtype=torch.int64, low=0, high=self.vocab) for name in ("tokens", "target")
        }
        return ids | {name: Input(shape, placement) for name, (shape, placement) in self.layout().items()}

    # ------------------------------------------------------------------ the two programs
    def sequential(self, tokens: Tensor, target: Tensor, **params: Tensor) -> dict[str, Any]:
        p = _leaves(params)
        x = F.embedding(tokens, p["embedding"])
        turn = self._turn()
        for layer in range(self.layers):
            h = self._attention(_rms_norm(x, p[f"attention_norm{layer}"]), p, layer, turn)
            x = x + F.linear(h, p[f"out{layer}"])
            h = _swiglu(_rms_norm(x, p[f"mlp_norm{layer}"]), p[f"gate{layer}"], p[f"up{layer}"])
            x = x + F.linear(h, p[f"down{layer}"])
        logits = F.linear(_rms_norm(x, p["norm"]), p["unembedding"])
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        return {"loss": loss.detach(), "grads": _gradients(loss, p)}

    def distributed(self, tokens: Tensor, target: Tensor, **params: Tensor) -> dict[str, Any]:
        p = _leaves(params)
        x = self._leave(self._embedded(tokens, p["embedding"]))
        turn = self._turn()
        for layer in range(self.layers):
            h = self._attention(self._enter(_rms_norm(x, p[f"attention_norm{layer}"]), layer), p, layer, turn)
            x = x + self._leave(F.linear(h, p[f"out{layer}"]), layer)
            h = _swiglu(self._enter(_rms_norm(x, p[f"mlp_norm{layer}"])), p[f"gate{layer}"], p[f"up{layer}"])
            x = x + self._leave(F.linear(h, p[f"down{layer}"]))
        logits = F.linear(self._enter(_rms_norm(x, p["norm"])), p["unembedding"])
        loss = _CrossEntropy.apply(logits, target).mean()
        grads = _gradients(loss, p)
        for name, grad in grads.items():
            if self._is_summed(name):
                dist.all_reduce(grad)
        return {"loss": loss.detach(), "grads": grads}

    # ------------------------------------------------------------------ where the ranks meet
    def _embedded(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return own_rows(tokens, weight, dist.get_rank() * weight.size(0))

    def _enter(self, x: Tensor, layer: int | None = None) -> Tensor:
        """What attention or MLP read: all of the sequence. layer: whose attention it is, if it is one."""
        entered: Tensor = (_Gather if self.splits_sequence else _Copy).apply(x)
        return entered

    def _leave(self, x: Tensor, layer: int | None = None) -> Tensor:
        """What they add, summed."""
        left: Tensor = (_ScatterSum if self.splits_sequence else _Sum).apply(x)
        return left

    def _is_summed(self, name: str) -> bool:
        """Whether a parameter meets one rank's tokens only, so that its gradient is a sum over ranks."""
        return self.splits_sequence and name.startswith(_BEFORE_SPLIT)

    # ------------------------------------------------------------------ what they share
    def _turn(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angle, for each feature of a head."""
        speeds = 500000.0 ** (-torch.arange(0, self.head, 2, dtype=torch.float32) / self.head)
        angles = torch.outer(torch.arange(self.sequence).float(), speeds)
        both = torch.cat((angles, angles), -1)
        return both.cos(), both.sin()

    def _attention(self, h: Tensor, p: dict[str, Tensor], layer: int, turn: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (self._by_head(F.linear(h, p[f"{name}{layer}"])) for name in ("query", "key", "value"))
        y = F.scaled_dot_product_attention(_turned(q, turn), _turned(k, turn), v, is_causal=True, enable_gqa=True)
        return y.permute(2, 0, 1, 3).flatten(2)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head)).permute(1, 2, 0, 3)


def _leaves(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().requires_grad_() for name, tensor in params.items()}


def _gradients(loss: Tensor, params: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-second, first), -1) * turn[1]


def _swiglu(h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(h, gate)) * F.linear(h, up)


# ---------------------------------------------------------------------- what only ranks do
def _all_gather(x: Tensor) -> Tensor:
    whole = x.new_empty(x.size(0) * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous())
    return whole


def _reduce_scatter(x: Tensor) -> Tensor:
    part = x.new_empty(x.size(0) // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous())
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _reduce_scatter(grad)


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_gather(grad)


def _all_reduce(x: Tensor) -> Tensor:
    whole = x.clone()
    dist.all_reduce(whole)
    return whole


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_reduce(grad)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _elsewhere(ids: Tensor, rows: int, start: int) -> tuple[Tensor, Tensor]:
    """Which ids other ranks hold, and the row here of those that they do not."""
    foreign = (ids < start) | (ids >= start + rows)
    return foreign, (ids - start).masked_fill(foreign, 0)


def own_rows(tokens: Tensor, weight: Tensor, start: int) -> Tensor:
    foreign, rows = _elsewhere(tokens, weight.size(0), start)
    return F.embedding(rows, weight).masked_fill(foreign.unsqueeze(-1), 0.0)


class _CrossEntropy(torch.autograd.Function):
    """Each rank has the logits of its part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits = logits - largest.unsqueeze(-1)
        foreign, column = _elsewhere(target, logits.size(-1), dist.get_rank() * logits.size(-1))
        chosen = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
        dist.all_reduce(chosen)
        total = logits.exp().sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(logits.exp() / total.unsqueeze(-1), foreign, column)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        softmax, foreign, column = ctx.saved_tensors
        own = (~foreign).to(softmax.dtype).unsqueeze(-1)
        return softmax.scatter_add(-1, column.unsqueeze(-1), -own) * grad.unsqueeze(-1), None
