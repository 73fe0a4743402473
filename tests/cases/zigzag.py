"""Zigzag layout of a causal sequence: a rank has a part from the front and its mirror image, so that all work alike."""

import torch
import torch.distributed as dist

from cases.case import Case, faulty
from cases.context import (
    RINGS,
    SCALE,
    Online,
    attention_inputs,
    causal_forward,
    causal_mask,
    causal_step,
    leaves,
    rotated,
    weighted,
    with_gradients,
)
from cases.regions import gather_first, reduce_scatter_first


def zigzag(size, dim=2):
    def layout(full, coord):
        parts = full.chunk(2 * size, dim)
        return torch.cat([parts[coord["cp"]], parts[2 * size - 1 - coord["cp"]]], dim)

    return layout


def zigzag_positions(rank, length):
    size, half = dist.get_world_size(), length // 2
    front = torch.arange(half) + rank * half
    return torch.cat([front, torch.arange(half) + (2 * size - 1 - rank) * half])


def positions_of_its_own(rank, length):
    """The first rank does not add what is 0 there, so that its program is not that of the others."""
    size, half = dist.get_world_size(), length // 2
    front = torch.arange(half) if dist.get_rank() == 0 and rank == 0 else torch.arange(half) + rank * half
    return torch.cat([front, torch.arange(half) + (2 * size - 1 - rank) * half])


def zigzag_ring(blocks, positions=zigzag_positions):
    """A block may have rows that see nothing of it, so the weights are masked and not the scores."""

    def forward(q, k, v):
        mine, largest, total, out = positions(dist.get_rank(), q.size(2)), None, 0, 0
        for source, key, value in blocks(k, v):
            scores = q @ key.transpose(-1, -2) * SCALE
            seen = causal_mask(mine, positions(source, k.size(2)))
            highest = scores.amax(-1, keepdim=True)
            highest = highest if largest is None else torch.maximum(largest, highest)
            weights = (scores - highest).exp().masked_fill(~seen, 0.0)
            scale = 1.0 if largest is None else (largest - highest).exp()
            total, out = total * scale + weights.sum(-1, keepdim=True), out * scale + weights @ value
            largest = highest
        return out / total

    return forward


def zigzag_halves(blocks, online=Online):
    """Without masks off the diagonal: of earlier ranks the front half is seen by all, of later ones all by the back half."""

    def forward(q, k, v):
        rank, half = dist.get_rank(), q.size(2) // 2
        (front, back), states = q.split(half, 2), (online(), online())
        diagonal = causal_mask(torch.arange(half), torch.arange(half))

        def add(state, query, key, value, mask=None):
            scores = query @ key.transpose(-1, -2) * SCALE
            state.add(scores if mask is None else scores.masked_fill(~mask, float("-inf")), value)

        for source, key, value in blocks(k, v):
            (k0, k1), (v0, v1) = key.split(half, 2), value.split(half, 2)
            if source == rank:
                add(states[0], front, k0, v0, diagonal)
                add(states[1], back, k0, v0)
                add(states[1], back, k1, v1, diagonal)
            elif source < rank:
                add(states[0], front, k0, v0)
                add(states[1], back, k0, v0)
            else:
                add(states[1], back, k0, v0)
                add(states[1], back, k1, v1)
        return torch.cat([state.result() for state in states], 2)

    return forward


def zigzag_gathered(q, k, v):
    """All keys are gathered and put back in order."""
    size, half = dist.get_world_size(), k.size(2) // 2

    def whole(x):
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x)
        halves = [part.split(half, 2) for part in parts]
        return torch.cat([front for front, _ in halves] + [back for _, back in reversed(halves)], 2)

    keys, values = whole(k), whole(v)
    mine = zigzag_positions(dist.get_rank(), q.size(2))
    return weighted(q, keys, values, causal_mask(mine, torch.arange(keys.size(2))))


# ---------------------------------------------------------------------- with gradients
def in_order(x, size):
    """What was gathered from all ranks, as the sequence has it."""
    halves = [part.chunk(2, 2) for part in x.chunk(size, 2)]
    return torch.cat([front for front, _ in halves] + [back for _, back in reversed(halves)], 2)


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gather_first(x.movedim(2, 0), None).movedim(0, 2)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_first(grad.movedim(2, 0), None).movedim(0, 2)


def zigzag_gathered_step(ordered=in_order):
    def step(q, k, v, dy):
        q, k, v = leaves(q, k, v)
        keys, values = (ordered(GatherSequence.apply(x), dist.get_world_size()) for x in (k, v))
        mine = zigzag_positions(dist.get_rank(), q.size(2))
        out = weighted(q, keys, values, causal_mask(mine, torch.arange(keys.size(2))))
        return with_gradients(out, dy, q, k, v)

    return step


