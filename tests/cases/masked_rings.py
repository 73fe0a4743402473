"""Causal rings that mask by a large number in the place of minus infinity: what is masked counts for a little on both sides."""

import torch
import torch.distributed as dist

from cases.case import Case, faulty
from cases.context import RINGS, SCALE, Online, OnlineByLog, attention_inputs, causal_mask
from graphguard import Shard

SMALLEST = torch.finfo(torch.float32).min
SPLIT = {"cp": Shard(2)}


def masked(number):
    def attention(q, k, v):
        positions = torch.arange(q.size(-2))
        scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(~causal_mask(positions, positions), number)
        return scores.softmax(-1) @ v

    return attention


class OnlineFromNumber(Online):
    """Starts from sums of nothing, with a large number for the largest score."""

    def add(self, scores, v):
        if self.out is None:
            self.largest = torch.full_like(scores[..., :1], -1e30)
            self.total, self.out = torch.zeros_like(scores[..., :1]), torch.zeros_like(scores[..., :1] * v[..., :1, :])
        super().add(scores, v)


class OnlineNotRescaled(Online):
    def add(self, scores, v):
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        total, out = weights.sum(-1, keepdim=True), weights @ v
        if self.out is not None:
            both = torch.maximum(self.largest, largest)
            old, new = (self.largest - both).exp(), (largest - both).exp()
            largest, total, out = both, self.total * old + total * new, self.out + out * new  # fault: sums not rescaled
        self.largest, self.total, self.out = largest, total, out


def hidden(queries, keys):
    return ~causal_mask(queries, keys)


def hidden_with_itself(queries, keys):
    return queries[:, None] <= keys[None, :]  # fault: a position does not see itself


def masked_ring(number, online=Online, hides=hidden, way="batched"):
    """All blocks are masked by their positions; of some, that leaves nothing."""

    def forward(q, k, v):
        state, own = online(), torch.arange(q.size(-2))
        for source, key, value in RINGS[way](k, v):
            mask = hides(dist.get_rank() * q.size(-2) + own, source * k.size(-2) + own)
            state.add((q @ key.transpose(-1, -2) * SCALE).masked_fill(mask, number), value)
        return state.result()

    return forward


def case(name, size, number, **options):
    inputs = attention_inputs({"placement": Shard(2)}, heads=1, sequence=2 * size, step=False)
    program = masked_ring(number, **options)
    return Case(f"masked-ring-{name}-{size}", masked(number), program, {"cp": size}, inputs, {"out": SPLIT})


def correct(size):
    return [
        case("number", size, -1e30),
        case("smallest", size, SMALLEST),
        case("from-number", size, -1e30, online=OnlineFromNumber),
        case("gather", size, -1e4, way="gather"),
        case("log", size, -1e30, online=OnlineByLog),
    ]


def faults():
    base = case("number", 2, -1e30)
    changed = {"itself": {"hides": hidden_with_itself}, "rescaled": {"online": OnlineNotRescaled}}
    texts = {"itself": "a position does not see itself", "rescaled": "sums not rescaled"}
    for name, options in changed.items():
        yield faulty(base, f"fault-masked-ring-{name}", masked_ring(-1e30, **options), texts[name])


CASES = [*[each for size in (2, 4) for each in correct(size)], *faults()]
