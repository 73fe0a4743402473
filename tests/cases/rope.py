"""Rotary position embeddings under tensor and sequence parallelism."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.attention import merged
from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, gather_sequence, reduce_from
from graphguard import Input, Shard

TP = (2, 4, 8)
HEAD = 4
BATCH, SEQUENCE, HIDDEN, HEADS = 2, 8, 5, 16


def heads_last(t):
    return t.unflatten(-1, (-1, HEAD))


def angles(positions):
    """[positions, head / 2]: each pair of features turns at a speed of its own."""
    speeds = 100.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    return torch.outer(positions.float(), speeds)


# ---------------------------------------------------------------------- the two forms
def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def turned_by_halves(x, positions):
    """x: [..., positions, head]; feature i is paired with feature i + head / 2."""
    turn = torch.cat([angles(positions)] * 2, -1)
    return x * turn.cos() + rotate_half(x) * turn.sin()


def turned_by_neighbours(x, positions):
    """Features 2i and 2i + 1 are paired, in real arithmetic."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles(positions).cos(), angles(positions).sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def turned_as_complex(x, positions):
    """Features 2i and 2i + 1 are the parts of one complex number."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    turn = torch.polar(torch.ones(1), angles(positions))
    return torch.view_as_real(pairs * turn).flatten(-2)


# ---------------------------------------------------------------------- attention split by heads
def attention_with(turned):
    def attention(x, dy, **params):
        p = leaves({"x": x, **params})
        q, k, v = (heads_last(F.linear(p["x"], p[f"w{part}"])).transpose(1, 2) for part in "qkv")
        positions = torch.arange(q.size(2))
        q, k = turned(q, positions), turned(k, positions)
        y = F.linear(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)), p["wo"])
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return attention


def attention_tp_with(turned):
    def attention_tp(x, dy, mesh, **params):
        group = mesh.get_group("tp")
        p = leaves({"x": x, **params})
        h = copy_to(p["x"], group)
        q, k, v = (heads_last(F.linear(h, p[f"w{part}"])).transpose(1, 2) for part in "qkv")
        positions = torch.arange(q.size(2))
        q, k = turned(q, positions), turned(k, positions)
        y = reduce_from(F.linear(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)), p["wo"]), group)
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return attention_tp


def halves_wrongly_signed(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_last(F.linear(h, p[f"w{part}"])).transpose(1, 2) for part in "qkv")
    turn = torch.cat([angles(torch.arange(SEQUENCE))] * 2, -1)
    q = q * turn.cos() + rotate_half(q) * turn.sin()
    k = k * turn.cos() - rotate_half(k) * turn.sin()  # fault: keys are turned backwards
    y = reduce_from(F.linear(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)), p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def neighbours_for_halves(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_last(F.linear(h, p[f"w{part}"])).transpose(1, 2) for part in "qkv")
    turn = angles(torch.arange(SEQUENCE)).repeat_interleave(2, -1)
    q, k = (t * turn.cos() + rotate_half(t) * turn.sin() for t in (q, k))  # fault: the angles of the other form
    y = reduce_from(F.linear(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)), p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def attention_case(name, turned, tp, heads=HEADS):
    inputs = {
        "x": Input((BATCH, SEQUENCE, HIDDEN)),
        **{f"w{part}": Input((heads * HEAD, HIDDEN), Shard(0)) for part in "qkv"},
        "wo": Input((HIDDEN, heads * HEAD), Shard(1)),
        "dy": Input((BATCH, SEQUENCE, HIDDEN)),
    }
    relation = {"y": {}, "grads.x": {}, "grads.wo": {"tp": Shard(1)}, **{f"grads.w{part}": {"tp": Shard(0)} for part in "qkv"}}
    programs = attention_with(turned), attention_tp_with(turned)
    return Case(f"rope-{name}-tp{tp}", *programs, {"tp": tp}, inputs, relation)


def attention_cases():
    for tp in TP:
        yield attention_case("halves", turned_by_halves, tp)
        yield attention_case("neighbours", turned_by_neighbours, tp, heads=8)
        yield attention_case("complex", turned_as_complex, tp, heads=8)


def attention_faults():
    base = attention_case("", turned_by_halves, 2)
    yield faulty(base, "rope-keys-backwards", halves_wrongly_signed, "keys are turned backwards")
    yield faulty(base, "rope-angles-of-the-other-form", neighbours_for_halves, "the angles of the other form")


# ---------------------------------------------------------------------- tokens split over the ranks
def turned_projection(x, w, dy):
    """x: [sequence, batch, hidden]. Queries alone, turned by their positions."""
    p = leaves({"x": x, "w": w})
    q = heads_last(F.linear(p["x"], p["w"])).permute(1, 2, 0, 3)
    q = turned_by_halves(q, torch.arange(x.size(0)))
    return {"q": q.detach(), "grads": gradients(q, p, dy)}


def turned_projection_of_own_tokens(sequence):
    def own_tokens(x, w, dy, mesh):
        """Each rank's positions start where its tokens do; the last rank may have fewer."""
        group = mesh.get_group("tp")
        p = leaves({"x": x, "w": w})
        q = heads_last(F.linear(p["x"], p["w"])).permute(1, 2, 0, 3)
        start = dist.get_rank(group) * -(-sequence // dist.get_world_size(group))
        q = turned_by_halves(q, torch.arange(x.size(0)) + start)
        grads = gradients(q, p, dy)
        dist.all_reduce(grads["w"], group=group)
        return {"q": q.detach(), "grads": grads}

    return own_tokens


def turned_projection_from_a_table(x, w, dy, mesh):
    """The rank's rows of the whole table of cosines and sines."""
    group = mesh.get_group("tp")
    p = leaves({"x": x, "w": w})
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    table = torch.cat([angles(torch.arange(x.size(0) * size))] * 2, -1)
    cos, sin = table.cos().chunk(size)[rank], table.sin().chunk(size)[rank]
    q = heads_last(F.linear(p["x"], p["w"])).permute(1, 2, 0, 3)
    q = q * cos + rotate_half(q) * sin
    grads = gradients(q, p, dy)
    dist.all_reduce(grads["w"], group=group)
    return {"q": q.detach(), "grads": grads}


def turned_projection_from_zero(x, w, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "w": w})
    q = heads_last(F.linear(p["x"], p["w"])).permute(1, 2, 0, 3)
    turn = torch.cat([angles(torch.arange(x.size(0)))] * 2, -1)
    q = q * turn.cos() + rotate_half(q) * turn.sin()  # fault: positions start at zero on every rank
    grads = gradients(q, p, dy)
    dist.all_reduce(grads["w"], group=group)
    return {"q": q.detach(), "grads": grads}


