"""Attention that is split by heads in less usual ways: latent keys, norms and slopes by head, one block for attention and MLP,
heads and words that do not divide."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, reduce_from
from graphguard import Input, Shard

BATCH, SEQUENCE, HIDDEN, HEAD, ROTARY, LATENT = 2, 4, 6, 4, 2, 5
COLUMN, ROW = Shard(0), Shard(1)  # of weights as F.linear has them: [out, in]


def case_of(name, sequential, distributed, tp, shapes, split, extra=None):
    """Gradients of all weights and of x; y is whole."""
    inputs = {key: Input(shape, {"tp": split[key]} if key in split else {}) for key, shape in shapes.items()}
    inputs |= extra or {}
    relation = {"y": {}} | {f"grads.{key}": {"tp": split[key]} if key in split else {} for key in shapes if key != "dy"}
    return Case(f"heads-{name}-tp{tp}", sequential, distributed, {"tp": tp}, inputs, relation)


def summed(grads, names, group=None):
    for name in names:
        dist.all_reduce(grads[name], group=group)
    return grads


def by_heads(t, head):
    """[batch, sequence, heads * head] as [batch, heads, sequence, head]."""
    return t.unflatten(-1, (-1, head)).transpose(1, 2)


def merged(t):
    return t.transpose(1, 2).flatten(2)


def causal(scores):
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


def attend(q, k, v):
    return causal(q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))) @ v


# ---------------------------------------------------------------------- latent keys and values, one rotary key for all
def rotated(t):
    """Pairs of halves turned by angles of their place."""
    half = t.size(-1) // 2
    angles = torch.outer(torch.arange(t.size(-2)).float(), 100.0 ** (-torch.arange(half) / half))
    a, b = t[..., :half], t[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def latent_attention(p, x, latent, rotary_key):
    """For the heads whose weights are here."""
    q, q_rotary = by_heads(F.linear(x, p["wq"]), HEAD + ROTARY).split([HEAD, ROTARY], -1)
    k, v = by_heads(F.linear(latent, p["wkv"]), 2 * HEAD).split([HEAD, HEAD], -1)
    key = rotated(rotary_key).unsqueeze(1).expand(-1, q.size(1), -1, -1)
    q, k = torch.cat([q, rotated(q_rotary)], -1), torch.cat([k, key], -1)
    return F.linear(merged(attend(q, k, v)), p["wo"])


def latent(x, dy, **params):
    p = leaves({"x": x, **params})
    both = F.linear(p["x"], p["wdown"])
    narrow = F.rms_norm(both[..., :LATENT], (LATENT,), p["scale"])
    y = latent_attention(p, p["x"], narrow, both[..., LATENT:])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def latent_tp(x, dy, **params):
    """The narrow projections are whole on every rank; what heads make of them is copied to the region."""
    p = leaves({"x": x, **params})
    both = F.linear(p["x"], p["wdown"])
    narrow = F.rms_norm(both[..., :LATENT], (LATENT,), p["scale"])
    y = latent_attention(p, copy_to(p["x"], None), copy_to(narrow, None), copy_to(both[..., LATENT:], None))
    y = reduce_from(y, None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def latent_tp_summed_late(x, dy, **params):
    """Or all of it is in the region, and the gradients of what is whole are summed at the end."""
    p = leaves({"x": x, **params})
    x = copy_to(p["x"], None)
    both = F.linear(x, p["wdown"])
    narrow = F.rms_norm(both[..., :LATENT], (LATENT,), p["scale"])
    y = reduce_from(latent_attention(p, x, narrow, both[..., LATENT:]), None)
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("wdown", "scale"))}


def latent_key_not_copied(x, dy, **params):
    p = leaves({"x": x, **params})
    both = F.linear(p["x"], p["wdown"])
    narrow = F.rms_norm(both[..., :LATENT], (LATENT,), p["scale"])
    rotary_key = both[..., LATENT:]  # fault: its gradient has the rank's heads alone
    y = reduce_from(latent_attention(p, copy_to(p["x"], None), copy_to(narrow, None), rotary_key), None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def latent_norm_of_a_part(x, dy, **params):
    p = leaves({"x": x, **params})
    both = F.linear(p["x"], p["wdown"])
    narrow = F.rms_norm(both, both.shape[-1:])[..., :LATENT] * p["scale"]  # fault: the rotary key is in the norm
    y = latent_attention(p, copy_to(p["x"], None), copy_to(narrow, None), copy_to(both[..., LATENT:], None))
    y = reduce_from(y, None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def latent_copied_twice(x, dy, **params):
    p = leaves({"x": x, **params})
    x = copy_to(p["x"], None)
    both = F.linear(x, p["wdown"])
    narrow = F.rms_norm(both[..., :LATENT], (LATENT,), p["scale"])
    narrow = copy_to(narrow, None)  # fault: the gradient is summed here and at x
    y = reduce_from(latent_attention(p, x, narrow, copy_to(both[..., LATENT:], None)), None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def latent_case(name, distributed, tp, heads=4):
    shapes = {
        "x": (BATCH, SEQUENCE, HIDDEN), "wdown": (LATENT + ROTARY, HIDDEN), "scale": (LATENT,),
        "wq": (heads * (HEAD + ROTARY), HIDDEN), "wkv": (heads * 2 * HEAD, LATENT), "wo": (HIDDEN, heads * HEAD),
        "dy": (BATCH, SEQUENCE, HIDDEN),
    }  # fmt: skip
    split = {"wq": COLUMN, "wkv": COLUMN, "wo": ROW}
    return case_of(name, latent, distributed, tp, shapes, split)


# ---------------------------------------------------------------------- norms of queries and keys
def all_heads_norm(t, scale):
    return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6) * scale


def normed_attention(x, dy, **params):
    """Queries and keys are normed over all heads."""
    p = leaves({"x": x, **params})
    q, k = all_heads_norm(F.linear(p["x"], p["wq"]), p["sq"]), all_heads_norm(F.linear(p["x"], p["wk"]), p["sk"])
    v = F.linear(p["x"], p["wv"])
    y = F.linear(merged(attend(by_heads(q, HEAD), by_heads(k, HEAD), by_heads(v, HEAD))), p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


class SquaresOfAll(torch.autograd.Function):
    """A sum that every rank uses: its gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def norm_over_ranks(t, scale):
    squares = SquaresOfAll.apply(t.square().sum(-1, keepdim=True))
    return t * torch.rsqrt(squares / (t.size(-1) * dist.get_world_size()) + 1e-6) * scale