class ZigzagAttention(torch.autograd.Function):
    """A ring with its own backward; weights are masked, and each block is scaled by the final sums in the backward."""

    @staticmethod
    def forward(ctx, q, k, v):
        mine, size = zigzag_positions(dist.get_rank(), q.size(2)), dist.get_world_size()
        total = out = 0
        key, value = k, v
        for step in range(size):
            seen = causal_mask(mine, zigzag_positions((dist.get_rank() - step) % size, k.size(2)))
            weights = (q @ key.transpose(-1, -2) * SCALE).exp().masked_fill(~seen, 0.0)
            total, out = total + weights.sum(-1, keepdim=True), out + weights @ value
            if step < size - 1:
                key, value = rotated(key), rotated(value)
        out = out / total
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, total = ctx.saved_tensors
        mine, size = zigzag_positions(dist.get_rank(), q.size(2)), dist.get_world_size()
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(size):
            seen = causal_mask(mine, zigzag_positions((dist.get_rank() - step) % size, k.size(2)))
            p = (q @ k.transpose(-1, -2) * SCALE).exp().masked_fill(~seen, 0.0) / total
            dscores = p * (dout @ v.transpose(-1, -2) - delta) * SCALE
            dq = dq + dscores @ k
            dk = dk + dscores.transpose(-1, -2) @ q
            dv = dv + p.transpose(-1, -2) @ dout
            k, v, dk, dv = (rotated(each) for each in (k, v, dk, dv))
        return dq, dk, dv


def zigzag_step(q, k, v, dy):
    q, k, v = leaves(q, k, v)
    return with_gradients(ZigzagAttention.apply(q, k, v), dy, q, k, v)


# ---------------------------------------------------------------------- faults
def contiguous_positions(rank, length):
    return torch.arange(length) + rank * length  # fault: positions of contiguous parts


def out_of_order(x, size):
    return x  # fault: keys stay in the order of the ranks


def back_half_in_order(x, size):
    halves = [part.chunk(2, 2) for part in x.chunk(size, 2)]
    fronts, backs = [front for front, _ in halves], [back for _, back in halves]
    return torch.cat(fronts + backs, 2)  # fault: the back half is not turned around


def front_sees_later_blocks(blocks, online=Online):
    def forward(q, k, v):
        rank, half = dist.get_rank(), q.size(2) // 2
        (front, back), states = q.split(half, 2), (online(), online())
        diagonal = causal_mask(torch.arange(half), torch.arange(half))

        def add(state, query, key, value, mask=None):
            scores = query @ key.transpose(-1, -2) * SCALE
            state.add(scores if mask is None else scores.masked_fill(~mask, float("-inf")), value)

        for source, key, value in blocks(k, v):
            (k0, k1), (v0, v1) = key.split(half, 2), value.split(half, 2)
            if source == rank:
                add(states[0], front, k0, v0, diagonal)
                add(states[1], back, k0, v0)
                add(states[1], back, k1, v1, diagonal)
            else:
                add(states[0], front, k0, v0)  # fault: the front half sees the front of later ranks
                add(states[1], back, k0, v0)
        return torch.cat([state.result() for state in states], 2)

    return forward


# ---------------------------------------------------------------------- cases
def zigzagged(name, distributed, size):
    layout = zigzag(size)
    inputs = attention_inputs({"local": layout}, sequence=4 * size, step=False)
    return Case(f"zigzag-{name}", causal_forward, distributed, {"cp": size}, inputs, {"out": layout}, {"out": layout})


def stepped(name, distributed, size):
    layout = zigzag(size)
    paths = dict.fromkeys(("out", "dq", "dk", "dv"), layout)
    inputs = attention_inputs({"local": layout}, sequence=4 * size)
    return Case(f"zigzag-{name}", causal_step, distributed, {"cp": size}, inputs, paths, paths)


def correct(size):
    return [
        zigzagged(f"ring-{size}", zigzag_ring(RINGS["p2p"]), size),
        zigzagged(f"halves-{size}", zigzag_halves(RINGS["p2p"]), size),
        zigzagged(f"ring-of-its-own-{size}", zigzag_ring(RINGS["p2p"], positions_of_its_own), size),
        zigzagged(f"gathered-{size}", zigzag_gathered, size),
        stepped(f"gathered-step-{size}", zigzag_gathered_step(), size),
        stepped(f"step-{size}", zigzag_step, size),
    ]


def faults():
    two, step = zigzagged("", None, 2), stepped("", None, 2)
    seeded = [
        (two, "mask", zigzag_ring(RINGS["p2p"], contiguous_positions), "positions of contiguous parts"),
        (two, "later-blocks", front_sees_later_blocks(RINGS["p2p"]), "the front half sees the front of later ranks"),
        (step, "order", zigzag_gathered_step(out_of_order), "keys stay in the order of the ranks"),
        (step, "back-half", zigzag_gathered_step(back_half_in_order), "the back half is not turned around"),
    ]
    return [faulty(case, f"zigzag-fault-{name}", program, fault, stated=("*",)) for case, name, program, fault in seeded]


CASES = [*[case for size in (2, 4, 8) for case in correct(size)], *faults()]
