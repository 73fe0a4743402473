"""Attention split by heads: all heads alike, grouped and single key-value heads, fused projections, masks."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, reduce_from
from graphguard import Input, Shard

TP = (2, 4, 8)
BATCH, SEQUENCE, HIDDEN, HEAD = 2, 5, 6, 3
COLUMN, ROW = Shard(0), Shard(1)


def heads_first(t):
    """[batch, sequence, heads * head] as [batch, heads, sequence, head]."""
    return t.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def merged(t):
    return t.transpose(1, 2).flatten(2)


def summed(grads, names, group):
    for name in names:
        dist.all_reduce(grads[name], group=group)
    return grads


def attention_inputs(heads, kv_heads, split_q, split_kv):
    """Weights as F.linear has them; `split_kv` is None where all ranks hold all key-value heads."""
    kv = {} if split_kv is None else split_kv(COLUMN)
    return {
        "x": Input((BATCH, SEQUENCE, HIDDEN)),
        "wq": Input((heads * HEAD, HIDDEN), split_q(COLUMN)),
        "wk": Input((kv_heads * HEAD, HIDDEN), kv),
        "wv": Input((kv_heads * HEAD, HIDDEN), kv),
        "wo": Input((HIDDEN, heads * HEAD), split_q(ROW)),
        "dy": Input((BATCH, SEQUENCE, HIDDEN)),
    }


def relation_of(inputs):
    """The output is whole; every gradient is placed as its input."""
    wanted = {key: spec.placement for key, spec in inputs.items() if key not in ("dy", "mask")}
    return {"y": {}, **{f"grads.{key}": p if isinstance(p, dict) else {} for key, p in wanted.items()}}


def on_tp(placement):
    return {"tp": placement}


# ---------------------------------------------------------------------- one key-value head per query head
def causal_weights(scores):
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


def causal_softmax(q, k, v):
    """Scores, mask and softmax written out."""
    return causal_weights(q @ k.transpose(-1, -2) / math.sqrt(HEAD)) @ v


def multi_head(x, dy, **params):
    p = leaves({"x": x, **params})
    q, k, v = (heads_first(F.linear(p["x"], p[f"w{part}"], p[f"b{part}"])) for part in "qkv")
    y = F.linear(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)), p["wo"], p["bo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def multi_head_tp(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"], p[f"b{part}"])) for part in "qkv")
    h = merged(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    y = reduce_from(F.linear(h, p["wo"]), group) + p["bo"]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def multi_head_written_out(x, dy, **params):
    p = leaves({"x": x, **params})
    q, k, v = (heads_first(F.linear(p["x"], p[f"w{part}"], p[f"b{part}"])) for part in "qkv")
    y = F.linear(merged(causal_softmax(q, k, v)), p["wo"], p["bo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def multi_head_written_out_tp(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"], p[f"b{part}"])) for part in "qkv")
    y = reduce_from(F.linear(merged(causal_softmax(q, k, v)), p["wo"]), group) + p["bo"]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def multi_head_scaled_by_all_heads(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"], p[f"b{part}"])) for part in "qkv")
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD * dist.get_world_size(group))  # fault: scaled by the number of ranks
    y = reduce_from(F.linear(merged(causal_weights(scores) @ v), p["wo"]), group) + p["bo"]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def multi_head_mask_off_by_one(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"], p[f"b{part}"])) for part in "qkv")
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD)
    future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(2)
    scores = scores.masked_fill(future, float("-inf"))  # fault: each token sees the next one
    y = reduce_from(F.linear(merged(scores.softmax(-1) @ v), p["wo"]), group) + p["bo"]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def multi_head_without_reduction(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"], p[f"b{part}"])) for part in "qkv")
    h = F.linear(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)), p["wo"])
    y = h + p["bo"]  # fault: the heads' outputs are not summed
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def multi_head_softmax_over_queries(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"], p[f"b{part}"])) for part in "qkv")
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD)
    future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, float("-inf")).softmax(-2)  # fault: normalised over the queries
    y = reduce_from(F.linear(merged(probabilities @ v), p["wo"]), group) + p["bo"]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def multi_head_case(name, sequential, distributed, tp, heads=8):
    inputs = attention_inputs(heads, heads, on_tp, on_tp)
    inputs |= {f"b{part}": Input((heads * HEAD,), {"tp": COLUMN}) for part in "qkv"} | {"bo": Input((HIDDEN,), {})}
    return Case(f"attention-{name}-tp{tp}", sequential, distributed, {"tp": tp}, inputs, relation_of(inputs))


def multi_head_cases():
    for tp in TP:
        yield multi_head_case("multi-head", multi_head, multi_head_tp, tp)
        yield multi_head_case("written-out", multi_head_written_out, multi_head_written_out_tp, tp, 16)


def multi_head_faults():
    base = multi_head_case("", multi_head_written_out, multi_head_written_out_tp, 2)
    yield faulty(base, "attention-scaled-by-ranks", multi_head_scaled_by_all_heads, "scaled by the number of ranks")
    yield faulty(base, "attention-mask-off-by-one", multi_head_mask_off_by_one, "each token sees the next one")
    yield faulty(base, "attention-softmax-over-queries", multi_head_softmax_over_queries, "normalised over the queries")
    base = multi_head_case("", multi_head, multi_head_tp, 4)
    yield faulty(base, "attention-missing-reduction", multi_head_without_reduction, "the heads' outputs are not summed")


# ---------------------------------------------------------------------- heads as a dim of the weights
def by_einsum(x, dy, **params):
    """wq, wk, wv, wo: [heads, head, hidden]."""
    p = leaves({"x": x, **params})
    q, k, v = (torch.einsum("bsm,hdm->bhsd", p["x"], p[f"w{part}"]) for part in "qkv")
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(HEAD)
    y = torch.einsum("bhqk,bhkd,hdm->bqm", causal_weights(scores), v, p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def by_einsum_tp(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (torch.einsum("bsm,hdm->bhsd", h, p[f"w{part}"]) for part in "qkv")
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(HEAD)
    y = reduce_from(torch.einsum("bhqk,bhkd,hdm->bqm", causal_weights(scores), v, p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def einsum_case(name, tp, heads):
    inputs = {f"w{part}": Input((heads, HEAD, HIDDEN), {"tp": Shard(0)}) for part in "qkvo"}
    inputs |= {key: Input((BATCH, SEQUENCE, HIDDEN)) for key in ("x", "dy")}
    return Case(f"attention-{name}-tp{tp}", by_einsum, by_einsum_tp, {"tp": tp}, inputs, relation_of(inputs))


def einsum_cases():
    for tp in TP:
        yield einsum_case("einsum", tp, 8)
    yield einsum_case("einsum-uneven", 2, 7)
    yield einsum_case("einsum-uneven", 4, 7)


# ---------------------------------------------------------------------- an additive mask
def with_mask(x, mask, dy, **params):
    """The mask is an input, added to the scores of all heads."""
    p = leaves({"x": x, **params})
    q, k, v = (heads_first(F.linear(p["x"], p[f"w{part}"])) for part in "qkv")
    probabilities = torch.softmax(torch.matmul(q, k.mT) * HEAD**-0.5 + mask, dim=-1)
    y = F.linear(merged(probabilities @ v), p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def with_mask_tp(x, mask, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "qkv")
    probabilities = torch.softmax(torch.matmul(q, k.mT) * HEAD**-0.5 + mask, dim=-1)
    y = reduce_from(F.linear(merged(probabilities @ v), p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def with_bias_per_head(x, bias, dy, **params):
    """A learned bias of the scores, one matrix per head."""
    p = leaves({"x": x, "bias": bias, **params})
    q, k, v = (heads_first(F.linear(p["x"], p[f"w{part}"])) for part in "qkv")
    causal = torch.full((SEQUENCE, SEQUENCE), -1e9).triu(1)
    y = F.linear(merged((q @ k.mT + p["bias"] + causal).softmax(-1) @ v), p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def with_bias_per_head_tp(x, bias, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, "bias": bias, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "qkv")
    causal = torch.full((SEQUENCE, SEQUENCE), -1e9).triu(1)
    y = reduce_from(F.linear(merged((q @ k.mT + p["bias"] + causal).softmax(-1) @ v), p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def masked_case(name, sequential, distributed, tp, extra, heads=8):
    inputs = attention_inputs(heads, heads, on_tp, on_tp) | extra
    return Case(f"attention-{name}-tp{tp}", sequential, distributed, {"tp": tp}, inputs, relation_of(inputs))


def masked_cases():
    for tp in TP:
        mask = {"mask": Input((BATCH, 1, SEQUENCE, SEQUENCE))}
        yield masked_case("additive-mask", with_mask, with_mask_tp, tp, mask)
        bias = {"bias": Input((8, SEQUENCE, SEQUENCE), {"tp": Shard(0)})}
        yield masked_case("bias-per-head", with_bias_per_head, with_bias_per_head_tp, tp, bias)


# ---------------------------------------------------------------------- grouped key-value heads
def grouped(x, dy, **params):
    p = leaves({"x": x, **params})
    q, k, v = (heads_first(F.linear(p["x"], p[f"w{part}"])) for part in "qkv")
    y = F.linear(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)), p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def grouped_tp(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "qkv")
    h = merged(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    y = reduce_from(F.linear(h, p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def repeated(kv, times):
    """Every key-value head `times` times in a row, by an expanded view as Llama does it."""
    batch, heads, sequence, head = kv.shape
    return kv[:, :, None].expand(batch, heads, times, sequence, head).reshape(batch, heads * times, sequence, head)


def grouped_repeated(x, dy, **params):
    p = leaves({"x": x, **params})
    q, k, v = (heads_first(F.linear(p["x"], p[f"w{part}"])) for part in "qkv")
    times = q.size(1) // k.size(1)
    y = F.linear(merged(causal_softmax(q, repeated(k, times), repeated(v, times))), p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def grouped_repeated_tp(x, dy, mesh, **params):
    """The ranks repeat by another operator than the sequential program."""
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "qkv")
    times = q.size(1) // k.size(1)
    h = causal_softmax(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
    y = reduce_from(F.linear(merged(h), p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def grouped_repeated_in_turn(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "qkv")
    times = q.size(1) // k.size(1)
    k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
    scores = q @ k.mT  # fault: key-value heads repeated in turn
    y = reduce_from(F.linear(merged(causal_weights(scores / math.sqrt(HEAD)) @ v), p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def grouped_case(name, sequential, distributed, tp, heads=16, kv_heads=8):
    inputs = attention_inputs(heads, kv_heads, on_tp, on_tp)
    return Case(f"attention-{name}-tp{tp}", sequential, distributed, {"tp": tp}, inputs, relation_of(inputs))


def grouped_cases():
    for tp in TP:
        yield grouped_case("grouped", grouped, grouped_tp, tp)
        yield grouped_case("grouped-repeated", grouped_repeated, grouped_repeated_tp, tp)


def grouped_faults():
    base = grouped_case("", grouped_repeated, grouped_repeated_tp, 4)
    yield faulty(base, "attention-repeated-in-turn", grouped_repeated_in_turn, "key-value heads repeated in turn")


# ---------------------------------------------------------------------- one key-value head, on all ranks
def single(x, dy, **params):
    p = leaves({"x": x, **params})
    q, k, v = (heads_first(F.linear(p["x"], p[f"w{part}"])) for part in "qkv")
    y = F.linear(merged(causal_softmax(q, k, v)), p["wo"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def single_tp(x, dy, mesh, **params):
    """Every rank computes the one key-value head; each has only its own queries' gradient of it."""
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "qkv")
    y = reduce_from(F.linear(merged(causal_softmax(q, k, v)), p["wo"]), group)
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("wk", "wv"), group)}