def norm_of_gathered(t, scale):
    """The heads of all ranks are gathered, normed, and cut again."""
    whole = torch.cat(torch.distributed.nn.functional.all_gather(t), -1)
    normed = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + 1e-6)
    return normed.chunk(dist.get_world_size(), -1)[dist.get_rank()] * scale


def local_norm(t, scale):
    return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6) * scale  # fault: over the heads of this rank


def norm_with_local_gradient(t, scale):
    squares = reduce_from(t.square().sum(-1, keepdim=True), None)  # fault: the gradients of the other heads are missing
    return t * torch.rsqrt(squares / (t.size(-1) * dist.get_world_size()) + 1e-6) * scale


def norm_by_local_width(t, scale):
    squares = SquaresOfAll.apply(t.square().sum(-1, keepdim=True))
    return t * torch.rsqrt(squares / t.size(-1) + 1e-6) * scale  # fault: over the width of one rank


def normed_attention_tp_with(norm):
    def program(x, dy, **params):
        p = leaves({"x": x, **params})
        x = copy_to(p["x"], None)
        q, k, v = norm(F.linear(x, p["wq"]), p["sq"]), norm(F.linear(x, p["wk"]), p["sk"]), F.linear(x, p["wv"])
        y = F.linear(merged(attend(by_heads(q, HEAD), by_heads(k, HEAD), by_heads(v, HEAD))), p["wo"])
        y = reduce_from(y, None)
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return program


def normed_case(name, distributed, tp, heads=4):
    wide = heads * HEAD
    shapes = {"x": (BATCH, SEQUENCE, HIDDEN)} | dict.fromkeys(("wq", "wk", "wv"), (wide, HIDDEN))
    shapes |= {"sq": (wide,), "sk": (wide,), "wo": (HIDDEN, wide), "dy": (BATCH, SEQUENCE, HIDDEN)}
    split = dict.fromkeys(("wq", "wk", "wv", "sq", "sk"), COLUMN) | {"wo": ROW}
    return case_of(name, normed_attention, distributed, tp, shapes, split)


