"""Ulysses inside, a ring outside: heads are exchanged for positions in one group, and keys go around in the other."""

import torch
import torch.distributed as dist

from cases.case import Case, faulty
from cases.context import (
    SCALE,
    OnlineByLog,
    attention_inputs,
    causal_mask,
    causal_step,
    full_forward,
    leaves,
    with_gradients,
)
from graphguard import Shard


def exchanged(x, cut, join, group):
    sent = [part.contiguous() for part in x.chunk(dist.get_world_size(group), cut)]
    received = [torch.empty_like(part) for part in sent]
    dist.all_to_all(received, sent, group=group)
    return torch.cat(received, join)


def passed_on(x, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x.contiguous(), dist.get_global_rank(group, (rank + 1) % size), group),
        dist.P2POp(dist.irecv, received, dist.get_global_rank(group, (rank - 1) % size), group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def around(q, k, v, group):
    total = out = 0
    for step in range(dist.get_world_size(group)):
        weights = (q @ k.transpose(-1, -2) * SCALE).exp()
        total, out = total + weights.sum(-1, keepdim=True), out + weights @ v
        if step < dist.get_world_size(group) - 1:
            k, v = passed_on(k, group), passed_on(v, group)
    return out / total


def both(q, k, v, mesh):
    inside, outside = mesh["ulysses"].get_group(), mesh["ring"].get_group()
    whole = [exchanged(x, 1, 2, inside) for x in (q, k, v)]
    return exchanged(around(*whole, outside), 2, 1, inside)


def ring_inside(q, k, v, mesh):
    inside = mesh["ulysses"].get_group()
    whole = [exchanged(x, 1, 2, inside) for x in (q, k, v)]
    return exchanged(around(*whole, inside), 2, 1, inside)  # fault: keys go around where they already are together


def not_exchanged_back(q, k, v, mesh):
    inside, outside = mesh["ulysses"].get_group(), mesh["ring"].get_group()
    out = around(*(exchanged(x, 1, 2, inside) for x in (q, k, v)), outside)
    return exchanged(out.transpose(1, 2).contiguous().view_as(out), 2, 1, inside)  # fault: heads and positions are mixed


def without_ring(q, k, v, mesh):
    inside = mesh["ulysses"].get_group()
    q, k, v = (exchanged(x, 1, 2, inside) for x in (q, k, v))
    return exchanged((q @ k.transpose(-1, -2) * SCALE).softmax(-1) @ v, 2, 1, inside)  # fault: keys of other rings are not seen


def values_not_exchanged(q, k, v, mesh):
    inside, outside = mesh["ulysses"].get_group(), mesh["ring"].get_group()
    q, k = (exchanged(x, 1, 2, inside) for x in (q, k))
    v = torch.cat(v.chunk(dist.get_world_size(inside), 1), 2)  # fault: the values of this rank alone
    return exchanged(around(q, k, v, outside), 2, 1, inside)


# ---------------------------------------------------------------------- with gradients
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.back = join, cut, group
        return exchanged(x, cut, join, group)

    @staticmethod
    def backward(ctx, grad):
        return exchanged(grad, *ctx.back), None, None, None


def masked(scores, source, group):
    """A block from the rank before is seen whole, the own one up to the diagonal."""
    if source < dist.get_rank(group):
        return scores
    positions = torch.arange(scores.size(-1))
    return scores.masked_fill(~causal_mask(positions, positions), float("-inf"))


class CausalRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group, state, key, value = group, OnlineByLog(), k, v
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        for step in range(size):
            source = (rank - step) % size
            if source <= rank:
                state.add(masked(q @ key.transpose(-1, -2) * SCALE, source, group), value)
            if step < size - 1:
                key, value = passed_on(key, group), passed_on(value, group)
        ctx.save_for_backward(q, k, v, state.out, state.log)
        return state.out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, log = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(size):
            source = (rank - step) % size
            if source <= rank:
                p = (masked(q @ k.transpose(-1, -2) * SCALE, source, ctx.group) - log).exp()
                dscores = p * (dout @ v.transpose(-1, -2) - delta) * SCALE
                dq = dq + dscores @ k
                dk = dk + dscores.transpose(-1, -2) @ q
                dv = dv + p.transpose(-1, -2) @ dout
            k, v, dk, dv = (passed_on(each, ctx.group) for each in (k, v, dk, dv))
        return dq, dk, dv, None


class ExchangeForwardOnly(Exchange):
    @staticmethod
    def backward(ctx, grad):
        join, cut, group = ctx.back
        parts = exchanged(grad, join, cut, group).chunk(dist.get_world_size(group), cut)
        return torch.cat(parts[::-1], cut), None, None, None  # fault: heads of gradients come back in another order


def both_steps(exchange=Exchange):
    def step(q, k, v, dy, mesh):
        inside, outside = mesh["ulysses"].get_group(), mesh["ring"].get_group()
        q, k, v = leaves(q, k, v)
        whole = [exchange.apply(x, 1, 2, inside) for x in (q, k, v)]
        return with_gradients(exchange.apply(CausalRing.apply(*whole, outside), 2, 1, inside), dy, q, k, v)

    return step


SPLIT = {"ring": Shard(2), "ulysses": Shard(2)}


def hybrid_step(name, distributed, ring, ulysses):
    inputs = attention_inputs({"placement": SPLIT}, heads=4, sequence=16)
    mesh = {"ring": ring, "ulysses": ulysses}
    relation = dict.fromkeys(("out", "dq", "dk", "dv"), SPLIT)
    return Case(f"ulysses-ring-{name}", causal_step, distributed, mesh, inputs, relation)


def hybrid(name, distributed, ring, ulysses):
    inputs = attention_inputs({"placement": SPLIT}, heads=4, step=False)
    mesh = {"ring": ring, "ulysses": ulysses}
    return Case(f"ulysses-ring-{name}", full_forward, distributed, mesh, inputs, {"out": SPLIT})


def faults():
    base = hybrid("", None, 2, 2)
    seeded = [
        ("inside", ring_inside, "keys go around where they already are together"),
        ("mixed", not_exchanged_back, "heads and positions are mixed"),
        ("no-ring", without_ring, "keys of other rings are not seen"),
        ("values", values_not_exchanged, "the values of this rank alone"),
    ]
    found = [faulty(base, f"ulysses-ring-fault-{name}", program, fault, stated=("*",)) for name, program, fault in seeded]
    step, text = both_steps(ExchangeForwardOnly), "heads of gradients come back in another order"
    return [*found, faulty(hybrid_step("", None, 2, 2), "ulysses-ring-fault-gradients", step, text, stated=("*",))]


SIZES = [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4)]
CASES = [
    *[hybrid(f"{ring}x{ulysses}", both, ring, ulysses) for ring, ulysses in SIZES],
    *[hybrid_step(f"step-{ring}x{ulysses}", both_steps(), ring, ulysses) for ring, ulysses in ((2, 1), (2, 2), (4, 2), (2, 4))],
    *faults(),
]