def turned_projection_off_by_one(x, w, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "w": w})
    q = heads_last(F.linear(p["x"], p["w"])).permute(1, 2, 0, 3)
    start = max(dist.get_rank(group) * x.size(0) - 1, 0)
    turn = torch.cat([angles(torch.arange(x.size(0)) + start)] * 2, -1)
    q = q * turn.cos() + rotate_half(q) * turn.sin()  # fault: the later ranks start one position early
    grads = gradients(q, p, dy)
    dist.all_reduce(grads["w"], group=group)
    return {"q": q.detach(), "grads": grads}


def projection_case(name, distributed, tp, sequence=16):
    inputs = {
        "x": Input((sequence, BATCH, HIDDEN), Shard(0)),
        "w": Input((3 * HEAD, HIDDEN)),
        "dy": Input((BATCH, 3, sequence, HEAD), Shard(2)),
    }
    relation = {"q": {"tp": Shard(2)}, "grads.x": {"tp": Shard(0)}, "grads.w": {}}
    return Case(f"rope-{name}-tp{tp}", turned_projection, distributed, {"tp": tp}, inputs, relation)


def projection_cases():
    for tp in TP:
        yield projection_case("own-tokens", turned_projection_of_own_tokens(16), tp)
        yield projection_case("table", turned_projection_from_a_table, tp, sequence=8)
    yield projection_case("own-tokens-uneven", turned_projection_of_own_tokens(10), 4, sequence=10)


def projection_faults():
    base = projection_case("", turned_projection_from_a_table, 4)
    yield faulty(base, "rope-from-zero", turned_projection_from_zero, "positions start at zero on every rank")
    yield faulty(base, "rope-off-by-one", turned_projection_off_by_one, "the later ranks start one position early")


