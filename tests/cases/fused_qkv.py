"""Attention with one fused projection of queries, keys and values, in its usual layouts."""

import math

import torch
import torch.nn.functional as F

from cases.attention import BATCH, HEAD, HIDDEN, SEQUENCE, TP, causal_softmax, causal_weights, heads_first, merged, repeated
from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, reduce_from
from graphguard import Input, Shard


# ---------------------------------------------------------------------- blocks: all queries, all keys, all values
def separate(x, wq, wk, wv, wo, dy):
    p = leaves({"x": x, "wq": wq, "wk": wk, "wv": wv, "wo": wo})
    q, k, v = (heads_first(F.linear(p["x"], p[f"w{part}"])) for part in "qkv")
    times = q.size(1) // k.size(1)
    y = F.linear(merged(causal_softmax(q, repeated(k, times), repeated(v, times))), p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def block_sizes(wqkv, wo):
    """A rank's rows of queries, as many as wo has columns, then equally many of keys and of values."""
    queries = wo.size(1)
    return [queries, *[(wqkv.size(0) - queries) // 2] * 2]


def blocks_tp(x, wqkv, wo, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "wqkv": wqkv, "wo": wo})
    sizes = block_sizes(wqkv, wo)
    q, k, v = (heads_first(part) for part in F.linear(copy_to(p["x"], group), p["wqkv"]).split(sizes, -1))
    times = q.size(1) // k.size(1)
    y = reduce_from(F.linear(merged(causal_softmax(q, repeated(k, times), repeated(v, times))), p["wo"]), group)
    grads = gradients(y, p, dy)
    grads |= dict(zip(("wq", "wk", "wv"), grads.pop("wqkv").split(sizes), strict=True))
    return {"y": y.detach(), "grads": grads}


def blocks_resharded_as_one(x, wqkv, wo, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "wqkv": wqkv, "wo": wo})
    sizes = block_sizes(wqkv, wo)
    q, k, v = (heads_first(part) for part in F.linear(copy_to(p["x"], group), p["wqkv"]).split(sizes, -1))
    times = q.size(1) // k.size(1)
    scores = q @ repeated(k, times).mT / math.sqrt(HEAD)  # fault: not the rows that their names say
    y = reduce_from(F.linear(merged(causal_weights(scores) @ repeated(v, times)), p["wo"]), group)
    grads = gradients(y, p, dy)
    grads |= dict(zip(("wq", "wk", "wv"), grads.pop("wqkv").split(sizes), strict=True))
    return {"y": y.detach(), "grads": grads}


def blocks_keys_and_values_swapped(x, wqkv, wo, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "wqkv": wqkv, "wo": wo})
    sizes = block_sizes(wqkv, wo)
    q, v, k = (heads_first(part) for part in F.linear(copy_to(p["x"], group), p["wqkv"]).split(sizes, -1))
    times = q.size(1) // k.size(1)
    scores = q @ repeated(k, times).mT / math.sqrt(HEAD)  # fault: keys and values are swapped
    y = reduce_from(F.linear(merged(causal_weights(scores) @ repeated(v, times)), p["wo"]), group)
    grads = gradients(y, p, dy)
    grads |= dict(zip(("wq", "wk", "wv"), grads.pop("wqkv").split(sizes), strict=True))
    return {"y": y.detach(), "grads": grads}


def own_blocks(full, rank, tp):
    return torch.cat([full[f"w{part}"].chunk(tp)[rank] for part in "qkv"])


def own_rows_of_all(full, rank, tp):
    return torch.cat([full[f"w{part}"] for part in "qkv"]).chunk(tp)[rank]


def blocks_case(name, distributed, tp, rows=own_blocks, *, heads=16, kv_heads=8):
    shapes = {
        "x": (BATCH, SEQUENCE, HIDDEN), "wq": (heads * HEAD, HIDDEN), "wk": (kv_heads * HEAD, HIDDEN),
        "wv": (kv_heads * HEAD, HIDDEN), "wo": (HIDDEN, heads * HEAD), "dy": (BATCH, SEQUENCE, HIDDEN),
    }  # fmt: skip

    def mine(full, coord):
        rank = coord["tp"]
        wo = full["wo"].chunk(tp, 1)[rank]
        return {"x": full["x"], "wqkv": rows(full, rank, tp), "wo": wo, "dy": full["dy"]}

    inputs = {key: Input(shape) for key, shape in shapes.items()}
    relation = {"y": {}, "grads.x": {}, **{f"grads.w{part}": {"tp": Shard(0)} for part in "qkv"}, "grads.wo": {"tp": Shard(1)}}
    return Case(f"fused-qkv-{name}-tp{tp}", separate, distributed, {"tp": tp}, inputs, relation, local_inputs=mine)


