"""A second look at numbers that differ, before a verdict rests on them.

Both programs run again on the same inputs, with another choice wherever a choice is free: what was rounded is moved by a few
units in the last place, and equal elements are sorted in another order, where torch leaves it open. Numbers that move as far as
they differ decide nothing. This tells rounding from a fault where the inputs themselves cannot be moved: whole numbers, ties,
steps such as `floor`, and terms that cancel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphguard.aten.kernels import Lookup
from graphguard.errors import ReplayError
from graphguard.graph.ir import Node, Value
from graphguard.graph.operators import COMPARES, EXACT, name_of
from graphguard.oracle.draws import drawn
from graphguard.oracle.overflow import overflows
from graphguard.oracle.reference import is_real
from graphguard.oracle.replay import Run, run_joint
from graphguard.oracle.slice import Programs
from graphguard.oracle.trial import Forgiving, Trial, UndefinedError, alone_on, local_inputs, seeded

FIRST, NEXT, MOST = 3, 4, 15  # runs: at first, and as long as some number moves
_OF_SPREAD = 10  # times the distance between two runs
_UNITS = 2  # in the last place, by which results are moved, at most
_ORDERS = {"sort", "topk", "kthvalue", "median", "nanmedian", "mode"}
_NEAR = 8  # units in the last place: which of two such numbers is larger was decided by rounding
_OPERAND_BITS, _RESULT_BITS = 29, 12  # that are zero at the end of a number of which nothing was rounded away


Stays = Callable[[Run, Sequence[Run]], bool]
OFF_PATH = "rounding, or the order of equal numbers, decides which way the programs go"


class Wavering(Forgiving):
    """Kernels that choose otherwise each time, where a choice is free."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def run(self, node: Node, lookup: Lookup) -> list[torch.Tensor]:
        results = list(super().run(node, lookup))
        if node.op == "gg.part" or _is_exact(node.op):
            return results
        if name_of(node.op) in COMPARES and results[0].dtype == torch.bool:
            return [self._decided(results[0], *(lookup(arg) if isinstance(arg, Value) else arg for arg in node.args[:2]))]
        if not any(map(is_real, results)):
            return results
        operands = [tensor for value in node.operands() if is_real(tensor := lookup(value))]
        numbers = all(_is_plain(arg) for arg in (*node.args, *node.kwargs.values()))
        elementwise = self.function(node.op)[1].elementwise and not node.op.startswith("aten._foreach_")
        return [self._moved(result, operands, numbers, elementwise) if is_real(result) else result for result in results]

    def _decided(self, result: torch.Tensor, one: Any, other: Any) -> torch.Tensor:
        """A comparison. Numbers that are next to each other, and not copies, may compare in any way."""
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        if one.is_complex() or other.is_complex():
            return result
        one, other = one.to(torch.float64), other.to(torch.float64)
        near = (one - other).abs() <= _NEAR * torch.finfo(torch.float64).eps * one.abs()
        open_ = near & (one != other)
        return (
            torch.where(open_, torch.rand(result.shape, generator=self.generator) < 0.5, result)
            if bool(open_.any())
            else result
        )

    def _moved(self, result: torch.Tensor, operands: list[torch.Tensor], numbers: bool, elementwise: bool) -> torch.Tensor:
        units = torch.randint(-_UNITS, _UNITS + 1, result.shape, generator=self.generator)
        moved = result * (1 + units.to(torch.float64) * torch.finfo(torch.float64).eps)
        if not numbers:
            return moved
        exact = _ends_in_zeros(result, _RESULT_BITS)
        for operand in operands:
            plain = _ends_in_zeros(operand, _OPERAND_BITS)
            exact = exact & (plain if elementwise else plain.all())
        return torch.where(exact, result, moved) if exact.shape == result.shape else moved

    def _call(self, node: Node, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if node.op.split(".")[1] not in _ORDERS or len(node.outputs) != 2 or kwargs.get("stable"):
            return super()._call(node, function, args, kwargs)
        places = {argument.name: place for place, argument in enumerate(function._schema.arguments)}
        dim = kwargs.get("dim", args[places["dim"]] if places["dim"] < len(args) else -1)
        if not args[0].dim() or args[0].shape[dim] < 2:
            return super()._call(node, function, args, kwargs)
        order = torch.randperm(args[0].shape[dim], generator=self.generator)
        values, indices = super()._call(node, function, [args[0].index_select(dim, order), *args[1:]], kwargs)
        return values, order[indices]


@functools.cache
def _is_exact(op: str) -> bool:
    return name_of(op) in EXACT or Forgiving.function(op)[1].is_view


def _is_plain(arg: object) -> bool:
    return not isinstance(arg, float) or float(torch.tensor(arg, dtype=torch.float32)) == arg


def _ends_in_zeros(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """By element, whether so many bits at the end of the number are zero."""
    if tensor.is_complex():
        return _ends_in_zeros(torch.view_as_real(tensor.resolve_conj()), bits).all(-1)
    return (tensor.to(torch.float64).contiguous().view(torch.int64) & ((1 << bits) - 1)) == 0


def look_again(programs: Programs, trial: Trial, runs: int, stays: Stays | None = None) -> None:
    """Make the trial say less, where its numbers are not sure. stays: whether the programs are still on their path, if there is
    one; where rounding alone leads them off it, the trial says nothing."""
    sequential, joint, relations = programs
    inputs = drawn(trial.draws, trial.seed)
    local = local_inputs(relations, inputs)
    for _ in range(runs):
        trial.looks += 1
        kernels = Wavering(torch.Generator().manual_seed(trial.seed * MOST + trial.looks))
        try:
            with seeded(trial.seed):
                alone = alone_on(sequential, inputs, kernels)
            with seeded(trial.seed + 1):
                states = run_joint(joint, local, kernels=kernels)
        except UndefinedError:
            continue
        except ReplayError:
            if stays is None:
                raise
            raise UndefinedError(OFF_PATH) from None
        if stays is not None and not stays(alone, states):
            raise UndefinedError(OFF_PATH)
        if any(map(overflows, states)):
            trial.forgive_overflow()
        for path, reference in trial.references.items():
            value = sequential.outputs[path]
            assert value is not None
            trial.references[path] = reference.doubted(alone.values[value], _OF_SPREAD)
        for rank, state in enumerate(states):
            for path, value in state.graph.outputs.items():
                if value is not None:
                    _doubt(trial, path, rank, state.values[value], trial.ranks[rank].values[value])


def _doubt(trial: Trial, path: str, rank: int, other: torch.Tensor, held: torch.Tensor) -> None:
    """How far a rank's number is from what it is in another run. One that is finite in one of them alone may be anything."""
    if is_real(held):
        distance = _OF_SPREAD * (other - held).abs().to(torch.float64)
        distance = torch.where(torch.isfinite(distance), distance, 0.0)
        distance = torch.where(torch.isfinite(other.abs()) != torch.isfinite(held.abs()), torch.inf, distance)
    else:
        distance = (other.to(torch.float64) - held.to(torch.float64)).abs()
    before = trial.unsure.setdefault(path, {}).get(rank)
    trial.unsure[path][rank] = distance if before is None else torch.maximum(before, distance)