def single_by_regions(x, dy, mesh, **params):
    """Key and value are computed outside the parallel region, so that their gradients enter it whole."""
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    q = heads_first(F.linear(copy_to(p["x"], group), p["wq"]))
    k, v = (copy_to(heads_first(F.linear(p["x"], p[f"w{part}"])), group) for part in "kv")
    y = reduce_from(F.linear(merged(causal_softmax(q, k, v)), p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def single_with_partial_gradients(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], group)
    q = heads_first(F.linear(h, p["wq"]))
    k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "kv")  # fault: the shared head's gradients are not summed
    y = reduce_from(F.linear(merged(causal_softmax(q, k, v)), p["wo"]), group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def single_summed_twice(x, dy, mesh, **params):
    group = mesh.get_group("tp")
    p = leaves({"x": x, **params})
    q = heads_first(F.linear(copy_to(p["x"], group), p["wq"]))
    k, v = (copy_to(heads_first(F.linear(p["x"], p[f"w{part}"])), group) for part in "kv")
    y = reduce_from(F.linear(merged(causal_softmax(q, k, v)), p["wo"]), group)
    grads = gradients(y, p, dy)
    dist.all_reduce(grads["wk"], group=group)  # fault: the gradient of wk is already complete
    return {"y": y.detach(), "grads": grads}


def single_case(name, distributed, tp, heads=8):
    inputs = attention_inputs(heads, 1, on_tp, None)
    return Case(f"attention-{name}-tp{tp}", single, distributed, {"tp": tp}, inputs, relation_of(inputs))


def single_cases():
    for tp in TP:
        yield single_case("single-kv", single_tp, tp)
        yield single_case("single-kv-by-regions", single_by_regions, tp, 16)


def single_faults():
    base = single_case("", single_tp, 4)
    yield faulty(
        base, "attention-shared-head-partial", single_with_partial_gradients, "the shared head's gradients are not summed",
        stated=("grads.wk", "grads.wv"),
    )  # fmt: skip
    yield faulty(base, "attention-shared-head-summed-twice", single_summed_twice, "the gradient of wk is already complete")


# ---------------------------------------------------------------------- fewer key-value heads than ranks
def shared_heads(x, dy, mesh, **params):
    """The axis `kv` splits the key-value heads; the ranks of `share` hold the same ones and split their queries."""
    share = mesh.get_group("share")
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], None)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "qkv")
    times = q.size(1) // k.size(1)
    y = reduce_from(F.linear(merged(causal_softmax(q, repeated(k, times), repeated(v, times))), p["wo"]), None)
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("wk", "wv"), share)}


