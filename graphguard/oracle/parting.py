"""Where the values of two programs part: the first sequential tensor on the way to an output that the ranks do not hold.

A tensor counts as held if it, or its tiles under some placement, are among the ranks' tensors or sums of them over axes of the
mesh, whatever their shape and order: tensors are compared by how many numbers they have, their sum and their size.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from graphguard.counterexample import Element, Number, Parting
from graphguard.ir import Graph, Mesh, Node, Value
from graphguard.joint import Joint
from graphguard.oracle.grid import Grid, Placements, cut
from graphguard.oracle.trial import Trial

_MOST_ELEMENTS = 20_000_000  # of all tensors that are looked at
_MOST_PLACEMENTS = 64
_NEAR = 1e-7
Print = tuple[int, float, float]  # how many numbers, their size, their sum


def parting_of(sequential: Graph, joint: Joint, trial: Trial, element: Element, mesh: Mesh) -> Parting | None:
    """The place on the way to a wrong element where values part; None if there is none to be found cheaply."""
    held = [trial.sequential, *trial.ranks]
    if sum(value.numel for state in held for value in state.values) > _MOST_ELEMENTS:
        return None
    return _Search(sequential, joint, trial, mesh).run(element)


@dataclass(frozen=True)
class _Prints:
    """Fingerprints that can be looked up by nearness."""

    sizes: dict[int, list[tuple[float, float]]]

    @staticmethod
    def of(prints: Iterable[Print]) -> _Prints:
        sizes: dict[int, list[tuple[float, float]]] = {}
        for count, size, total in prints:
            sizes.setdefault(count, []).append((size, total))
        for entries in sizes.values():
            entries.sort()
        return _Prints(sizes)

    def has(self, wanted: Print) -> bool:
        count, size, total = wanted
        entries = self.sizes.get(count, [])
        slack = _NEAR * size + 1e-12
        place = bisect_left(entries, (size - slack, -math.inf))
        while place < len(entries) and entries[place][0] <= size + slack:
            if abs(entries[place][1] - total) <= _NEAR * size * math.sqrt(count) + 1e-12:
                return True
            place += 1
        return False


class _Search:
    def __init__(self, sequential: Graph, joint: Joint, trial: Trial, mesh: Mesh):
        self.sequential, self.joint, self.trial = sequential, joint, trial
        self.grid = Grid(mesh, tuple(range(mesh.size)))
        self.makers = {value: node for node in sequential.nodes for value in node.outputs}
        self.of_ranks = [_Prints.of(map(_print, state.values.values())) for state in trial.ranks]
        self.sums = self._sums()
        self.known: dict[Value, bool] = {}
        self.expected: dict[int, _Prints] = {}

    def run(self, element: Element) -> Parting | None:
        path, rank = element.path, element.rank
        output, local = self.sequential.outputs[path], self.joint.graphs[rank].outputs[path]
        assert output is not None and local is not None
        before, made = self._sequential_break(output)
        after, tensor = self._rank_break(rank, local)
        if before is None and after is None:  # all is held, to the end: what is wrong is how the output is
            before, made, tensor = self.makers.get(output), output, local
            after = next((node for node in self.joint.graphs[rank].nodes if local in node.outputs), None)
        if before is None and after is None:
            return None
        if made is output and tensor is local:
            expected, actual = _real(element.expected), _real(element.actual)
        else:
            expected, actual = self._numbers(made, rank, tensor)
        return Parting(
            operator=(before or after).op.removesuffix(".default"),  # type: ignore[union-attr]
            sequential=None if before is None else before.source,
            distributed=None if after is None else after.source,
            ranks=(rank,),
            expected=expected,
            actual=actual,
        )

    # ------------------------------------------------------------------ the sequential side
    def _sequential_break(self, output: Value) -> tuple[Node | None, Value]:
        """Back from an output, along what the ranks do not hold, to the first such tensor."""
        value = output
        while (node := self.makers.get(value)) is not None:
            lost = next((operand for operand in node.operands() if not self._is_held(operand)), None)
            if lost is None:
                return (node, value) if not self._is_held(value) else (None, value)
            value = lost
        return None, value

    def _is_held(self, value: Value) -> bool:
        if value not in self.makers or value not in self.trial.sequential.values:
            return True  # an input or a constant
        if value not in self.known:
            self.known[value] = self._find(self.trial.sequential.values[value])
        return self.known[value]

    def _find(self, tensor: torch.Tensor) -> bool:
        for placements in self._placements(tensor):
            tiles = [
                _print(cut(tensor, self.grid.spans(tensor.shape, placements, lane))) for lane in range(len(self.grid.ranks))
            ]
            if all(self.of_ranks[lane].has(tile) for lane, tile in enumerate(tiles)):
                return True
            if any(all(prints[lane].has(tile) for lane, tile in enumerate(tiles)) for prints in self.sums):
                return True
        return any(prints.has(_print(tensor)) for prints in self.of_ranks)  # a stage of a pipeline has what others have not

    def _placements(self, tensor: torch.Tensor) -> Iterator[Placements]:
        every = self.grid.candidates(tensor.shape)
        without = (p for p in every if not any(each.startswith("Partial(") for each in p))
        return itertools.islice(without, _MOST_PLACEMENTS)

    def _sums(self) -> list[list[_Prints]]:
        """By choice of axes to sum over, and lane: sums of what the ranks make at the same place of their programs."""
        graphs = self.joint.graphs
        if any([n.op for n in graph.nodes] != [n.op for n in graphs[0].nodes] for graph in graphs):
            return []
        found = []
        for summed in itertools.product(*((False, True) if size > 1 else (False,) for size in self.grid.mesh.shape)):
            if any(summed):
                placements = tuple("Partial(sum)" if chosen else "Replicate" for chosen in summed)
                found.append(self._summed(placements))
        return found

    def _summed(self, placements: Placements) -> list[_Prints]:
        prints: list[list[Print]] = [[] for _ in self.grid.ranks]
        for nodes in zip(*(graph.nodes for graph in self.joint.graphs), strict=True):
            for values in zip(*(node.outputs for node in nodes), strict=False):
                states = zip(self.trial.ranks, values, strict=True)
                tensors = [state.values[value] for state, value in states if value in state.values]
                if len(tensors) < len(self.grid.ranks) or not tensors[0].is_floating_point():
                    continue
                reduced = self.grid.reduced(tensors, placements)
                for lane, tensor in enumerate(reduced or ()):
                    prints[lane].append(_print(tensor))
        return [_Prints.of(each) for each in prints]

    # ------------------------------------------------------------------ the side of a rank
    def _rank_break(self, rank: int, output: Value) -> tuple[Node | None, Value]:
        """Back from an output of a rank, along what the sequential program does not have, to the first such tensor."""
        makers = {value: node for node in self.joint.graphs[rank].nodes for value in node.outputs}
        value, passed = output, set()
        while (node := makers.get(value)) is not None and value not in passed:
            passed.add(value)
            lost = next((v for v in node.operands() if v in makers and not self._is_known(rank, v)), None)
            if lost is None:
                return (node, value) if not self._is_known(rank, value) else (None, value)
            value = lost
        return None, value

    def _is_known(self, rank: int, value: Value) -> bool:
        """Whether a rank's tensor is one of the sequential program, a tile, or a summand of one."""
        if rank not in self.expected:
            self.expected[rank] = _Prints.of(self._tiles(rank))
        state = self.trial.ranks[rank]
        if value not in state.values:
            return True
        return self.expected[rank].has(_print(state.values[value])) or self._is_summand(rank, value)

    def _tiles(self, lane: int) -> Iterator[Print]:
        for tensor in self.trial.sequential.values.values():
            for placements in self._placements(tensor):
                yield _print(cut(tensor, self.grid.spans(tensor.shape, placements, lane)))

    def _is_summand(self, rank: int, value: Value) -> bool:
        if not self.sums:
            return False
        place = _place_of(self.joint.graphs[rank], value)
        if place is None:
            return False
        number, position = place
        values = [graph.nodes[number].outputs[position] for graph in self.joint.graphs]
        if any(v not in state.values for v, state in zip(values, self.trial.ranks, strict=True)):
            return False
        tensors = [state.values[v] for v, state in zip(values, self.trial.ranks, strict=True)]
        for summed in itertools.product(*((False, True) if size > 1 else (False,) for size in self.grid.mesh.shape)):
            if any(summed) and tensors[0].is_floating_point():
                reduced = self.grid.reduced(tensors, tuple("Partial(sum)" if chosen else "Replicate" for chosen in summed))
                if reduced is not None and self.expected[rank].has(_print(reduced[rank])):
                    return True
        return False

    # ------------------------------------------------------------------ numbers
    def _numbers(self, made: Value, rank: int, local: Value) -> tuple[float | None, float | None]:
        """One number of each of two tensors at the same place, where they differ most; none where the shapes do not fit."""
        mine, its = self.trial.sequential.values.get(made), self.trial.ranks[rank].values.get(local)
        if mine is None or its is None or mine.is_complex() or its.is_complex() or not its.numel():
            return None, None
        for placements in self._placements(mine):
            part = cut(mine, self.grid.spans(mine.shape, placements, rank))
            if part.shape == its.shape:
                distance = (part.to(torch.float64) - its.to(torch.float64)).abs().nan_to_num(0.0)
                place = int(distance.reshape(-1).argmax())
                return float(part.reshape(-1)[place]), float(its.reshape(-1)[place])
        return None, None


def _real(number: Number) -> float | None:
    return None if isinstance(number, complex) else float(number)


def _place_of(graph: Graph, value: Value) -> tuple[int, int] | None:
    for number, node in enumerate(graph.nodes):
        for position, output in enumerate(node.outputs):
            if output is value:
                return number, position
    return None


def _print(tensor: torch.Tensor) -> Print:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    flat = flat.to(torch.float64).nan_to_num(7.0, 3e5, -3e5)
    return flat.numel(), float(flat.norm()), float(flat.sum())
