"""What the ranks' tensors should have been: from a wrong output back to the operation that went wrong.

An output is right if the ranks hold what the sequential program has. From there, step by step: which other operands would
have made the result right? Tiles and sums of sequential tensors are tried in their place, and of what is only moved the
wanted numbers are moved back. Where the operands are right, or nothing in their place helps, an operation is the first to
be wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from graphguard.errors import ReplayError
from graphguard.graph.ir import Node, Value
from graphguard.graph.operators import name_of
from graphguard.graph.placement import SUM, Placements, has_partial, partial_axes
from graphguard.locate.acceptance import Acceptance
from graphguard.locate.first_wrong import CUTS, MOVES, PASSED_OVER, Suspects
from graphguard.locate.rerun import At, Change, CircleError, Edit, Rerun
from graphguard.oracle.grid import Grid, cut

Lanes = dict[int, Value]  # by rank, the tensor that it makes at one place of the program
Tensors = dict[int, torch.Tensor]
_MOST_PLACEMENTS = 64
_MOST_DEPTH, _MOST_TRIES, _MOST_FOR_ONE = 4, 32, 100  # of operands, of one place
_NEAR, _NEAR_ZERO = 1e-7, 1e-9  # relative to an element, and to the largest one


@dataclass(frozen=True)
class Want:
    """What the ranks should have: `parts` by rank, or groups of ranks whose sum should be the part of each of them."""

    parts: Tensors
    groups: tuple[tuple[int, ...], ...] = ()
    owner: Value | None = None  # the sequential tensor that it is of

    def fits(self, held: Tensors) -> bool:
        if not self.groups:
            return all(is_close(held[rank], part) for rank, part in self.parts.items())
        for group in self.groups:
            tensors = [held[rank] for rank in group]
            if any(tensor.shape != tensors[0].shape for tensor in tensors):
                return False
            size = max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)
            if not is_close(sum(tensors[1:], tensors[0]), self.parts[group[0]], size):
                return False
        return True

    def given(self, held: Tensors) -> Tensors:
        """Tensors that are as wanted. Of a sum, the first rank's is changed: what reads summands is linear."""
        if not self.groups:
            return self.parts
        found = dict(held)
        for group in self.groups:
            others = [held[rank] for rank in group[1:]]
            found[group[0]] = self.parts[group[0]] - sum(others[1:], others[0]) if others else self.parts[group[0]]
        return found


@dataclass
class Step:
    """A place where the ranks have something wrong, what they should have, and for which later place."""

    lanes: Lanes
    want: Want
    later: Step | None
    nodes: dict[int, Node] = field(default_factory=dict)
    summed: bool = False  # what the ranks hold sums up to what is wanted
    lost: tuple[At, ...] = ()  # operands that the sequential program does not have, where the search ends

    @property
    def node(self) -> Node:
        return next(iter(self.nodes.values()))

    def is_multiple(self, held: Tensors) -> bool:
        """Whether what the ranks hold is a number times what they should."""
        sizes = [(float(held[rank].abs().sum()), float(part.abs().sum())) for rank, part in self.want.parts.items()]
        if self.want.groups or any(not t.is_floating_point() for t in held.values()) or not all(all(each) for each in sizes):
            return False
        factor = sizes[0][0] / sizes[0][1]
        return any(
            all(is_close(held[rank], sign * factor * part) for rank, part in self.want.parts.items()) for sign in (1, -1)
        )

    def way(self) -> Iterator[Step]:
        """From here to the output."""
        step: Step | None = self
        while step is not None:
            yield step
            step = step.later


_FILLS = ("ones", "zeros", "full", "new_", "scalar_tensor")
_STRAIGHT = {"add", "sub", "rsub", "mul", "div", "neg"}  # straight lines in each operand


def _spelling(node: Node) -> str:
    """`add_`, which is another operation than `add` here."""
    return node.op.split(".")[1]