def head_normed(p, x):
    """Each head by itself, with one scale for all heads."""
    q = F.rms_norm(by_heads(F.linear(x, p["wq"]), HEAD), (HEAD,), p["sq"])
    k = F.rms_norm(by_heads(F.linear(x, p["wk"]), HEAD), (HEAD,), p["sk"])
    return F.linear(merged(attend(q, k, by_heads(F.linear(x, p["wv"]), HEAD))), p["wo"])


def head_normed_attention(x, dy, **params):
    p = leaves({"x": x, **params})
    y = head_normed(p, p["x"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def head_normed_attention_tp(x, dy, **params):
    p = leaves({"x": x, **params})
    y = reduce_from(head_normed(p, copy_to(p["x"], None)), None)
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("sq", "sk"))}


def head_norm_gradient_partial(x, dy, **params):
    p = leaves({"x": x, **params})
    y = reduce_from(head_normed(p, copy_to(p["x"], None)), None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}  # fault: the scales' gradients are not summed


def head_normed_case(name, distributed, tp, heads=4):
    wide = heads * HEAD
    shapes = {"x": (BATCH, SEQUENCE, HIDDEN)} | dict.fromkeys(("wq", "wk", "wv"), (wide, HIDDEN))
    shapes |= {"sq": (HEAD,), "sk": (HEAD,), "wo": (HIDDEN, wide), "dy": (BATCH, SEQUENCE, HIDDEN)}
    return case_of(name, head_normed_attention, distributed, tp, shapes, {"wq": COLUMN, "wk": COLUMN, "wv": COLUMN, "wo": ROW})


# ---------------------------------------------------------------------- slopes in place of positions
def slopes(first, last, heads):
    return 2.0 ** (-8.0 * torch.arange(first + 1, last + 1) / heads)


def sloped(p, x, slope):
    q, k, v = (by_heads(F.linear(x, p[name]), HEAD) for name in ("wq", "wk", "wv"))
    place = torch.arange(q.size(-2))
    distance = (place.unsqueeze(0) - place.unsqueeze(1)).float()
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD) + slope.view(-1, 1, 1) * distance
    return F.linear(merged(causal(scores) @ v), p["wo"])