# ---------------------------------------------------------------------- interleaved: each head's query, key and value
def interleaved(x, wqkv, bqkv, wo, dy):
    """wqkv: [heads * 3 * head, hidden]."""
    p = leaves({"x": x, "wqkv": wqkv, "bqkv": bqkv, "wo": wo})
    fused = F.linear(p["x"], p["wqkv"], p["bqkv"]).unflatten(-1, (-1, 3 * HEAD)).transpose(1, 2)
    q, k, v = fused.split(HEAD, -1)
    y = F.linear(merged(causal_softmax(q, k, v)), p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def interleaved_tp(x, wqkv, bqkv, wo, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "wqkv": wqkv, "bqkv": bqkv, "wo": wo})
    fused = F.linear(copy_to(p["x"], group), p["wqkv"], p["bqkv"]).unflatten(-1, (-1, 3 * HEAD)).transpose(1, 2)
    q, k, v = fused.split(HEAD, -1)
    y = reduce_from(F.linear(merged(causal_softmax(q, k, v)), p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def interleaved_read_as_blocks(x, wqkv, bqkv, wo, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "wqkv": wqkv, "bqkv": bqkv, "wo": wo})
    fused = F.linear(copy_to(p["x"], group), p["wqkv"], p["bqkv"])
    q, k, v = (heads_first(part) for part in fused.chunk(3, -1))
    scores = q @ k.mT / math.sqrt(HEAD)  # fault: interleaved rows read as blocks
    y = reduce_from(F.linear(merged(causal_weights(scores) @ v), p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def interleaved_case(name, distributed, tp, heads=8):
    inputs = {
        "x": Input((BATCH, SEQUENCE, HIDDEN)),
        "wqkv": Input((heads * 3 * HEAD, HIDDEN), Shard(0)),
        "bqkv": Input((heads * 3 * HEAD,), Shard(0)),
        "wo": Input((HIDDEN, heads * HEAD), Shard(1)),
        "dy": Input((BATCH, SEQUENCE, HIDDEN)),
    }
    relation = {
        "y": {}, "grads.x": {}, "grads.wqkv": {"tp": Shard(0)}, "grads.bqkv": {"tp": Shard(0)}, "grads.wo": {"tp": Shard(1)},
    }  # fmt: skip
    return Case(f"fused-qkv-{name}-tp{tp}", interleaved, distributed, {"tp": tp}, inputs, relation)


# ---------------------------------------------------------------------- groups: each key-value head after its queries
def split_groups(fused, queries):
    """[sequence, batch, groups * (queries + 2) * head] as heads of queries, keys and values."""
    fused = fused.unflatten(-1, (-1, (queries + 2) * HEAD))
    q, k, v = fused.split([queries * HEAD, HEAD, HEAD], -1)
    q = q.reshape(*q.shape[:2], -1, HEAD)
    return tuple(t.permute(1, 2, 0, 3) for t in (q, k.repeat_interleave(queries, 2), v.repeat_interleave(queries, 2)))


def groups(x, wqkv, wo, dy):
    """x: [sequence, batch, hidden]; wqkv: [groups * (queries + 2) * head, hidden]."""
    p = leaves({"x": x, "wqkv": wqkv, "wo": wo})
    q, k, v = split_groups(F.linear(p["x"], p["wqkv"]), QUERIES)
    h = causal_softmax(q, k, v).permute(2, 0, 1, 3).flatten(2)
    y = F.linear(h, p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def groups_tp(x, wqkv, wo, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "wqkv": wqkv, "wo": wo})
    q, k, v = split_groups(F.linear(copy_to(p["x"], group), p["wqkv"]), QUERIES)
    h = causal_softmax(q, k, v).permute(2, 0, 1, 3).flatten(2)
    y = reduce_from(F.linear(h, p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


QUERIES = 2  # per key-value head


def groups_case(tp, heads=8):
    inputs = {
        "x": Input((SEQUENCE, BATCH, HIDDEN)),
        "wqkv": Input((heads * (QUERIES + 2) * HEAD, HIDDEN), Shard(0)),
        "wo": Input((HIDDEN, heads * QUERIES * HEAD), Shard(1)),
        "dy": Input((SEQUENCE, BATCH, HIDDEN)),
    }
    relation = {"y": {}, "grads.x": {}, "grads.wqkv": {"tp": Shard(0)}, "grads.wo": {"tp": Shard(1)}}
    return Case(f"fused-qkv-groups-tp{tp}", groups, groups_tp, {"tp": tp}, inputs, relation)


def cases():
    for tp in TP:
        yield blocks_case("blocks", blocks_tp, tp)
        yield blocks_case("blocks-of-equal-heads", blocks_tp, tp, heads=8, kv_heads=8)
        yield interleaved_case("interleaved", interleaved_tp, tp)
        yield groups_case(tp)


def faults():
    base = blocks_case("", blocks_tp, 2)
    yield faulty(base, "fused-qkv-swapped", blocks_keys_and_values_swapped, "keys and values are swapped")
    base = blocks_case("", blocks_tp, 2, own_rows_of_all)
    yield faulty(base, "fused-qkv-resharded-as-one", blocks_resharded_as_one, "not the rows that their names say")
    base = interleaved_case("", interleaved_tp, 4)
    yield faulty(base, "fused-qkv-read-as-blocks", interleaved_read_as_blocks, "interleaved rows read as blocks")


CASES = [*cases(), *faults()]