# ---------------------------------------------------------------------- tokens split, keys and values gathered
def causal_attention(x, wqkv, wo, dy):
    """x: [sequence, batch, hidden], the heads complete."""
    p = leaves({"x": x, "wqkv": wqkv, "wo": wo})
    q, k, v = (heads_last(t).permute(1, 2, 0, 3) for t in F.linear(p["x"], p["wqkv"]).chunk(3, -1))
    positions = torch.arange(x.size(0))
    q, k = turned_by_halves(q, positions), turned_by_halves(k, positions)
    scores = q @ k.mT * HEAD**-0.5
    scores = scores.masked_fill(positions[None, :] > positions[:, None], float("-inf"))
    y = F.linear((scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2), p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def causal_attention_of_own_queries(x, wqkv, wo, dy, mesh):
    """A rank's queries meet the keys and values of all ranks; mask and angles know where the rank's tokens are."""
    group = mesh.get_group("tp")
    p = leaves({"x": x, "wqkv": wqkv, "wo": wo})
    q, k, v = F.linear(p["x"], p["wqkv"]).chunk(3, -1)
    k, v = gather_sequence(k, group), gather_sequence(v, group)
    q, k, v = (heads_last(t).permute(1, 2, 0, 3) for t in (q, k, v))
    everywhere = torch.arange(k.size(2))
    mine = dist.get_rank(group) * x.size(0) + torch.arange(x.size(0))
    q, k = turned_by_halves(q, mine), turned_by_halves(k, everywhere)
    scores = q @ k.mT * HEAD**-0.5
    scores = scores.masked_fill(everywhere[None, :] > mine[:, None], float("-inf"))
    y = F.linear((scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2), p["wo"])
    grads = gradients(y, p, dy)
    for name in ("wqkv", "wo"):
        dist.all_reduce(grads[name], group=group)
    return {"y": y.detach(), "grads": grads}


def causal_attention_with_local_mask(x, wqkv, wo, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "wqkv": wqkv, "wo": wo})
    q, k, v = F.linear(p["x"], p["wqkv"]).chunk(3, -1)
    k, v = gather_sequence(k, group), gather_sequence(v, group)
    q, k, v = (heads_last(t).permute(1, 2, 0, 3) for t in (q, k, v))
    everywhere = torch.arange(k.size(2))
    mine = dist.get_rank(group) * x.size(0) + torch.arange(x.size(0))
    q, k = turned_by_halves(q, mine), turned_by_halves(k, everywhere)
    scores = q @ k.mT * HEAD**-0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, float("-inf"))  # fault: the mask of the first tokens on every rank
    y = F.linear((scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2), p["wo"])
    grads = gradients(y, p, dy)
    for name in ("wqkv", "wo"):
        dist.all_reduce(grads[name], group=group)
    return {"y": y.detach(), "grads": grads}


def own_queries_case(name, distributed, tp, sequence=8):
    inputs = {
        "x": Input((sequence, BATCH, HIDDEN), Shard(0)),
        "wqkv": Input((3 * 3 * HEAD, HIDDEN)),
        "wo": Input((HIDDEN, 3 * HEAD)),
        "dy": Input((sequence, BATCH, HIDDEN), Shard(0)),
    }
    relation = {"y": {"tp": Shard(0)}, "grads.x": {"tp": Shard(0)}, "grads.wqkv": {}, "grads.wo": {}}
    return Case(f"rope-{name}-tp{tp}", causal_attention, distributed, {"tp": tp}, inputs, relation)


def own_queries_cases():
    for tp in TP:
        yield own_queries_case("own-queries", causal_attention_of_own_queries, tp)


def own_queries_faults():
    base = own_queries_case("", causal_attention_of_own_queries, 2)
    yield faulty(base, "rope-local-mask", causal_attention_with_local_mask, "the mask of the first tokens on every rank")


CASES = [
    *attention_cases(), *projection_cases(), *own_queries_cases(),
    *attention_faults(), *projection_faults(), *own_queries_faults(),
]  # fmt: skip