def sloped_attention(x, dy, **params):
    p = leaves({"x": x, **params})
    heads = p["wq"].size(0) // HEAD
    y = sloped(p, p["x"], slopes(0, heads, heads))
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def sloped_attention_tp_with(choose):
    def program(x, dy, **params):
        p = leaves({"x": x, **params})
        y = reduce_from(sloped(p, copy_to(p["x"], None), choose(p["wq"].size(0) // HEAD)), None)
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return program


def own_slopes(heads):
    first = dist.get_rank() * heads
    return slopes(first, first + heads, heads * dist.get_world_size())


def cut_slopes(heads):
    size = dist.get_world_size()
    return slopes(0, heads * size, heads * size).chunk(size)[dist.get_rank()]


def slopes_of_first_heads(heads):
    return slopes(0, heads, heads * dist.get_world_size())  # fault: the same on every rank


def slopes_of_fewer_heads(heads):
    first = dist.get_rank() * heads
    return slopes(first, first + heads, heads)  # fault: as if there were only this rank's heads


def sloped_case(name, distributed, tp, heads=8):
    wide = heads * HEAD
    shapes = {"x": (BATCH, SEQUENCE, HIDDEN)} | dict.fromkeys(("wq", "wk", "wv"), (wide, HIDDEN))
    shapes |= {"wo": (HIDDEN, wide), "dy": (BATCH, SEQUENCE, HIDDEN)}
    return case_of(name, sloped_attention, distributed, tp, shapes, {"wq": COLUMN, "wk": COLUMN, "wv": COLUMN, "wo": ROW})


# ---------------------------------------------------------------------- attention and MLP side by side
def side_by_side(p, x):
    h = F.layer_norm(x, (HIDDEN,), p["scale"], p["shift"])
    return parts_of_block(p, h)


def parts_of_block(p, h):
    q, k, v = (by_heads(F.linear(h, p[name]), HEAD) for name in ("wq", "wk", "wv"))
    return F.linear(merged(attend(q, k, v)), p["wo"]) + F.linear(F.gelu(F.linear(h, p["up"])), p["down"])


def parallel_block(x, dy, **params):
    p = leaves({"x": x, **params})
    y = p["x"] + side_by_side(p, p["x"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def parallel_block_tp(x, dy, **params):
    """One copy before, one sum after, for both."""
    p = leaves({"x": x, **params})
    h = F.layer_norm(p["x"], (HIDDEN,), p["scale"], p["shift"])
    y = p["x"] + reduce_from(parts_of_block(p, copy_to(h, None)), None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def block_copied_before_norm(x, dy, **params):
    p = leaves({"x": x, **params})
    h = F.layer_norm(copy_to(p["x"], None), (HIDDEN,), p["scale"], p["shift"])  # fault: the norm's gradients are partial
    y = p["x"] + reduce_from(parts_of_block(p, h), None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def block_summed_in_part(x, dy, **params):
    p = leaves({"x": x, **params})
    h = copy_to(F.layer_norm(p["x"], (HIDDEN,), p["scale"], p["shift"]), None)
    q, k, v = (by_heads(F.linear(h, p[name]), HEAD) for name in ("wq", "wk", "wv"))
    y = p["x"] + reduce_from(F.linear(merged(attend(q, k, v)), p["wo"]), None)
    y = y + F.linear(F.gelu(F.linear(h, p["up"])), p["down"])  # fault: the MLP's part is not summed
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def block_case(name, distributed, tp, heads=4, inner=8):
    wide = heads * HEAD
    shapes = {"x": (BATCH, SEQUENCE, HIDDEN), "scale": (HIDDEN,), "shift": (HIDDEN,)}
    shapes |= dict.fromkeys(("wq", "wk", "wv"), (wide, HIDDEN))
    shapes |= {"wo": (HIDDEN, wide), "up": (inner, HIDDEN), "down": (HIDDEN, inner), "dy": (BATCH, SEQUENCE, HIDDEN)}
    split = dict.fromkeys(("wq", "wk", "wv", "up"), COLUMN) | {"wo": ROW, "down": ROW}
    return case_of(name, parallel_block, distributed, tp, shapes, split)


# ---------------------------------------------------------------------- cases
def correct():
    for tp in (2, 4):
        yield latent_case("latent", latent_tp, tp)
        yield latent_case("latent-summed-late", latent_tp_summed_late, tp)
        yield normed_case("norm-of-all", normed_attention_tp_with(norm_over_ranks), tp)
        yield normed_case("norm-of-gathered", normed_attention_tp_with(norm_of_gathered), tp)
        yield head_normed_case("norm-of-each", head_normed_attention_tp, tp)
        yield sloped_case("slopes", sloped_attention_tp_with(own_slopes), tp)
        yield sloped_case("slopes-cut", sloped_attention_tp_with(cut_slopes), tp)
        yield block_case("side-by-side", parallel_block_tp, tp)


def faults():
    base = latent_case("", latent_tp, 2)
    yield faulty(base, "heads-fault-rotary-key", latent_key_not_copied, "its gradient has the rank's heads alone")
    yield faulty(base, "heads-fault-latent-norm", latent_norm_of_a_part, "the rotary key is in the norm")
    yield faulty(base, "heads-fault-copied-twice", latent_copied_twice, "the gradient is summed here and at x")
    base = normed_case("", None, 2)
    for name, norm, fault in (
        ("local-norm", local_norm, "over the heads of this rank"),
        ("norm-gradient", norm_with_local_gradient, "the gradients of the other heads are missing"),
        ("norm-width", norm_by_local_width, "over the width of one rank"),
    ):
        yield faulty(base, f"heads-fault-{name}", normed_attention_tp_with(norm), fault)
    base = head_normed_case("", None, 2)
    partial = head_norm_gradient_partial
    yield faulty(base, "heads-fault-scale-gradient", partial, "the scales' gradients are not summed", stated=("*",))
    base = sloped_case("", None, 2)
    same, fewer = sloped_attention_tp_with(slopes_of_first_heads), sloped_attention_tp_with(slopes_of_fewer_heads)
    yield faulty(base, "heads-fault-same-slopes", same, "the same on every rank")
    yield faulty(base, "heads-fault-fewer-slopes", fewer, "as if there were only this rank's heads")
    base = block_case("", None, 2)
    yield faulty(
        base, "heads-fault-norm-copied", block_copied_before_norm, "the norm's gradients are partial", stated=("*",)
    )  # fmt: skip
    yield faulty(base, "heads-fault-part-summed", block_summed_in_part, "the MLP's part is not summed")


CASES = [*correct(), *faults()]
