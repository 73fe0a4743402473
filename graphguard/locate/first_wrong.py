"""Where the ranks leave the sequential program: the first of their tensors that it does not have, though it has the operands.

A tensor of a rank is known if it is made of elements of a sequential tensor, or if sums over axes of the mesh are (`known.py`).
What is not known but leads to what is known is harmless: programs may differ on the way and agree again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch

from graphguard.graph import operators
from graphguard.graph.ir import Graph, Mesh, Node, Source, Value, is_unwritten
from graphguard.graph.limits import Stops
from graphguard.graph.lines import OwnLines
from graphguard.graph.matching import Joint
from graphguard.graph.operators import name_of
from graphguard.locate.limits import Limits
from graphguard.locate.made_of import MadeOf, Numbers, Origin, Probe
from graphguard.oracle.grid import Grid
from graphguard.oracle.trial import Trial

At = tuple[int, Value]  # a rank, and a tensor of its program
Tensors = list[torch.Tensor]
PASSED_OVER = {"detach", "alias", "clone", "t", "expand", "unsqueeze", "squeeze", "_to_copy", "diagonal", "as_strided"}
MOVES = operators.MOVES - PASSED_OVER
_BY_DATA = {"embedding", "masked_fill", "scatter"}  # where an element goes is said by data, seldom by a number that is wrong
CUTS = (operators.REORDERS | operators.TAKES | operators.WRITES | {"cat", "stack"}) - PASSED_OVER - _BY_DATA
_TAKE_A_PART = (PASSED_OVER | operators.RESHAPES | operators.TAKES) - _BY_DATA
# What operators compute inside: the ranks may make it in steps of their own.
_INSIDE: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "addmm": lambda given, made: [made[0] - given[0]],
    "_log_softmax": lambda given, made: [made[0].exp()],
    "mse_loss": lambda given, made: [given[0] - given[1], (given[0] - given[1]).square()],
    "native_layer_norm": lambda given, made: [(given[0] - made[1]) * made[2]],
    "silu": lambda given, made: [given[0].sigmoid()],
    "mean": lambda given, made: [made[0] * (given[0].numel() / max(1, made[0].numel()))],
    "logsumexp": lambda given, made: [given[0].exp(), made[0].exp()],
    "linalg_vector_norm": lambda given, made: [given[0].square(), made[0].square()],
}

_MULTIPLES = tuple(float(n) for n in range(2, 17)) + tuple(1 / n for n in range(2, 17))


@dataclass(frozen=True)
class Suspect:
    rank: int
    node: Node
    value: Value


def suspects_of(sequential: Graph, joint: Joint, trial: Trial, mesh: Mesh, stops: Stops | None = None) -> Suspects | None:
    """None where there are too many numbers to look at."""
    stops = Stops(Limits()) if stops is None else stops
    for limit, states in (("elements", [trial.sequential]), ("elements_of_ranks", trial.ranks)):
        if stops.over(limit, sum(value.numel for state in states for value in state.values)):
            return None
    return Suspects(sequential, joint, trial, mesh, stops)


class Suspects:
    def __init__(self, sequential: Graph, joint: Joint, trial: Trial, mesh: Mesh, stops: Stops):
        self.sequential, self.joint, self.trial, self.mesh, self.stops = sequential, joint, trial, mesh, stops
        self.own_lines = OwnLines(sequential)
        self.tensors = list(self._sequential())
        self.known = MadeOf(self.tensors)
        axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
        self.sums = [chosen for count in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, count)]
        self.sizes = sorted({float(math.prod(mesh.shape[axis] for axis in chosen)) for chosen in self.sums})
        self.makers: dict[At, tuple[int, Node]] = {}
        self.order: dict[Node, int] = {}
        self.names: dict[At, object] = {}  # what the tensors of several ranks that are made at the same place share
        self.named: dict[object, dict[int, Value]] = {}
        for rank, graph in enumerate(joint.graphs):
            self._enter(rank, graph)
        self._origins: dict[At, Origin | None] = {}
        self._telling: dict[At, bool] = {}

    def _enter(self, rank: int, graph: Graph) -> None:
        counts: dict[object, int] = {}
        for place, node in enumerate(graph.nodes):
            self.order[node] = place
            kind = (node.op, node.source, node.backward)
            counts[kind] = counts.get(kind, 0) + 1
            for number, value in enumerate(node.outputs):
                self.makers[rank, value] = rank, node
                self.names[rank, value] = name = (*kind, counts[kind], number)
                self.named.setdefault(name, {})[rank] = value

    def _sequential(self) -> Iterator[tuple[Value | None, torch.Tensor]]:
        """All tensors of the sequential program, and what its operators compute inside."""
        values = self.trial.sequential.values
        yield from values.items()
        for node in self.sequential.nodes:
            inside = _INSIDE.get(name_of(node.op))
            if inside is not None and all(each in values for each in (*node.operands(), *node.outputs)):
                found = inside([values[each] for each in node.operands()], [values[each] for each in node.outputs])
                yield from ((None, tensor) for tensor in found)

    def operands(self, rank: int, node: Node) -> list[At]:
        """What an operation reads; one that communicates reads the tensors of all ranks that take part."""
        if node.communicates and node.op != "dist.wait":
            match = self.joint.match_of(rank, node)
            return [(other, value) for other, each in match.nodes.items() for value in each.operands()]
        return [(rank, value) for value in node.operands()]

    # ------------------------------------------------------------------ what a tensor is
    def tells(self, at: At) -> bool:
        """Whether a tensor is made by an operation, and its numbers say of what."""
        if at not in self._telling:
            rank, value = at
            tensor = self.trial.ranks[rank].values.get(value) if at in self.makers else None
            self._telling[at] = tensor is not None and (
                bool(Probe.of(tensor).numbers.size) or (tensor.is_floating_point() and bool(tensor.isnan().any()))
            )
        return self._telling[at]

    def origin(self, at: At) -> Origin | None:
        """What a telling tensor is in the sequential program; None if it is nothing there."""
        if at not in self._origins:
            self._origins[at] = self._found(at)
        return self._origins[at]

    def _found(self, at: At) -> Origin | None:
        sample = Probe.of(self.trial.ranks[at[0]].values[at[1]])
        if not sample.numbers.size:
            return None
        origin = self.known.origin(sample)
        if origin is None:  # the gradient of a mean over a rank's part is so many times a tile
            origin = self.known.origin(sample, self.sizes)
            if origin is not None and (origin.whole or origin.owner is None):
                origin = None
        return origin or self._summed(at)

    def _summed(self, at: At) -> Origin | None:
        """The sum, or the mean, of what the ranks of some axes make at the same place."""
        lanes, grid = self.named[self.names[at]], Grid(self.mesh, tuple(range(self.mesh.size)))
        for axes in self.sums:
            group = grid.lanes_over(axes, at[0])
            tensors = [self.trial.ranks[rank].values.get(lanes[rank]) for rank in group if rank in lanes]
            held = [tensor for tensor in tensors if tensor is not None and tensor.shape == at[1].shape]
            copies = all(torch.equal(each, held[0]) for each in held[1:])  # of a share: no summands
            if len(held) == len(group) and not copies:
                sample = Probe.of(sum(held[1:], held[0]))
                origin = self.known.origin(sample, (1.0, float(len(group)))) if sample.numbers.size else None
                if origin is not None and origin.owner is not None:
                    return Origin(origin.owner, origin.whole, origin.factor, axes)
        return None

    def _is_lost(self, at: At) -> bool:
        return self.tells(at) and self.origin(at) is None

    @cached_property
    def _harmless(self) -> set[At]:
        found: set[At] = set()
        pending: list[At] = []
        for at, (rank, node) in self.makers.items():
            if name_of(node.op) not in _TAKE_A_PART and self.tells(at):
                origin = self.origin(at)
                if origin is not None and origin.owner is not None:
                    pending += self.operands(rank, node)
        while pending:
            at = pending.pop()
            if at not in found and self._is_lost(at):
                found.add(at)
                pending += self.operands(*self.makers[at])
        return found

    # ------------------------------------------------------------------ the search
    def first(self, path: str) -> Suspect | None:
        """Back from an output, along what is not known, to the first such tensor; what leads to known ones comes last."""
        values = [(rank, graph.outputs.get(path)) for rank, graph in enumerate(self.joint.graphs)]
        return self.first_before([(rank, value) for rank, value in values if value is not None])

    def first_before(self, ends: Iterable[At]) -> Suspect | None:
        """Back from tensors, along what is not known, to the first such one."""
        lost = self._lost_before(ends)
        found = [
            Suspect(rank, node, value)
            for rank, value in lost
            for node in [self.makers[rank, value][1]]
            if not any(each in lost for each in self.operands(rank, node))
        ]
        found = [each for each in found if not is_unwritten(each.node)] or found
        harmless = {each for each in found if (each.rank, each.value) in self._harmless}
        return min(found, key=lambda each: (each in harmless, self.order[each.node], each.rank, each.value.id), default=None)

    def first_sum_before(self, ends: Iterable[At]) -> Node | None:
        """Back from tensors, along what is not known: the first sum over ranks of what is no summand of anything."""
        sums = [node for rank, value in self._lost_before(ends) if "reduce" in (node := self.makers[rank, value][1]).kwargs]
        return min(sums, key=self.order.__getitem__, default=None)

    def _lost_before(self, ends: Iterable[At]) -> set[At]:
        pending, lost = list(ends), set()
        while pending:
            at = pending.pop()
            if at not in lost and self._is_lost(at):
                lost.add(at)
                pending += self.operands(*self.makers[at])
        return lost

    def counterpart(self, suspect: Suspect) -> Node | None:
        """The sequential operation that reads what a suspect reads: the same operator, if there is one."""
        wanted = {owner for at in self.operands(suspect.rank, suspect.node) if (owner := self._owner(at)) is not None}
        best, score = None, (0, False)
        for node in self.sequential.nodes:
            shared = len(wanted & {self.known.owner_of.get(value, -1) for value in node.operands()})
            reached = (shared, node.op.split(".")[1] == suspect.node.op.split(".")[1])
            if shared and reached > score:
                best, score = node, reached
        return best

    def value_of(self, owner: int) -> Value | None:
        """The first sequential tensor that has the elements of an owner."""
        return next((value for value, number in self.known.owner_of.items() if number == owner), None)

    def _owner(self, at: At) -> int | None:
        tensor = self.trial.ranks[at[0]].values.get(at[1])
        sample = None if tensor is None else Probe.of(tensor)
        if sample is None or not sample.numbers.size:
            return None
        origin = self.origin(at) if at in self.makers else self.known.origin(sample)
        return None if origin is None else origin.owner

    def _are_copies(self, rank: int, reduction: Node) -> bool:
        """Whether every rank gives a whole sequential tensor to a reduction."""
        given = [self.operands(*member) for member in self.joint.match_of(rank, reduction).nodes.items()]
        origins = [self.origin(at) for ats in given for at in ats if self.tells(at)]
        return bool(origins) and all(each is not None and each.whole and not each.summed for each in origins)

    def words(self, suspect: Suspect) -> str | None:
        """What is wrong with a suspect's result, where that can be told."""
        node, operands = suspect.node, self.operands(suspect.rank, suspect.node)
        origins = [self.origin(at) for at in operands if self.tells(at)]
        if node.kwargs.get("reduce") == "sum" and self._are_copies(suspect.rank, node):
            count = len(self.joint.match_of(suspect.rank, node).group)
            return f"each of the {count} ranks has the whole value already, so the sum counts it {count} times"
        tensor = self.trial.ranks[suspect.rank].values[suspect.value]
        sample = Probe.of(tensor)
        multiple = self.known.origin(sample, _MULTIPLES) if sample.numbers.size else None
        if multiple is not None and multiple.whole and multiple.owner not in self._inputs:
            factor = Fraction(multiple.factor).limit_denominator(64)
            return f"it is {factor} times what the sequential program has{self._sizes_in_words(factor)}"
        summed = sorted({axis for each in origins if each is not None for axis in each.summed})
        if summed and not node.communicates:
            names = ", ".join(self.mesh.names[axis] for axis in summed)
            return f"an operand is a summand over {names}, which is not summed before"
        return None

    def _sizes_in_words(self, factor: Fraction) -> str:
        axes = [name for name, size in self.mesh.axes if size > 1 and size in (factor, 1 / factor)]
        return f" (the size of axis {axes[0]})" if len(axes) == 1 else ""

    @cached_property
    def _inputs(self) -> set[int | None]:
        """What the inputs are known as."""
        return {None, *(self.known.owner_of.get(value) for value in self.sequential.inputs.values())}

    def beside(self, suspect: Suspect) -> Source | None:
        """Another line that may be the fault: where an operand became a summand, or else where the operands were moved last."""
        operands = self.operands(suspect.rank, suspect.node)
        since = [node for at in operands if (node := self.summand_since(at)) is not None]
        return self._beside([*since, *self._moves(operands)], suspect)

    def before(self, suspect: Suspect) -> Source | None:
        """Where what the operands come of was moved last."""
        return self._beside(self._earlier_moves(self.operands(suspect.rank, suspect.node)), suspect)

    def _beside(self, nodes: list[Node], suspect: Suspect) -> Source | None:
        here = self.own_lines.of(suspect.node.source)
        found = (self._line_beside(node, here) for node in nodes)
        lines = [line for line in found if line is not None and (here is None or line.place != here.place)]
        others = (line for line in lines if here is None or all(each.place != here.place for each in line.outwards()))
        return next(others, lines[0] if lines else None)  # what a line calls for says less than another line

    def _line_beside(self, node: Node, here: Source | None) -> Source | None:
        """The line of an operation; if a function did it for the one that has the line `here`, the line that called it."""
        line = self.own_lines.of(node.source)
        if line is None or here is None:
            return line
        calls = (each for each in line.outwards() if (each.file, each.function) == (here.file, here.function))
        return next((each for each in calls if each.place != here.place), line)

    def _earlier_moves(self, ats: list[At]) -> list[Node]:
        """Operations before some tensors that took a part of something, or put parts together; the last first."""
        found: set[tuple[int, int, Node]] = set()
        pending, seen = list(ats), set(ats)
        while pending and not self.stops.over("earlier_tensors", len(seen) + 1):
            rank, node = self.makers.get(pending.pop(0), (0, None))
            if node is None:
                continue
            if (node.communicates or name_of(node.op) in CUTS) and not self._begins(node):
                found.add((-self.order[node], rank, node))
            fresh = [at for at in self.operands(rank, node) if at not in seen]
            seen.update(fresh)
            pending += fresh
        return [node for *_, node in sorted(found, key=lambda each: each[:2])]

    def summand_since(self, at: At) -> Node | None:
        """The operation that made a summand of what was none, on the way to a tensor that is one."""
        found = None
        while self.tells(at) and (origin := self.origin(at)) is not None and origin.summed:
            rank, found = self.makers[at]
            summands = (each for each in self.operands(rank, found) if self.tells(each))
            at = next((each for each in summands if (o := self.origin(each)) is not None and o.summed), (-1, at[1]))
        return found

    def callers(self, suspect: Suspect) -> list[Source]:
        """The lines that called for a suspect: the outermost, and the nearest."""
        here = self.own_lines.of(suspect.node.source)
        lines = [] if here is None else list(here.outwards())[1:]
        before = self.before(suspect)
        return [*lines[-1:], *lines[:1], *([] if before is None else [before])]

    def _moves(self, operands: list[At]) -> list[Node]:
        """Operations that only moved known numbers on the way to operands, or made numbers that say nothing; the last first,
        and first of all those that made such numbers as the sequential program has not."""
        found: set[tuple[bool, int, int, Node]] = set()
        pending, seen = list(operands), set()
        while pending:
            at = pending.pop()
            if at in seen or at not in self.makers:
                continue
            seen.add(at)
            rank, node = self.makers[at]
            moves = node.communicates or name_of(node.op) in MOVES
            if not (moves or not self.tells(at) or name_of(node.op) in PASSED_OVER or at in self._free):
                continue
            if not self._begins(node) and name_of(node.op) not in PASSED_OVER and (moves or not self.tells(at)):
                found.add((self._is_plain_part(at), -self.order[node], rank, node))
            pending += self.operands(rank, node)
        return [node for *_, node in sorted(found, key=lambda each: each[:3])]

    def _is_plain_part(self, at: At) -> bool:
        """Whether a tensor is known, or its numbers, which say nothing, are all those of a tensor of the sequential program."""
        if self.tells(at):
            return True
        tensor = self.trial.ranks[at[0]].values.get(at[1])
        return tensor is None or _plain(tensor) in self._plain_parts or self._is_moved_input(at)

    def _is_moved_input(self, at: At) -> bool:
        while at in self.makers:
            rank, node = self.makers[at]
            operands = self.operands(rank, node)
            if not operands or name_of(node.op) not in MOVES | PASSED_OVER:
                return False
            at = operands[0]
        return at[1] in self.joint.graphs[at[0]].inputs.values()

    @cached_property
    def _plain_parts(self) -> set[bytes]:
        return {_plain(tensor) for tensor in self.trial.sequential.values.values() if not Probe.of(tensor).numbers.size}

    @staticmethod
    def _begins(node: Node) -> bool:
        """Whether an operation is one that autograd runs, with no line of its own: it has that of a forward operation."""
        written = node.source is not None and node.source.function == "backward"
        return (node.backward and not written) or (name_of(node.op) == "ones_like" and not node.outputs[0].shape)

    @cached_property
    def _free(self) -> set[At]:
        """Tensors that no input decides: positions, tables of angles."""
        found: set[At] = set()
        for rank, graph in enumerate(self.joint.graphs):
            for node in graph.nodes:
                if not node.communicates and all((rank, v) in found or v in graph.constants for v in node.operands()):
                    found.update((rank, value) for value in node.outputs)
        return found


def _plain(tensor: torch.Tensor) -> bytes:
    """Equal for tensors with the same elements, in whatever order."""
    numbers: Numbers = tensor.detach().reshape(-1).to(torch.float64).sort().values.numpy()
    return numbers.tobytes()
