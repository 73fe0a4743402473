"""What each collective means: from the tensors that the ranks of a group put in to the tensors that they get out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce as fold

import torch

from graphguard.errors import ReplayError
from graphguard.graph.collectives import Meanings
from graphguard.graph.matching import Match

Operands = Mapping[int, Sequence[torch.Tensor]]
Results = dict[int, Sequence[torch.Tensor]]
MEANINGS: Meanings[Callable[[Match, Operands], Results]] = Meanings()


def exchange(match: Match, operands: Operands) -> Results:
    """Results by rank, each list in the order of the node's outputs; shapes may still have to be folded."""
    return MEANINGS[match.op](match, operands)


def _reduced(match: Match, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction of one tensor per rank, given in group order. Their shapes may differ: what is reduced is their memory."""
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        tensors = [tensor.reshape(-1) for tensor in tensors]
    match match.any_node.kwargs["reduce"]:
        case "sum":
            return fold(torch.add, tensors)
        case "avg":
            return _average(fold(torch.add, tensors), len(tensors))
        case "premul_sum":
            factors = [match.nodes[rank].kwargs["factor"] for rank in match.group]
            return fold(torch.add, [tensor * factor for tensor, factor in zip(tensors, factors, strict=True)])
        case "product":
            return fold(torch.mul, tensors)
        case "min":
            return fold(torch.minimum, tensors)
        case "max":
            return fold(torch.maximum, tensors)
        case "band":
            return fold(torch.bitwise_and, tensors)
        case "bor":
            return fold(torch.bitwise_or, tensors)
        case "bxor":
            return fold(torch.bitwise_xor, tensors)
        case other:
            raise ReplayError(f"unknown reduce operation {other!r}")


def _average(total: torch.Tensor, count: int) -> torch.Tensor:
    """Integers are divided as NCCL does; gloo refuses them."""
    if total.dtype == torch.bool:
        raise ReplayError("an average of booleans is not defined; convert them to numbers first")
    if total.is_floating_point() or total.is_complex():
        return total / count
    return torch.div(total, count, rounding_mode="trunc")


def _in_group_order(match: Match, operands: Operands) -> list[Sequence[torch.Tensor]]:
    return [operands[rank] for rank in match.group]


@MEANINGS.of("dist.all_reduce")
def _all_reduce(match: Match, operands: Operands) -> Results:
    total = _reduced(match, [tensors[0] for tensors in _in_group_order(match, operands)])
    return {rank: [total] for rank in match.group}


@MEANINGS.of("dist.reduce")
def _reduce(match: Match, operands: Operands) -> Results:
    total = _reduced(match, [tensors[0] for tensors in _in_group_order(match, operands)])
    root = match.any_node.kwargs["root"]
    # On the other ranks the buffer is scratch memory, and what it holds afterwards depends on the backend.
    return {rank: [total if rank == root else _unspecified(total)] for rank in match.group}


def _unspecified(like: torch.Tensor) -> torch.Tensor:
    if like.is_floating_point() or like.is_complex():
        return torch.full_like(like, math.nan)
    return torch.full_like(like, True if like.dtype == torch.bool else torch.iinfo(like.dtype).max // 2)


@MEANINGS.of("dist.all_gather")
def _all_gather(match: Match, operands: Operands) -> Results:
    pieces = [tensors[0] for tensors in _in_group_order(match, operands)]
    return dict.fromkeys(match.group, pieces)


@MEANINGS.of("dist.all_gather_into_tensor")
def _all_gather_into_tensor(match: Match, operands: Operands) -> Results:
    joined = torch.cat([tensors[0].reshape(-1) for tensors in _in_group_order(match, operands)])
    return {rank: [joined] for rank in match.group}


@MEANINGS.of("dist.reduce_scatter")
def _reduce_scatter(match: Match, operands: Operands) -> Results:
    lists = _in_group_order(match, operands)
    return {rank: [_reduced(match, [pieces[i] for pieces in lists])] for i, rank in enumerate(match.group)}


@MEANINGS.of("dist.reduce_scatter_tensor")
def _reduce_scatter_tensor(match: Match, operands: Operands) -> Results:
    total = _reduced(match, [tensors[0].reshape(-1) for tensors in _in_group_order(match, operands)])
    return {rank: [piece] for rank, piece in zip(match.group, total.chunk(len(match.group)), strict=True)}


@MEANINGS.of("dist.all_to_all")
def _all_to_all(match: Match, operands: Operands) -> Results:
    lists = _in_group_order(match, operands)
    return {rank: [pieces[i] for pieces in lists] for i, rank in enumerate(match.group)}


@MEANINGS.of("dist.all_to_all_single")
def _all_to_all_single(match: Match, operands: Operands) -> Results:
    rows = []
    for rank in match.group:
        tensor = operands[rank][0]
        splits = match.nodes[rank].kwargs["input_splits"]
        rows.append(tensor.split(list(splits), 0))  # type: ignore[arg-type]
    return {rank: [torch.cat([parts[i].reshape(-1) for parts in rows])] for i, rank in enumerate(match.group)}


@MEANINGS.of("dist.broadcast")
def _broadcast(match: Match, operands: Operands) -> Results:
    sent = operands[match.any_node.kwargs["root"]][0]  # type: ignore[index]
    return {rank: [sent] for rank in match.group}


@MEANINGS.of("dist.gather")
def _gather(match: Match, operands: Operands) -> Results:
    root = match.any_node.kwargs["root"]
    pieces = [tensors[0] for tensors in _in_group_order(match, operands)]
    return {rank: pieces if rank == root else [] for rank in match.group}


@MEANINGS.of("dist.scatter")
def _scatter(match: Match, operands: Operands) -> Results:
    sent = operands[match.any_node.kwargs["root"]]  # type: ignore[index]
    return {rank: [piece] for rank, piece in zip(match.group, sent, strict=True)}


@MEANINGS.of("dist.send", "dist.recv")
def _message(match: Match, operands: Operands) -> Results:
    sender, receiver = match.group
    return {sender: [], receiver: [operands[sender][0]]}


@MEANINGS.of("dist.barrier")
def _barrier(match: Match, operands: Operands) -> Results:
    return {rank: [] for rank in match.group}