class Intended:
    def __init__(self, suspects: Suspects, rerun: Rerun):
        self.suspects, self.rerun = suspects, rerun
        self.grid = Grid(suspects.mesh, tuple(range(suspects.mesh.size)))
        self.makers = {value: node for node in suspects.sequential.nodes for value in node.outputs}
        self.sequential = self._distinct()
        self.tries = 0

    def _distinct(self) -> dict[tuple[int, torch.dtype], list[tuple[Value | None, torch.Tensor]]]:
        found: dict[tuple[int, torch.dtype], list[tuple[Value | None, torch.Tensor]]] = {}
        for value, tensor in self.suspects.tensors:
            alike = found.setdefault((tensor.dim(), tensor.dtype), [])
            if not any(tensor.shape == other.shape and torch.equal(tensor, other) for _, other in alike):
                alike.append((value, tensor))
        return found

    # ------------------------------------------------------------------ the search
    def tops(self, lanes: Lanes, want: Want) -> list[Step]:
        """The first wrong places on the way to an output. None where the ranks return too few parts."""
        if any(tensor.shape != want.parts[rank].shape for rank, tensor in self.held(lanes).items()):
            return []
        found: list[Step] = []
        pending = [Step(lanes, want, None)]
        seen: set[frozenset[At]] = set()
        while pending and not self._late():
            step = pending.pop()
            key = frozenset(step.lanes.items())
            if key in seen:
                continue
            seen.add(key)
            earlier = self._earlier(step)
            pending += earlier
            if not earlier and step.nodes and not self._late():
                operands = [at for rank, node in step.nodes.items() for at in self.suspects.operands(rank, node)]
                step.lost = tuple(at for at in operands if not self._is_part(at))
                found.append(step)
        return found

    def _late(self) -> bool:
        return self.suspects.stops.over("wanted_tries", self.tries + 1)

    def held(self, lanes: Lanes) -> Tensors:
        return {rank: self.rerun.values[rank, value] for rank, value in lanes.items()}

    def _earlier(self, step: Step) -> list[Step]:
        step.nodes = {rank: self.rerun.makers[rank, v] for rank, v in step.lanes.items() if (rank, v) in self.rerun.makers}
        held = self.held(step.lanes)
        wrong = [rank for rank in step.lanes if not step.want.groups and not is_close(held[rank], step.want.parts[rank])]
        kinds = {(node.op, len(list(node.operands()))) for node in step.nodes.values()}
        found: list[Step] = []
        for kind in sorted(kinds):
            ranks = [r for r, n in step.nodes.items() if (n.op, len(list(n.operands()))) == kind]
            if not step.want.groups and not any(rank in wrong for rank in ranks):
                continue
            found += self._operands(step, ranks)
        return found

    def _operands(self, step: Step, ranks: Sequence[int]) -> list[Step]:
        """What operands should have been; nothing where that is not known. Where nothing is known of what an operation reads,
        that is looked through to what it is made of."""
        level = self._read({rank: step.nodes[rank] for rank in ranks})
        together = self._counterparts(step, level)
        if together is not None:
            return together
        passed: set[At] = set()
        most = self.tries + _MOST_FOR_ONE
        for depth in range(_MOST_DEPTH):
            if self.tries > most:
                break
            made = [lanes for lanes in level if all(at in self.rerun.makers for at in lanes.items())]
            for lanes in made:
                for want in itertools.islice(self._candidates(lanes, step), _MOST_TRIES):
                    if self._makes(step, [(lanes, want)], passed):
                        return [self._step(lanes, want, step)]
            if not depth:
                for lanes in made:
                    other = self._moved_back(step, ranks, lanes) or self._solved(step, ranks, lanes)
                    if other is not None and self._makes(step, [(lanes, other)]):
                        return [self._step(lanes, other, step)]
            through = [lanes for lanes in made if any(not self._is_part(at) for at in lanes.items())]
            passed.update(at for lanes in through for at in lanes.items())
            level = [
                below
                for lanes in through
                for below in self._read({rank: self.rerun.makers[rank, value] for rank, value in lanes.items()})
                if not passed.intersection(below.items())
            ]
        return []

    def _read(self, nodes: dict[int, Node]) -> list[Lanes]:
        """What operations of several ranks read, place by place."""
        nodes = dict(nodes)
        for rank, node in list(nodes.items()):
            if node.communicates and node.op != "dist.wait":
                nodes.update(self.suspects.joint.match_of(rank, node).nodes)
        operands = {rank: list(node.operands()) for rank, node in nodes.items()}
        count = max(map(len, operands.values()), default=0)  # who receives a message may read nothing
        found = [{rank: values[place] for rank, values in operands.items() if place < len(values)} for place in range(count)]
        return [lanes for lanes in found if all(at in self.rerun.values for at in lanes.items())]

    def _step(self, lanes: Lanes, want: Want, later: Step) -> Step:
        held = self.held(lanes)
        groups = [self.grid.lanes_over(axes, min(lanes)) for axes in self.suspects.sums]
        summed = not want.groups and any(
            _sums(held, group, want.parts) for group in groups if all(rank in held for rank in group)
        )
        return Step(lanes, want, later, summed=summed)

    def _counterparts(self, step: Step, operands: list[Lanes]) -> list[Step] | None:
        """The operands of the sequential operation that makes what is wanted, if it is of the same kind."""
        maker = self.makers.get(step.want.owner) if step.want.owner is not None else None
        if maker is None or _spelling(maker) != _spelling(step.node) or len(operands) < 2:
            return None
        values = list(maker.operands())
        if len(values) != len(operands):
            return None
        tensors = self.suspects.trial.sequential.values
        choices: list[list[Want | None]] = []
        for lanes, value in zip(operands, values, strict=True):
            made = all(at in self.rerun.makers for at in lanes.items())
            if value not in tensors:
                return None
            held = self.held(lanes)
            wants = list(self._cuts(lanes, [(value, tensors[value])])) if made else []
            choices.append([None] if any(w.fits(held) for w in wants) else [*wants[:4], None])
        for chosen in itertools.islice(itertools.product(*choices), 12):
            wanted = [(lanes, want) for lanes, want in zip(operands, chosen, strict=True) if want is not None]
            if wanted and self._makes(step, wanted):
                return [self._step(lanes, want, step) for lanes, want in wanted]
        return None

    def _makes(self, step: Step, wanted: Sequence[tuple[Lanes, Want]], passed: Iterable[At] = ()) -> bool:
        """Whether a place is as wanted, if others are. passed: what lies between them."""
        self.tries += 1
        if self.suspects.stops.over("wanted_tries", self.tries):
            return False
        change: dict[At, Change] = {}
        for lanes, want in wanted:
            given = want.given(self.held(lanes))
            change.update({(rank, lanes[rank]): _is(part) for rank, part in given.items() if rank in lanes})
        changed = self.rerun.changed(change, {*change, *step.lanes.items(), *passed})
        try:
            if step.want.groups:
                return step.want.fits({at[0]: changed[at] for at in step.lanes.items()})
            return all(is_close(changed[at], step.want.parts[at[0]]) for at in step.lanes.items())
        except (ReplayError, CircleError):
            return False

    def left_out(self, step: Step) -> Node | None:
        """The ranks' operation whose gradient is missing in a sum, if the other summand is what they hold."""
        maker = self.makers.get(step.want.owner) if step.want.owner is not None else None
        if maker is None or not maker.backward or name_of(maker.op) != "add":
            return None
        held, tensors, values = self.held(step.lanes), self.suspects.trial.sequential.values, list(maker.operands())
        for value, other in zip(values, values[::-1], strict=True):
            if value in tensors and any(want.fits(held) for want in self._cuts(step.lanes, [(value, tensors[value])])):
                return self._forward(other)
        return None

    def _forward(self, gradient: Value) -> Node | None:
        """The ranks' operation that makes what the one makes in the sequential program of which a gradient comes."""
        node = self.makers.get(gradient)
        while node is not None and name_of(node.op) in MOVES | PASSED_OVER:
            node = self.makers.get(next(node.operands(), gradient))
        lines = (
            [] if node is None else [n for n in self.suspects.sequential.nodes if n.source == node.source and not n.backward]
        )
        owners = self.suspects.known.owner_of
        made = {(_spelling(n), owners[value]) for n in lines for value in n.outputs if value in owners}
        for each in self.suspects.joint.graphs[0].nodes:
            for value in each.outputs:
                origin = self.suspects.origin((0, value)) if not each.backward and self.suspects.tells((0, value)) else None
                if origin is not None and (_spelling(each), origin.owner) in made:
                    return each
        return None

    # ------------------------------------------------------------------ what may be wanted
    def _candidates(self, lanes: Lanes, step: Step) -> Iterator[Want]:
        """What a place may have to be for a later one to be as wanted; what the sequential program makes that of is first."""
        held = self.held(lanes)
        first = next(iter(held.values()))
        tensors = self.suspects.trial.sequential.values
        near = [(v, tensors[v]) for v in self._near(step.want.owner) if v in tensors]
        near = [(v, tensor) for v, tensor in near if (tensor.dim(), tensor.dtype) == (first.dim(), first.dtype)]
        others = [each for each in self.sequential.get((first.dim(), first.dtype), ()) if all(each[0] != v for v, _ in near)]
        for want in itertools.chain(self._cuts(lanes, near), self._cuts(lanes, others)):
            if not want.fits(held):
                yield want

    def _near(self, value: Value | None) -> list[Value]:
        """A sequential tensor, and what it is made of, where it is only moved also what that is made of."""
        found, pending = [], [] if value is None else [value]
        while pending:
            each = pending.pop(0)
            found.append(each)
            maker = self.makers.get(each)
            if maker is not None and (each is value or name_of(maker.op) in MOVES | PASSED_OVER):
                pending += [operand for operand in maker.operands() if operand not in found]
        return found

    def _cuts(self, lanes: Lanes, tensors: Sequence[tuple[Value | None, torch.Tensor]]) -> Iterator[Want]:
        shapes = {rank: value.shape for rank, value in lanes.items()}
        placements_of: dict[tuple[int, ...], list[Placements]] = {}
        for shape in {tuple(tensor.shape) for _, tensor in tensors}:
            if shape not in placements_of:
                every = self.grid.candidates(shape)[:_MOST_PLACEMENTS]
                placements_of[shape] = [p for p in every if self._gives(shape, p, shapes)]
        for sums in (False, True):
            for value, tensor in tensors:
                for placements in placements_of[tuple(tensor.shape)]:
                    if (SUM in placements) == sums:
                        want = self._cut(value, tensor, placements, lanes)
                        if want is not None:
                            yield want

    def _gives(self, shape: Sequence[int], placements: Placements, shapes: dict[int, tuple[int, ...]]) -> bool:
        for rank, wanted in shapes.items():
            if tuple(high - low for low, high in self.grid.spans(shape, placements, rank)) != tuple(wanted):
                return False
        return True

    def _cut(self, value: Value | None, tensor: torch.Tensor, placements: Placements, lanes: Lanes) -> Want | None:
        parts = {rank: cut(tensor, self.grid.spans(tensor.shape, placements, rank)) for rank in lanes}
        axes = partial_axes(placements)
        if not axes:
            return Want(parts, (), value)
        if not tensor.is_floating_point():
            return None
        groups = tuple(dict.fromkeys(self.grid.lanes_over(axes, rank) for rank in lanes))
        if any(rank not in lanes for group in groups for rank in group):
            return None
        return Want(parts, groups, value)

    def _moved_back(self, step: Step, ranks: Sequence[int], lanes: Lanes) -> Want | None:
        """Where a tensor is only moved: it, with the wanted numbers in their places."""
        node = step.nodes[ranks[0]]
        if (
            step.want.groups
            or (name_of(node.op) not in MOVES | PASSED_OVER and not node.communicates)
            or "reduce" in node.kwargs
        ):
            return None
        held = self.held(lanes)
        if any(tensor.dtype not in (torch.float64, torch.int64) for tensor in held.values()):
            return None
        if name_of(node.op) in CUTS and all(self.suspects.tells(at) and self._is_part(at) for at in lanes.items()):
            return None  # it may be right, and cut wrongly
        numbers, start = {}, 1
        for rank, tensor in held.items():
            numbers[rank] = torch.arange(start, start + tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)
            start += tensor.numel()
        moved = self._with(step, numbers, lanes)
        if moved is None:
            return None
        flat = torch.cat([tensor.reshape(-1) for tensor in held.values()])
        for rank in ranks:
            places = moved[rank].reshape(-1)
            whole = (places.frac() == 0 if places.is_floating_point() else places == places) & (places >= 1) & (places < start)
            flat[places[whole].long() - 1] = step.want.parts[rank].reshape(-1)[whole].to(flat.dtype)
        parts, start = {}, 0
        for rank, tensor in held.items():
            parts[rank] = flat[start : start + tensor.numel()].reshape(tensor.shape)
            start += tensor.numel()
        if all(is_close(held[rank], part) for rank, part in parts.items()):
            return None
        return Want(parts)

    def _solved(self, step: Step, ranks: Sequence[int], lanes: Lanes) -> Want | None:
        """A summand or a factor that says nothing by itself, such as a number for all elements: what would be right."""
        if (
            name_of(step.nodes[ranks[0]].op) not in _STRAIGHT
            or step.want.groups
            or any(self.suspects.tells(at) for at in lanes.items())
        ):
            return None
        held = self.held(lanes)
        if any(name_of(self.rerun.makers[at].op).startswith(_FILLS) for at in lanes.items()):
            return None
        if set(lanes) != set(ranks) or any(not tensor.is_floating_point() for tensor in held.values()):
            return None
        at_zero, at_one = (
            self._with(step, {r: torch.full_like(t, number) for r, t in held.items()}, lanes) for number in (0, 1)
        )
        if at_zero is None or at_one is None:
            return None
        parts = {}
        for rank, tensor in held.items():
            solved = (step.want.parts[rank] - at_zero[rank]) / (at_one[rank] - at_zero[rank])
            solved = torch.where(torch.isfinite(solved), solved, torch.nan)
            spread = [dim for dim in range(-solved.dim(), 0) if -dim > tensor.dim() or tensor.shape[dim] == 1]
            solved = solved.nanmean(spread, keepdim=True) if spread else solved  # it is the same for all of these
            if solved.numel() != tensor.numel():
                return None
            parts[rank] = solved.reshape(tensor.shape).nan_to_num(0.0)
        return Want(parts)

    def _with(self, step: Step, given: Tensors, lanes: Lanes) -> Tensors | None:
        """What a place becomes with other operands."""
        change = {(rank, lanes[rank]): _is(tensor) for rank, tensor in given.items()}
        changed = self.rerun.changed(change, {*change, *step.lanes.items()})
        try:
            return {rank: changed[rank, value] for rank, value in step.lanes.items()}
        except (ReplayError, CircleError):
            return None

    def _is_part(self, at: At) -> bool:
        return not self.suspects.tells(at) or self.suspects.origin(at) is not None if at in self.suspects.makers else True


