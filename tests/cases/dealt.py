"""A sequence that the ranks deal themselves, by an index, and causal rings under the weights that make their queries."""

import torch
import torch.distributed as dist

from cases.case import Case, faulty
from cases.context import SCALE, causal_forward, leaves
from cases.ring_flash import Ring, block_gradients, earlier_seen, masked, merged, zigzag_seen
from cases.zigzag import zigzag
from graphguard import Input

HEADS, HEAD, WIDTH = 2, 4, 6


# ---------------------------------------------------------------------- dealing
def dealt(x):
    """A rank's part of the sequence. All ranks rearrange all of it, and each takes what is its own."""
    size = dist.get_world_size()
    chunks, head = torch.arange(x.size(1)).view(2 * size, -1), torch.arange(size)
    index = torch.stack([chunks[head], chunks[2 * size - 1 - head]], dim=1).reshape(1, -1, 1)
    return x.gather(1, index.expand(x.shape)).chunk(size, 1)[dist.get_rank()]


def dealt_in_order(x):
    size = dist.get_world_size()
    chunks, head = torch.arange(x.size(1)).view(2 * size, -1), torch.arange(size)
    index = torch.stack([chunks[head], chunks[size + head]], dim=1).reshape(1, -1, 1)
    return x.gather(1, index.expand(x.shape)).chunk(size, 1)[dist.get_rank()]  # fault: the back half is not turned around


def doubled(x):
    return 2 * x


def dealt_and_doubled(x):
    return doubled(dealt(x))


def doubled_in_order(x):
    return doubled(dealt_in_order(x))


# ---------------------------------------------------------------------- attention and its weights
def step_of(attend, x, dy, weights):
    weights = leaves(*weights)
    q, k, v = ((x @ w).unflatten(-1, (HEADS, HEAD)).transpose(1, 2).contiguous() for w in weights)
    out = attend(q, k, v).transpose(1, 2).flatten(2)
    return list(torch.autograd.grad(out, weights, dy))


def sequential(x, dy, wq, wk, wv):
    return step_of(causal_forward, x, dy, (wq, wk, wv))


def ring_of(seen, cut, gradients=block_gradients):
    def attend(q, k, v):
        return Ring.apply(q, k, v, seen, merged, gradients)

    def program(x, dy, wq, wk, wv):
        found = step_of(attend, cut(x), cut(dy), (wq, wk, wv))
        for gradient in found:
            dist.all_reduce(gradient)
        return found

    return program


def gradients_of_one_block(dout, q, k, v, delta, log, diagonal=None):
    p = masked(q @ k.transpose(-1, -2) * SCALE, diagonal).softmax(-1)  # fault: the weights of this block alone
    dscores = p * (dout @ v.transpose(-1, -2) - delta) * SCALE
    return dscores @ k, dscores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def one_after_another(x):
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]


# ---------------------------------------------------------------------- cases
def rearranged(size, per_chunk):
    shape = (2, 2 * size * per_chunk, 3)
    layout = {"out": zigzag(size, 1)}
    return Case(f"dealt-{size}-by-{per_chunk}", doubled, dealt_and_doubled, {"cp": size}, {"x": Input(shape)}, layout, layout)


def weights(name, program, size, sequence):
    inputs = {"x": Input((2, sequence, WIDTH)), "dy": Input((2, sequence, HEADS * HEAD))}
    inputs |= {name: Input((WIDTH, HEADS * HEAD)) for name in ("wq", "wk", "wv")}
    return Case(f"dealt-{name}", sequential, program, {"cp": size}, inputs, {"0": {}, "1": {}, "2": {}})


DEALT, RING = rearranged(2, 2), weights("ring-2", ring_of(earlier_seen, one_after_another), 2, 8)
CASES = [
    DEALT,
    rearranged(2, 1),
    rearranged(4, 2),
    RING,
    weights("ring-4", ring_of(earlier_seen, one_after_another), 4, 8),
    weights("zigzag-ring-2", ring_of(zigzag_seen, dealt), 2, 8),
    faulty(DEALT, "dealt-fault-order", doubled_in_order, "the back half is not turned around", stated=("*",)),
    faulty(
        RING,
        "dealt-fault-one-block",
        ring_of(earlier_seen, one_after_another, gradients_of_one_block),
        "the weights of this block alone",
        stated=("*",),
    ),
]
