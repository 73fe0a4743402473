"""The six faults that GraphGuard's publication reports, each beside its repair."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from cases.case import Case, faulty
from cases.data import summed
from cases.norms import differentiated, leaves
from cases.regions import gather_sequence, scatter_sequence
from cases.sequence import WholeFromSequence
from graphguard import Shard

AUXILIARY = 0.125


def sum_gradients(out, *names):
    for name in names:
        dist.all_reduce(out["grads"][name])
    return out


# ---------------------------------------------------------------------- 1. rotary embeddings on a part of the sequence
def rotation(positions, dim):
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return angles.cos()[:, None], angles.sin()[:, None]


def rotated(x, cos, sin):
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def attention(q, k, v, first):
    """Causal; `first` is the position of the first query."""
    queries, keys = torch.arange(q.size(0)) + first, torch.arange(k.size(0))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.size(-1) ** 0.5
    weights = scores.masked_fill(keys > queries[:, None], float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def project(x, wq, wk, wv):
    return [torch.einsum("sm,mhd->shd", x, w) for w in (wq, wk, wv)]


def rotary(x, wq, wk, wv, dy):
    leaves(x, wq, wk, wv)
    q, k, v = project(x, wq, wk, wv)
    cos, sin = rotation(torch.arange(x.size(0)), q.size(-1))
    y = attention(rotated(q, cos, sin), rotated(k, cos, sin), v, 0)
    return differentiated(y, dy, x=x, wq=wq, wk=wk, wv=wv)


def split_attention(q, k, v):
    return attention(q, gather_sequence(k, None), gather_sequence(v, None), dist.get_rank() * q.size(0))


def split_rotary(x, wq, wk, wv, dy):
    leaves(x, wq, wk, wv)
    q, k, v = project(x, wq, wk, wv)
    positions = torch.arange(x.size(0)) + dist.get_rank() * x.size(0)
    cos, sin = rotation(positions, q.size(-1))
    y = split_attention(rotated(q, cos, sin), rotated(k, cos, sin), v)
    return sum_gradients(differentiated(y, dy, x=x, wq=wq, wk=wk, wv=wv), "wq", "wk", "wv")


def split_rotary_from_table(x, wq, wk, wv, dy):
    """The table is made for the whole sequence, and sliced."""
    leaves(x, wq, wk, wv)
    rank, length = dist.get_rank(), x.size(0)
    q, k, v = project(x, wq, wk, wv)
    table = rotation(torch.arange(length * dist.get_world_size()), q.size(-1))
    cos, sin = [part[rank * length : (rank + 1) * length] for part in table]
    y = split_attention(rotated(q, cos, sin), rotated(k, cos, sin), v)
    return sum_gradients(differentiated(y, dy, x=x, wq=wq, wk=wk, wv=wv), "wq", "wk", "wv")


def split_rotary_without_offset(x, wq, wk, wv, dy):
    leaves(x, wq, wk, wv)
    q, k, v = project(x, wq, wk, wv)
    cos, sin = rotation(torch.arange(x.size(0)), q.size(-1))  # fault: the positions of every rank begin at zero
    y = split_attention(rotated(q, cos, sin), rotated(k, cos, sin), v)
    return sum_gradients(differentiated(y, dy, x=x, wq=wq, wk=wk, wv=wv), "wq", "wk", "wv")


def rotary_case(name, distributed, size):
    split = {"tp": Shard(0)}
    inputs = {"x": gg.Input((8, 6), split)} | {key: gg.Input((6, 3, 4)) for key in ("wq", "wk", "wv")}
    inputs["dy"] = gg.Input((8, 3, 4), split)
    relation = {"y": split, "grads.x": split, "grads.wq": {}, "grads.wk": {}, "grads.wv": {}}
    return Case(f"published-{name}-{size}", rotary, distributed, {"tp": size}, inputs, relation)


# ---------------------------------------------------------------------- 2. the auxiliary loss of a router
def experts(x, probabilities, w1, w2):
    hidden = F.gelu(torch.einsum("td,edf->tef", x, w1))
    return torch.einsum("te,tef,efd->td", probabilities, hidden, w2)


def balance(probabilities):
    return probabilities.size(1) * probabilities.mean(0).square().sum()


def with_gradients(loss, reported, x, wr, w1, w2):
    grads = torch.autograd.grad(loss, (x, wr, w1, w2))
    return {"loss": reported.detach(), "grads": dict(zip(("x", "wr", "w1", "w2"), grads, strict=True))}


def routed(x, t, wr, w1, w2):
    leaves(x, wr, w1, w2)
    probabilities = (x @ wr).softmax(-1)
    loss = (experts(x, probabilities, w1, w2) - t).square().mean() + AUXILIARY * balance(probabilities)
    return with_gradients(loss, loss, x, wr, w1, w2)


def routed_on_sequence(x, t, wr, w1, w2):
    """The balance is computed from all tokens on every rank, whose gradients are then summed: each takes its share."""
    leaves(x, wr, w1, w2)
    size = dist.get_world_size()
    probabilities = (x @ wr).softmax(-1)
    main = (experts(x, probabilities, w1, w2) - t).square().mean() / size
    auxiliary = AUXILIARY * balance(gather_sequence(probabilities, None))
    out = with_gradients(main + auxiliary / size, summed(main) + auxiliary, x, wr, w1, w2)
    return sum_gradients(out, "wr", "w1", "w2")


def routed_with_whole_auxiliary_loss(x, t, wr, w1, w2):
    leaves(x, wr, w1, w2)
    probabilities = (x @ wr).softmax(-1)
    main = (experts(x, probabilities, w1, w2) - t).square().mean() / dist.get_world_size()
    auxiliary = AUXILIARY * balance(gather_sequence(probabilities, None))
    loss = main + auxiliary  # fault: the auxiliary loss is not divided by the number of ranks
    return sum_gradients(with_gradients(loss, summed(main) + auxiliary, x, wr, w1, w2), "wr", "w1", "w2")


def routed_case(name, distributed, size):
    split = {"tp": Shard(0)}
    inputs = {
        "x": gg.Input((8, 6), split),
        "t": gg.Input((8, 6), split),
        "wr": gg.Input((6, 4)),
        "w1": gg.Input((4, 6, 5)),
        "w2": gg.Input((4, 5, 6)),
    }
    relation = {"loss": {}, "grads.x": split, "grads.wr": {}, "grads.w1": {}, "grads.w2": {}}
    return Case(f"published-{name}-{size}", routed, distributed, {"tp": size}, inputs, relation)


# ---------------------------------------------------------------------- 3. padding and slicing
def feed_forward(x, a, b, dy):
    leaves(x, a, b)
    return differentiated(F.gelu(x @ a) @ b, dy, x=x, a=a, b=b)


def padding_of(x):
    return -x.size(0) % dist.get_world_size()


def padded_behind(x, a, b, dy):
    leaves(x, a, b)
    own = scatter_sequence(F.pad(x, (0, 0, 0, padding_of(x))), None)
    y = WholeFromSequence.apply(F.gelu(own @ a) @ b)[: x.size(0)]
    return sum_gradients(differentiated(y, dy, x=x, a=a, b=b), "a", "b")


def padded_in_front(x, a, b, dy):
    leaves(x, a, b)
    own = scatter_sequence(F.pad(x, (0, 0, padding_of(x), 0)), None)
    y = WholeFromSequence.apply(F.gelu(own @ a) @ b)[padding_of(x) :]
    return sum_gradients(differentiated(y, dy, x=x, a=a, b=b), "a", "b")


def padded_in_front_and_cut_behind(x, a, b, dy):
    leaves(x, a, b)
    own = scatter_sequence(F.pad(x, (0, 0, padding_of(x), 0)), None)
    padded = WholeFromSequence.apply(F.gelu(own @ a) @ b)
    y = padded[: x.size(0)]  # fault: cut at the other end than was padded
    return sum_gradients(differentiated(y, dy, x=x, a=a, b=b), "a", "b")


def padded_case(name, distributed, size, length):
    inputs = {
        "x": gg.Input((length, 4)),
        "a": gg.Input((4, 5)),
        "b": gg.Input((5, 3)),
        "dy": gg.Input((length, 3)),
    }
    relation = {"y": {}, "grads.x": {}, "grads.a": {}, "grads.b": {}}
    return Case(f"published-{name}-{length}-on-{size}", feed_forward, distributed, {"tp": size}, inputs, relation)


# ---------------------------------------------------------------------- 4. experts' weights on a part of the tokens
def mixture(x, wr, w1, w2, dy):
    leaves(x, wr, w1, w2)
    return differentiated(experts(x, (x @ wr).softmax(-1), w1, w2), dy, x=x, wr=wr, w1=w1, w2=w2)


def mixture_on_sequence(x, wr, w1, w2, dy):
    return sum_gradients(mixture(x, wr, w1, w2, dy), "wr", "w1", "w2")


def mixture_of_split_experts(x, wr, w1, w2, dy):
    leaves(x, wr, w1, w2)
    probabilities = (x @ wr).softmax(-1)
    hidden = F.gelu(torch.einsum("td,edf->tef", x, w1))
    y = torch.einsum("te,tef,efd->td", probabilities, hidden, w2)  # fault: a part of the weights for a part of the tokens
    return sum_gradients(differentiated(y, dy, x=x, wr=wr, w1=w1, w2=w2), "wr")


def mixture_case(name, distributed, size, split_weights=False, length=8):
    split = {"tp": Shard(0)}
    placements = {"w1": {"tp": Shard(2)}, "w2": {"tp": Shard(1)}} if split_weights else {"w1": {}, "w2": {}}
    inputs = {
        "x": gg.Input((length, 6), split),
        "wr": gg.Input((6, 4)),
        "w1": gg.Input((4, 6, 12), placements["w1"]),
        "w2": gg.Input((4, 12, 6), placements["w2"]),
        "dy": gg.Input((length, 6), split),
    }
    relation = {"y": split, "grads.x": split, "grads.wr": {}, "grads.w1": placements["w1"], "grads.w2": placements["w2"]}
    return Case(f"published-{name}-{size}", mixture, distributed, {"tp": size}, inputs, relation)


# ---------------------------------------------------------------------- 5. the gradient of a norm's weight
def normed_product(x, g, b, a, dy):
    leaves(x, g, b, a)
    y = F.layer_norm(x, x.shape[-1:], g, b) @ a
    return differentiated(y, dy, x=x, g=g, b=b, a=a)


def normed_product_on_sequence(x, g, b, a, dy):
    leaves(x, g, b, a)
    y = gather_sequence(F.layer_norm(x, x.shape[-1:], g, b), None) @ a
    return sum_gradients(differentiated(y, dy, x=x, g=g, b=b, a=a), "g", "b")


def normed_product_without_sum(x, g, b, a, dy):
    leaves(x, g, b, a)
    h = F.layer_norm(x, x.shape[-1:], g, b)  # fault: the gradients of weight and bias are of this rank's tokens only
    y = gather_sequence(h, None) @ a
    return differentiated(y, dy, x=x, g=g, b=b, a=a)


def normed_case(name, distributed, size):
    rows, columns = {"tp": Shard(0)}, {"tp": Shard(1)}
    inputs = {
        "x": gg.Input((8, 6), rows),
        "g": gg.Input((6,)),
        "b": gg.Input((6,)),
        "a": gg.Input((6, 16), columns),
        "dy": gg.Input((8, 16), columns),
    }
    relation = {"y": columns, "grads.x": rows, "grads.g": {}, "grads.b": {}, "grads.a": columns}
    return Case(f"published-{name}-{size}", normed_product, distributed, {"tp": size}, inputs, relation)


# ---------------------------------------------------------------------- 6. gradient accumulation
def mean_error(x, t, w):
    return (torch.tanh(x @ w) - t).square().mean()


def step(x, t, w):
    leaves(w)
    loss = mean_error(x, t, w)
    loss.backward()
    return {"loss": loss.detach(), "grads": {"w": w.grad}}


def accumulating(count):
    def accumulating_step(x, t, w):
        leaves(w)
        total = torch.zeros(())
        for part, target in zip(x.chunk(count), t.chunk(count), strict=True):
            loss = mean_error(part, target, w) / count
            loss.backward()
            total += loss.detach()
        size = dist.get_world_size()
        return {"loss": summed(total) / size, "grads": {"w": summed(w.grad) / size}}

    return accumulating_step


def accumulating_unscaled(x, t, w):
    leaves(w)
    total = torch.zeros(())
    for part, target in zip(x.chunk(2), t.chunk(2), strict=True):
        loss = mean_error(part, target, w)
        loss.backward()
        total += loss.detach() / 2
    grad = w.grad / dist.get_world_size()  # fault: the losses of the microbatches were not divided by their number
    return {"loss": summed(total) / dist.get_world_size(), "grads": {"w": summed(grad)}}


def accumulating_case(name, distributed, size, batch=16):
    split = {"dp": Shard(0)}
    inputs = {"x": gg.Input((batch, 5), split), "t": gg.Input((batch, 3), split), "w": gg.Input((5, 3))}
    return Case(f"published-{name}-{size}", step, distributed, {"dp": size}, inputs, {"loss": {}, "grads.w": {}})


# ---------------------------------------------------------------------- cases
def repaired(size):
    return [
        rotary_case("rotary", split_rotary, size),
        rotary_case("rotary-table", split_rotary_from_table, size),
        routed_case("auxiliary-loss", routed_on_sequence, size),
        padded_case("padded-behind", padded_behind, size, length=7),
        padded_case("padded-in-front", padded_in_front, size, length=7),
        padded_case("padded-behind", padded_behind, size, length=13),
        mixture_case("experts", mixture_on_sequence, size),
        normed_case("norm-gradient", normed_product_on_sequence, size),
        accumulating_case("accumulation", accumulating(2), size),
    ]


def faults():
    rotary_two, routed_four = rotary_case("", split_rotary, 2), routed_case("", routed_on_sequence, 4)
    padded = padded_case("", padded_behind, 4, length=7)
    split_experts = mixture_case("", mixture_of_split_experts, 2, split_weights=True)
    normed, accumulated = normed_case("", normed_product_on_sequence, 2), accumulating_case("", accumulating(2), 2)
    offset = "the positions of every rank begin at zero"
    share = "the auxiliary loss is not divided by the number of ranks"
    cut = "cut at the other end than was padded"
    part = "a part of the weights for a part of the tokens"
    tokens = "the gradients of weight and bias are of this rank's tokens only"
    scale = "the losses of the microbatches were not divided by their number"
    everything = {"stated": ("*",)}
    return [
        faulty(rotary_two, "published-fault-rotary", split_rotary_without_offset, offset, **everything),
        faulty(routed_four, "published-fault-auxiliary-loss", routed_with_whole_auxiliary_loss, share, **everything),
        faulty(padded, "published-fault-padding", padded_in_front_and_cut_behind, cut, **everything),
        faulty(split_experts, "published-fault-experts", mixture_of_split_experts, part, **everything),
        faulty(normed, "published-fault-norm-gradient", normed_product_without_sum, tokens, **everything),
        faulty(accumulated, "published-fault-accumulation", accumulating_unscaled, scale, **everything),
    ]


CASES = [
    *[case for size in (2, 4, 8) for case in repaired(size)],
    mixture_case("experts-uneven", mixture_on_sequence, 4, length=7),
    accumulating_case("accumulation-by-four", accumulating(4), 2),
    *faults(),
]
