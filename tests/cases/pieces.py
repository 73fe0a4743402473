"""Largest elements of tensors that were put together from pieces: shifted logits, blocks of classes side by side."""

import torch
import torch.distributed as dist

from cases.case import Case, faulty
from graphguard import Input, Shard

ROWS, CLASSES, MORE = 8, 3, 5


def chosen(x, y):
    """Which classes of two blocks are the best, and how good they are."""
    both = torch.cat([x, y], -1)
    best = both.topk(2, -1)
    return {"class": both.argmax(-1), "values": best.values, "places": best.indices}


def chosen_in_another_order(x, y):
    both = torch.cat([y, x], -1)  # fault: the blocks are in another order
    best = both.topk(2, -1)
    return {"class": both.argmax(-1), "values": best.values, "places": best.indices}


def shifted(x):
    """The next row's best, as a head that predicts one token more has it; the last row has none."""
    return torch.cat([x[1:], torch.zeros_like(x[:1])]).topk(2, -1).values


def gathered(x):
    whole = x.new_empty(x.size(0) * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x)
    return whole


def shifted_after_a_gather(x):
    return shifted(gathered(x))


def shifted_on_each_rank(x):
    return gathered(shifted(x))  # fault: a rank's last row has none, and not the next rank's first


def by_rows(size):
    inputs = {"x": Input((ROWS, CLASSES), Shard(0)), "y": Input((ROWS, MORE), Shard(0))}
    relation = {key: {"dp": Shard(0)} for key in ("class", "values", "places")}
    return Case(f"pieces-blocks-{size}", chosen, chosen, {"dp": size}, inputs, relation)


def next_rows(size):
    inputs = {"x": Input((ROWS, CLASSES), Shard(0))}
    return Case(f"pieces-shifted-{size}", shifted, shifted_after_a_gather, {"dp": size}, inputs, {"out": {}})


BLOCKS = faulty(by_rows(2), "pieces-fault-order", chosen_in_another_order, "the blocks are in another order", stated=("*",))
NEXT = faulty(
    next_rows(2), "pieces-fault-shift", shifted_on_each_rank, "a rank's last row has none, and not the next rank's first"
)
CASES = [*map(by_rows, (2, 4, 8)), *map(next_rows, (2, 4, 8)), BLOCKS, NEXT]