def given_there(wanted: Intended, step: Step) -> Edit:
    """The change that makes a place as wanted."""
    given = step.want.given(wanted.held(step.lanes))
    return {(rank, step.lanes[rank]): _is(part) for rank, part in given.items() if rank in step.lanes}


def wants_of(wanted: Intended, right: Acceptance) -> Iterator[Want]:
    """As which an output may be wanted."""
    whole, ranks = right.trial.references[right.output.path].whole, right.output.ranks
    value = wanted.suspects.sequential.outputs[right.output.path]
    if right.local_parts is not None:
        yield Want({rank: part.whole for rank, part in zip(ranks, right.local_parts, strict=True)}, (), value)
        return
    for placements in right.placements:
        parts = {rank: cut(whole, right.grid.spans(whole.shape, placements, lane)) for lane, rank in enumerate(ranks)}
        axes = [axis for axis, placement in enumerate(placements) if placement == SUM]
        if has_partial(placements) and not axes:
            continue  # a mean, or a maximum
        groups = [tuple(ranks[each] for each in right.grid.lanes_over(axes, lane)) for lane in range(len(ranks))]
        yield Want(parts, tuple(dict.fromkeys(groups)) if axes else (), value)


def _sums(held: Tensors, group: Sequence[int], parts: Tensors) -> bool:
    tensors = [held[rank] for rank in group]
    if any(tensor.shape != tensors[0].shape or not tensor.is_floating_point() for tensor in tensors):
        return False
    return is_close(
        sum(tensors[1:], tensors[0]), parts[group[0]], max(float(t.abs().max()) if t.numel() else 0 for t in tensors)
    )


def is_close(one: torch.Tensor, other: torch.Tensor, size: float = 0.0) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype or not (one.is_floating_point() or one.is_complex()):
        return bool((one == other).all())
    if not one.numel():
        return True
    finite = torch.isfinite(other)
    largest = float(other[finite].abs().max()) if bool(finite.any()) else 0.0
    return bool(torch.allclose(one, other, rtol=_NEAR, atol=_NEAR_ZERO * max(largest, size * 1e-3), equal_nan=True))


def _is(part: torch.Tensor) -> Change:
    return Change((), lambda get: part)
