"""A split sequence without attention: positions that start where the rank's part starts, and labels of the neighbour."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from graphguard import Input, Shard

VOCABULARY = 5


def leaves(*tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


def own_positions(length):
    return dist.get_rank() * length + torch.arange(length)


# ---------------------------------------------------------------------- positions per rank
def rotary(x, positions):
    """x: [sequence, features]; halves are rotated."""
    half = x.size(-1) // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    a, b = x.split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotary_step(x, w, dy):
    x, w = leaves(x, w)
    y = rotary(x @ w, torch.arange(x.size(0)))
    return {"y": y.detach(), **dict(zip(("dx", "dw"), torch.autograd.grad(y, (x, w), dy), strict=True))}


def rotary_cp(positions):
    def step(x, w, dy):
        x, w = leaves(x, w)
        y = rotary(x @ w, positions(x.size(0)))
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        dist.all_reduce(dw)
        return {"y": y.detach(), "dx": dx, "dw": dw}

    return step


def embedded_positions(tokens, table, places):
    return F.embedding(tokens, table) + places[: tokens.size(1)]


def embedded_positions_cp(tokens, table, places):
    start = dist.get_rank() * tokens.size(1)
    return F.embedding(tokens, table) + places[start : start + tokens.size(1)]


# ---------------------------------------------------------------------- labels are the tokens shifted by one
def next_token_loss(tokens, table, head):
    table, head = leaves(table, head)
    logits = F.embedding(tokens, table).tanh() @ head
    loss = F.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
    return {"loss": loss.detach(), **dict(zip(("table", "head"), torch.autograd.grad(loss, (table, head)), strict=True))}


def next_token_mean(tokens, table, head):
    table, head = leaves(table, head)
    logits = F.embedding(tokens, table).tanh() @ head
    loss = F.cross_entropy(logits[:-1], tokens[1:])
    return {"loss": loss.detach(), **dict(zip(("table", "head"), torch.autograd.grad(loss, (table, head)), strict=True))}


def next_of_neighbour(tokens):
    """Each rank sends its first token back; the last rank has no label for its last token."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(tokens[:1].contiguous(), rank - 1) if rank > 0 else None
    labels = tokens[1:]
    if rank < size - 1:
        following = torch.empty_like(tokens[:1])
        dist.recv(following, rank + 1)
        labels = torch.cat([labels, following])
    if sending is not None:
        sending.wait()
    return labels


def next_token_loss_cp(shifted, count=None):
    def step(tokens, table, head):
        table, head = leaves(table, head)
        labels = shifted(tokens)
        logits = F.embedding(tokens, table).tanh() @ head
        loss = F.cross_entropy(logits[: labels.size(0)], labels, reduction="sum")
        if count is not None:
            loss = loss / count
        grads = dict(zip(("table", "head"), torch.autograd.grad(loss, (table, head)), strict=True))
        total = loss.detach()
        for value in (total, *grads.values()):
            dist.all_reduce(value)
        return {"loss": total, **grads}

    return step


def shifted_before_the_split(tokens, labels, table, head):
    """The labels were shifted on the whole sequence; the last one is ignored."""
    table, head = leaves(table, head)
    logits = F.embedding(tokens, table).tanh() @ head
    loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    grads = dict(zip(("table", "head"), torch.autograd.grad(loss, (table, head)), strict=True))
    total = loss.detach()
    for value in (total, *grads.values()):
        dist.all_reduce(value)
    return {"loss": total, **grads}


def split_after_shift(size):
    def local(full, coord):
        tokens = full["tokens"]
        labels = torch.cat([tokens[1:], tokens.new_full((1,), -100)])
        rank = coord["cp"]
        return {
            "tokens": tokens.chunk(size)[rank],
            "labels": labels.chunk(size)[rank],
            "table": full["table"],
            "head": full["head"],
        }

    return local


def differences(x):
    """What each element has more than the one before."""
    return torch.cat([x[:1], x[1:] - x[:-1]])


