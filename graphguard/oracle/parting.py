"""Where the values of two programs part: the first sequential tensor on the way to an output that the ranks do not hold.

A tensor counts as held if it, or its tiles under some placement, are among the ranks' tensors or sums of them over axes of the
mesh, whatever their shape and order: tensors are compared by how many numbers they have, their sum and their size.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from graphguard.counterexample import Element, Number, Parting
from graphguard.ir import Graph, Mesh, Node, Value
from graphguard.joint import Joint
from graphguard.lines import OwnLines
from graphguard.oracle.grid import Grid, Placements, cut
from graphguard.oracle.trial import Trial

_MOST_ELEMENTS = 20_000_000  # of all tensors that are looked at
_MOST_PLACEMENTS = 64
_MOST_RANKS = 8  # that are looked at
_NEAR = 1e-7
Print = tuple[int, float, float]  # how many numbers, their size, their sum


def parting_of(
    sequential: Graph, joint: Joint, trial: Trial, element: Element, mesh: Mesh, shown: Trial | None = None
) -> Parting | None:
    """The place on the way to a wrong element where values part; None if there is none to be found cheaply.

    shown: the trial whose numbers are told, if that is another one.
    """
    held = [trial.sequential, *trial.ranks]
    if sum(value.numel for state in held for value in state.values) > _MOST_ELEMENTS:
        return None
    return _Search(sequential, joint, trial, mesh, shown or trial).run(element)


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
    def __init__(self, sequential: Graph, joint: Joint, trial: Trial, mesh: Mesh, shown: Trial):
        self.sequential, self.joint, self.trial, self.shown = sequential, joint, trial, shown
        self.grid = Grid(mesh, tuple(range(mesh.size)))
        self.makers = {value: node for node in sequential.nodes for value in node.outputs}
        self.of_ranks = [_Prints.of(map(_print, state.values.values())) for state in trial.ranks]
        self.sums = self._sums()
        self.expected: dict[int, _Prints] = {}

    def run(self, element: Element) -> Parting | None:
        path, rank = element.path, element.rank
        output, local = self.sequential.outputs[path], self.joint.graphs[rank].outputs[path]
        assert output is not None and local is not None
        before, made = self._sequential_break(output)
        rank, after, tensor = self._first_rank_break(rank, path)
        if before is None and after is None:  # all is held, to the end: what is wrong is how the output is
            rank = element.rank
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
            distributed=None if after is None else OwnLines(self.sequential).at(after),
            ranks=(rank,),
            expected=expected,
            actual=actual,
        )

    # ------------------------------------------------------------------ the sequential side
    def _sequential_break(self, output: Value) -> tuple[Node | None, Value]:
        """Back from an output, along what the ranks do not hold, to the first such tensor."""
        values = self.trial.sequential.values
        return _break(self.sequential, output, lambda value: value not in values or self._find(values[value]), values)

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
    def _first_rank_break(self, shown: int, path: str) -> tuple[int, Node | None, Value]:
        """The rank that leaves the sequential program first: what others hold may be wrong because of what it sent."""
        breaks = []
        for rank in sorted({shown, *range(min(_MOST_RANKS, len(self.joint.graphs)))}):
            graph = self.joint.graphs[rank]
            local = graph.outputs.get(path)
            if local is not None:
                node, tensor = self._rank_break(rank, local)
                place = len(graph.nodes) if node is None else next(n for n, each in enumerate(graph.nodes) if each is node)
                breaks.append((place, rank != shown, rank, node, tensor))
        _, _, rank, node, tensor = min(breaks, key=lambda each: each[:3])
        return rank, node, tensor

    def _rank_break(self, rank: int, output: Value) -> tuple[Node | None, Value]:
        """Back from an output of a rank, along what the sequential program does not have, to the first such tensor."""
        graph = self.joint.graphs[rank]
        places = {v: (n, p) for n, node in enumerate(graph.nodes) for p, v in enumerate(node.outputs)}
        return _break(graph, output, lambda value: self._is_known(rank, value, places), self.trial.ranks[rank].values)

    def _is_known(self, rank: int, value: Value, places: Mapping[Value, tuple[int, int]]) -> bool:
        """Whether a rank's tensor is one of the sequential program, a tile, or a summand of one."""
        if rank not in self.expected:
            self.expected[rank] = _Prints.of(self._tiles(rank))
        state = self.trial.ranks[rank]
        if value not in state.values:
            return True
        return self.expected[rank].has(_print(state.values[value])) or self._is_summand(rank, places[value])

    def _tiles(self, lane: int) -> Iterator[Print]:
        for tensor in self.trial.sequential.values.values():
            for placements in self._placements(tensor):
                yield _print(cut(tensor, self.grid.spans(tensor.shape, placements, lane)))

    def _is_summand(self, rank: int, place: tuple[int, int]) -> bool:
        if not self.sums:
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
        mine, its = self.shown.sequential.values.get(made), self.shown.ranks[rank].values.get(local)
        if mine is None or its is None or mine.is_complex() or its.is_complex() or not its.numel():
            return None, None
        for placements in self._placements(mine):
            part = cut(mine, self.grid.spans(mine.shape, placements, rank))
            if part.shape == its.shape:
                distance = (part.to(torch.float64) - its.to(torch.float64)).abs().nan_to_num(0.0)
                place = int(distance.reshape(-1).argmax())
                if not float(distance.reshape(-1)[place]):
                    return None, None
                return float(part.reshape(-1)[place]), float(its.reshape(-1)[place])
        return None, None


def _real(number: Number) -> float | None:
    return None if isinstance(number, complex) else float(number)


def _break(
    graph: Graph, output: Value, is_related: Callable[[Value], bool], values: Mapping[Value, torch.Tensor]
) -> tuple[Node | None, Value]:
    """Back from an output, along tensors that are not related, to the first of them and the operation that makes it.

    A tensor that leads to a related one is no suspect: programs may differ on the way and agree again. Nor is a number that
    only counts, or one that is the same everywhere.
    """
    makers = {value: node for node in graph.nodes for value in node.outputs}
    users: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.operands():
            users.setdefault(value, []).append(node)
    fine: dict[Value, bool] = {}
    for node in reversed(graph.nodes):
        for value in node.outputs:
            after = [result for user in users.get(value, ()) for result in user.outputs]
            leads_back = any(fine.get(result, False) and _tells(values.get(result)) for result in after)
            fine[value] = leads_back or not _tells(values.get(value)) or is_related(value)
    value, passed = output, set()
    while (made := makers.get(value)) is not None and value not in passed:
        passed.add(value)
        lost = next((operand for operand in made.operands() if not fine.get(operand, True)), None)
        if lost is None:
            return (made, value) if not fine[value] else (None, value)
        value = lost
    return None, value


def _tells(tensor: torch.Tensor | None) -> bool:
    """Whether numbers say anything of what they were made from: counts, and what is the same everywhere, do not."""
    if tensor is None or not tensor.numel() or tensor.is_complex():
        return tensor is not None and tensor.is_complex()
    first = tensor.reshape(-1)[0]
    return not bool((tensor == first).all()) if tensor.numel() > 1 else float(first) != round(float(first.nan_to_num(0.5)))


def _print(tensor: torch.Tensor) -> Print:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    flat = flat.to(torch.float64).nan_to_num(7.0, 3e5, -3e5)
    return flat.numel(), float(flat.norm()), float(flat.sum())