def shared_heads_wrong_group(x, dy, mesh, **params):
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], None)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "qkv")
    times = q.size(1) // k.size(1)
    y = reduce_from(F.linear(merged(causal_softmax(q, repeated(k, times), repeated(v, times))), p["wo"]), None)
    grads = gradients(y, p, dy)
    for name in ("wk", "wv"):
        dist.all_reduce(grads[name])  # fault: summed over ranks with other heads
    return {"y": y.detach(), "grads": grads}


def shared_case(name, distributed, kv, share, heads=16):
    inputs = attention_inputs(heads, kv, lambda p: {"kv": p, "share": p}, lambda p: {"kv": p})
    return Case(
        f"attention-{name}-kv{kv}x{share}",
        grouped_repeated,
        distributed,
        {"kv": kv, "share": share},
        inputs,
        relation_of(inputs),
    )


def own_rows(weight, rank, ranks):
    """The rows of the one key-value head that a rank's queries use."""
    kv_heads = weight.size(0) // HEAD
    head = rank * kv_heads // ranks
    return weight[head * HEAD : (head + 1) * HEAD]


def replicated_heads(x, dy, **params):
    """One axis: each rank has a copy of one head, and puts its gradient into the whole weight's."""
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], None)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "qkv")
    y = reduce_from(F.linear(merged(causal_softmax(q, k, v)), p["wo"]), None)
    grads = gradients(y, p, dy)
    head = dist.get_rank() * KV_HEADS // dist.get_world_size()
    for name in ("wk", "wv"):
        whole = torch.zeros(KV_HEADS * HEAD, HIDDEN)
        whole[head * HEAD : (head + 1) * HEAD] = grads[name]
        dist.all_reduce(whole)
        grads[name] = whole
    return {"y": y.detach(), "grads": grads}