def differences_cp(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(x[-1:].contiguous(), rank + 1) if rank < size - 1 else None
    before = torch.zeros_like(x[:1])
    if rank > 0:
        dist.recv(before, rank - 1)
    if sending is not None:
        sending.wait()
    return x - torch.cat([before, x[:-1]])


# ---------------------------------------------------------------------- faults
def local_positions(length):
    return torch.arange(length)  # fault: positions start at 0 on every rank


def strided_positions(length):
    return dist.get_rank() + dist.get_world_size() * torch.arange(length)  # fault: positions of another layout


def embedded_from_the_start(tokens, table, places):
    return F.embedding(tokens, table) + places[: tokens.size(1)]  # fault: places from the start on every rank


def own_labels(tokens):
    return tokens[1:]  # fault: the label at the boundary is dropped


def wrapped_labels(tokens):
    return torch.cat([tokens[1:], tokens[:1]])  # fault: the label at the boundary is the rank's own first token


def far_labels(tokens):
    """Each rank sends its last token instead of its first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(tokens[-1:].contiguous(), rank - 1) if rank > 0 else None  # fault: the wrong end is sent
    labels = tokens[1:]
    if rank < size - 1:
        following = torch.empty_like(tokens[:1])
        dist.recv(following, rank + 1)
        labels = torch.cat([labels, following])
    if sending is not None:
        sending.wait()
    return labels


def differences_from_nothing(x):
    return x - torch.cat([torch.zeros_like(x[:1]), x[:-1]])  # fault: no halo


# ---------------------------------------------------------------------- cases
def turned(name, distributed, size):
    inputs = {"x": Input((8, 3), Shard(0)), "w": Input((3, 4)), "dy": Input((8, 4), Shard(0))}
    relation = {"y": {"cp": Shard(0)}, "dx": {"cp": Shard(0)}, "dw": {}}
    return Case(f"positions-{name}", rotary_step, distributed, {"cp": size}, inputs, relation)


def labelled(name, distributed, size, sequential=next_token_loss, local_inputs=None):
    split = {} if local_inputs else {"placement": Shard(0)}
    inputs = {
        "tokens": Input((8,), dtype=torch.int64, low=0, high=VOCABULARY, **split),
        "table": Input((VOCABULARY, 3)),
        "head": Input((3, VOCABULARY)),
    }
    relation = {"loss": {}, "table": {}, "head": {}}
    return Case(f"positions-{name}", sequential, distributed, {"cp": size}, inputs, relation, local_inputs=local_inputs)


def placed(name, distributed, size):
    inputs = {
        "tokens": Input((2, 8), Shard(1), torch.int64, low=0, high=VOCABULARY),
        "table": Input((VOCABULARY, 3)),
        "places": Input((16, 3)),
    }
    return Case(f"positions-{name}", embedded_positions, distributed, {"cp": size}, inputs, {"out": {"cp": Shard(1)}})


def correct(size):
    return [
        turned(f"rotary-{size}", rotary_cp(own_positions), size),
        placed(f"positions-{size}", embedded_positions_cp, size),
        labelled(f"labels-{size}", next_token_loss_cp(next_of_neighbour), size),
        labelled(f"labels-mean-{size}", next_token_loss_cp(next_of_neighbour, 7), size, next_token_mean),
        labelled(f"labels-before-{size}", shifted_before_the_split, size, local_inputs=split_after_shift(size)),
        Case(
            f"positions-differences-{size}",
            differences,
            differences_cp,
            {"cp": size},
            {"x": Input((8, 3), Shard(0))},
            {"out": {"cp": Shard(0)}},
        ),
    ]


def faults():
    labels = labelled("", None, 2)
    halves = Case("", differences, None, {"cp": 2}, {"x": Input((8, 3), Shard(0))}, {"out": {"cp": Shard(0)}})
    seeded = [
        (turned("", None, 2), "local-angles", rotary_cp(local_positions), "positions start at 0 on every rank"),
        (turned("", None, 4), "strided-angles", rotary_cp(strided_positions), "positions of another layout"),
        (placed("", None, 2), "places", embedded_from_the_start, "places from the start on every rank"),
        (labels, "own-labels", next_token_loss_cp(own_labels), "the label at the boundary is dropped"),
        (
            labels,
            "wrapped-labels",
            next_token_loss_cp(wrapped_labels),
            "the label at the boundary is the rank's own first token",
        ),
        (labels, "far-labels", next_token_loss_cp(far_labels), "the wrong end is sent"),
        (halves, "no-halo", differences_from_nothing, "no halo"),
    ]
    return [faulty(case, f"positions-fault-{name}", program, fault, stated=("*",)) for case, name, program, fault in seeded]


CASES = [*[case for size in (2, 4, 8) for case in correct(size)], *faults()]