def replicated_heads_in_turn(x, dy, **params):
    p = leaves({"x": x, **params})
    h = copy_to(p["x"], None)
    q, k, v = (heads_first(F.linear(h, p[f"w{part}"])) for part in "qkv")
    y = reduce_from(F.linear(merged(causal_softmax(q, k, v)), p["wo"]), None)
    grads = gradients(y, p, dy)
    head = dist.get_rank() % KV_HEADS
    for name in ("wk", "wv"):
        whole = torch.zeros(KV_HEADS * HEAD, HIDDEN)
        whole[head * HEAD : (head + 1) * HEAD] = grads[name]  # fault: the rows of another head
        dist.all_reduce(whole)
        grads[name] = whole
    return {"y": y.detach(), "grads": grads}


KV_HEADS = 2


def replicated_case(name, distributed, tp, heads=16):
    inputs = attention_inputs(heads, KV_HEADS, on_tp, None)
    relation = relation_of(inputs)
    for key in ("wk", "wv"):
        inputs[key] = Input((KV_HEADS * HEAD, HIDDEN), local=lambda full, coord: own_rows(full, coord["tp"], tp))
    return Case(f"attention-{name}-tp{tp}", grouped_repeated, distributed, {"tp": tp}, inputs, relation)


def shared_cases():
    for kv, share in ((2, 2), (2, 4), (4, 2)):
        yield shared_case("shared-kv", shared_heads, kv, share)
    for tp in (4, 8):
        yield replicated_case("replicated-kv", replicated_heads, tp)


def shared_faults():
    base = shared_case("", shared_heads, 2, 2)
    yield faulty(base, "attention-shared-wrong-group", shared_heads_wrong_group, "summed over ranks with other heads")
    base = replicated_case("", replicated_heads, 4)
    yield faulty(base, "attention-replicated-in-turn", replicated_heads_in_turn, "the rows of another head")


CASES = [
    *multi_head_cases(), *einsum_cases(), *masked_cases(), *grouped_cases(), *single_cases(), *shared_cases(),
    *multi_head_faults(), *grouped_faults(), *single_faults(), *shared_faults(),
]  # fmt: skip
