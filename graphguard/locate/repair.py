"""Repairs that were tried: small changes of the ranks' programs after which all of their outputs are right.

A change is made at one operation on all ranks at once: its result is multiplied by a number, summed or averaged over axes of
the mesh, or replaced by a tile of a sequential tensor; or a reduction is left out. The programs are run again from there, on
the inputs of a trial. What heals all outputs says what is wrong, and near which line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import torch

from graphguard.errors import ReplayError
from graphguard.graph.ir import Node, Source, Value
from graphguard.graph.lines import OwnLines
from graphguard.graph.matching import Joint
from graphguard.graph.operators import RESHAPES, name_of
from graphguard.graph.paths import in_one
from graphguard.locate.acceptance import Acceptance
from graphguard.locate.amend import AVERAGED, LEFT_OUT, REGROUPED, SUMMED, TIMES, Amend
from graphguard.locate.clue import Clue, clues_at
from graphguard.locate.first_wrong import MOVES, PASSED_OVER, Suspects
from graphguard.locate.rerun import At, Change, CircleError, Edit, Made, Rerun
from graphguard.locate.tiles import Retile
from graphguard.oracle.budget import cost
from graphguard.oracle.grid import REDUCTIONS, Grid
from graphguard.oracle.trial import Forgiving
from graphguard.relation.expectation import Expectation

_MOST_OCCURRENCES = 3  # of one operation, that are tried one by one
_VIEWS = PASSED_OVER | RESHAPES | {
    "slice", "select", "split", "split_with_sizes", "unbind", "empty", "empty_like", "new_empty", "empty_strided", "copy",
    "zeros", "zeros_like", "new_zeros",
}  # fmt: skip
_EXCHANGES = {"dist.send", "dist.recv", "dist.all_gather", "dist.all_gather_into_tensor", "dist.broadcast", "dist.wait"}
_DECISIVE = ("undone", "regrouped")
_NEVER_MOVED = {"detach", "alias", "empty", "empty_like", "new_empty", "empty_strided"}


@dataclass(frozen=True)
class Repair:
    """A change that makes all outputs right.

    text: what is wrong, as the change shows it.
    kind: "undone" if the change is to leave out what an operation does; "regrouped" if it reduces over other ranks; "scaled",
        "reduced", "retiled" if its result is multiplied, summed or averaged over ranks, or replaced by a tile of a sequential
        tensor.
    weak: an output is then right only as a sum over ranks that nothing asks for.
    place: of the operation, in its program.
    """

    node: Node
    kind: str
    text: str
    weak: bool
    place: int
    scales: bool = False  # the operation multiplies or divides, as the program says
    written: bool = True  # the program has it; autograd has others
    shared: bool = False  # the sequential program runs its line, too
    once: bool = False  # the change is made one of several times that the operation is run
    amend: Amend | None = None  # the change, as it is made in graphs
    module: str = ""  # in which it is made, or in which ones

    @property
    def source(self) -> Source | None:
        """The line of the operation, in all modules in which it is changed."""
        return None if self.node.source is None else self.node.source.inside(self.module)

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The most telling first: what undoes something, then what multiplies, or is in a backward that was written, then what
        is exchanged."""
        own_backward = self.node.backward and self.written
        if self.kind == "scaled":
            own_scale = self.scales and not (self.shared or self.once)
            order = [own_scale, own_backward, self.scales, self.node.communicates, True]
        else:
            order = [self.kind in _DECISIVE, own_backward, False, False, True]
        return self.weak, order.index(True) + (self.kind not in _DECISIVE), self.place


@dataclass
class Spot:
    """The tensors that one operation makes, by rank, each time that it is run."""

    node: Node
    place: int
    turns: list[dict[int, Value]] = field(default_factory=list)

    @property
    def ats(self) -> list[At]:
        return [(rank, value) for turn in self.turns for rank, value in turn.items()]

    def alone(self) -> Iterator[Spot]:
        """Each time by itself, where there are a few."""
        if 1 < len(self.turns) <= _MOST_OCCURRENCES:
            yield from (Spot(self.node, self.place, [turn]) for turn in self.turns)


class Repairs:
    """Tries repairs of outputs that are wrong in a trial."""

    def __init__(self, suspects: Suspects, expected: Mapping[str, Expectation], wrong: Sequence[str]):
        sequential, joint, trial, mesh = suspects.sequential, suspects.joint, suspects.trial, suspects.mesh
        self.suspects, self.joint, self.mesh, self.wrong = suspects, joint, mesh, wrong
        self.rerun = Rerun(joint, trial.ranks, Forgiving())
        self.rights = {
            path: Acceptance(path, value, mesh, trial, expected.get(path))
            for path, value in sequential.outputs.items()
            if value is not None and path in trial.references and any(g.outputs.get(path) is not None for g in joint.graphs)
        }
        self.rights = {path: right for path, right in self.rights.items() if right.claimed}
        self.ends = {
            path: [(rank, v) for rank, g in enumerate(joint.graphs) if (v := g.outputs.get(path))] for path in self.rights
        }
        self.useful = self.rerun.before(at for ends in self.ends.values() for at in ends)
        outputs = [(rank, value) for rank, graph in enumerate(joint.graphs) for value in graph.outputs.values()]
        self.needed = self.rerun.before((rank, value) for rank, value in outputs if value is not None)
        self.written = _written(joint)
        self.scaling = _scaling(joint, self.written)
        axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
        self.sums = [chosen for count in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, count)]
        seconds = cost(joint.graphs).seconds / max(1, sum(len(g.nodes) for g in joint.graphs))
        self.most_steps = int(suspects.stops.limits.repair_ms / 1000 / max(seconds, 60e-6))

    def late(self, share: float = 1) -> bool:
        """Whether more operations were run than a share of all tries allows."""
        late = self.rerun.steps > int(share * self.most_steps)
        if late:
            self.suspects.stops.note("repair_ms")
        return late

    # ------------------------------------------------------------------ the search
    def found(self) -> list[Repair]:
        """The repairs that work, the most telling first."""
        self.rerun.steps = 0
        found: list[Repair] = []
        sites = list(self._sites())
        with torch.no_grad():
            for site in sites:
                found += self._of(site)
            found += self._retiled()
            for site in [single for each in sites for single in each.alone()]:
                found += [replace(each, once=True) for each in self._of(site)]
        return sorted(found, key=lambda each: each.rank)

    def _retiled(self) -> Iterator[Repair]:
        """Tensors that were moved wrongly."""
        retile = Retile(self.suspects)
        for site in self._sites(moved=True):
            for edit in retile.edits(site.turns):
                if self.late():
                    return
                healed = self.heals(edit)
                if healed is not None:
                    repair = Repair(site.node, "retiled", "another part of it is meant on each rank", healed, site.place)
                    yield self._in_modules(repair, site)
                    break

    def _sites(self, moved: bool = False) -> Iterator[Spot]:
        """The operations on the way to all wrong outputs whose results leave their line."""
        sites: dict[object, Spot] = {}
        for rank, graph in enumerate(self.joint.graphs):
            counts: dict[object, int] = {}
            for place, node in enumerate(graph.nodes):
                kind = (node.op, node.source, node.backward)
                turn = counts[kind] = counts.get(kind, -1) + 1
                if (
                    not moved
                    and (name_of(node.op) in _VIEWS or node.op in _EXCHANGES)
                    and not (node.backward and node in self.written)
                ):
                    continue
                if moved and not self._moves(rank, node):
                    continue
                for number, value in enumerate(node.outputs):
                    if (rank, value) in self.useful and (node in self.scaling or self._leaves(rank, node, value)):
                        site = sites.setdefault((*kind, number, moved and turn), Spot(node, place))
                        while len(site.turns) <= turn:
                            site.turns.append({})
                        site.turns[turn][rank] = value
        for site in sites.values():
            site.turns = [turn for turn in site.turns if turn]
            led = 0
            for at in site.ats:
                led |= self._leads_to.get(at, 0)
            if led == (1 << len(self.wrong)) - 1:
                yield site

    @cached_property
    def _leads_to(self) -> dict[At, int]:
        """Of each tensor, to which of the wrong outputs it leads."""
        return self.rerun.leading_to([self.ends[path] for path in self.wrong])

    def _moves(self, rank: int, node: Node) -> bool:
        """Whether an operation only moves numbers, or makes such as say nothing."""
        if name_of(node.op) in _NEVER_MOVED or "reduce" in node.kwargs:
            return False
        return (
            name_of(node.op) in MOVES
            or node.communicates
            or any(not self.suspects.tells((rank, value)) for value in node.outputs)
        )

    def _leaves(self, rank: int, node: Node, value: Value) -> bool:
        """Whether a result is used on another line, or is an output."""
        here = (node.source, node.backward)
        pending = [value]
        seen: set[Value] = set()
        while pending:
            each = pending.pop()
            users = self.rerun.users.get((rank, each), ())
            if each in self.joint.graphs[rank].outputs.values():
                return True
            for _, user in users:
                if (user.source, user.backward) != here:
                    return True
                if name_of(user.op) in _VIEWS:
                    pending += [result for result in user.outputs if result not in seen]
                    seen.update(user.outputs)
        return False

    def unused(self, repair: Repair) -> Source | None:
        """Of a reduction that is missing: a later line that reduces such a tensor for nobody, as no output comes of it."""
        if repair.kind != "reduced":
            return None
        sizes = {value.numel for value in repair.node.outputs}
        used: dict[Source, bool] = {}
        for rank, graph in enumerate(self.joint.graphs):
            for node in graph.nodes[repair.place + 1 :]:
                if "reduce" in node.kwargs and node.source is not None and any(v.numel in sizes for v in node.operands()):
                    used[node.source] = used.get(node.source, False) or any((rank, v) in self.needed for v in node.outputs)
        return next((self.suspects.own_lines.of(line) for line, is_used in used.items() if not is_used), None)

    def instead(self, repair: Repair) -> Source | None:
        """Of a reduction or a number that is missing: a collective that reads the tensor, and does something else."""
        if repair.kind not in ("reduced", "scaled") or repair.node.communicates:
            return None
        rank = next(rank for rank, graph in enumerate(self.joint.graphs) if any(each is repair.node for each in graph.nodes))
        users = [user for value in repair.node.outputs for _, user in self.rerun.users.get((rank, value), ())]
        return next((user.source for user in users if user.communicates and user.source is not None), None)

    # ------------------------------------------------------------------ the changes
    def _of(self, site: Spot) -> Iterator[Repair]:
        if self.late():
            return
        try:
            found = list(self._tried(site))
        except (ReplayError, CircleError):
            return
        yield from (self._in_modules(each, site) for each in found)

    def _in_modules(self, repair: Repair, site: Spot) -> Repair:
        """A repair, with the modules in which it is made."""
        return replace(repair, module=in_one(self.rerun.makers[at].module for at in site.ats))

    def _tried(self, site: Spot) -> Iterator[Repair]:
        value = next(iter(site.turns[0].values()))
        if value.dtype == "bool":
            return
        for factor in self._factors(site):
            healed = self.heals({at: _times(at, float(factor)) for at in site.ats})
            if healed is not None:
                scales = site.node in self.scaling
                undoes = scales and self._is_undone(site, factor)
                text = self._scale_text(factor, undoes, site.node)
                kind, written = "undone" if undoes else "scaled", site.node in self.written
                amend = Amend(site.node, LEFT_OUT if undoes else TIMES, written, factor, turns=self._turns(site))
                shared = self._is_shared(site.node)
                yield Repair(site.node, kind, text, healed, site.place, scales, written, shared, amend=amend)
                break
        if site.node.op == "dist.all_reduce":
            healed = self.heals({at: _kept(at, self.rerun.makers[at]) for at in site.ats})
            if healed is not None:
                count = len(self.joint.match_of(*self._ran(site)).group)
                text = f"it is reduced once too often here, over {count} ranks"
                amend = Amend(site.node, LEFT_OUT, site.node in self.written, turns=self._turns(site))
                yield Repair(site.node, "undone", text, healed, site.place, amend=amend)
            else:
                yield from self._regrouped(site)
        if value.dtype.startswith(("float", "bfloat", "complex")):
            yield from self._reduced(site)

    def _turns(self, site: Spot) -> frozenset[tuple[int, int]]:
        """By rank, the how manyeth of the operations of its kind each one is."""
        meant = {self.rerun.makers[at] for at in site.ats}
        kind = (site.node.op, site.node.source, site.node.backward)
        found: set[tuple[int, int]] = set()
        for rank in {rank for rank, _ in site.ats}:
            alike = (node for node in self.joint.graphs[rank].nodes if (node.op, node.source, node.backward) == kind)
            found.update((rank, turn) for turn, node in enumerate(alike) if node in meant)
        return frozenset(found)

    @staticmethod
    def _ran(site: Spot) -> tuple[int, Node]:
        return next(iter(site.turns[0])), site.node

    def _is_shared(self, node: Node) -> bool:
        own = self.suspects.own_lines.of(node.source)
        return node.source is not None and own is not None and own.place != node.source.place

    def _scale_text(self, factor: Fraction, undoes: bool, node: Node) -> str:
        gradient = "" if node in self.written else "its gradient"
        if undoes:
            return f"{gradient or 'it'} is {'divided' if name_of(node.op) == 'div' else 'multiplied'} once too often here"
        axes = [name for name, size in self.mesh.axes if size > 1 and size in (factor, 1 / factor)]
        size = f", the size of axis {axes[0]}" if len(axes) == 1 else ""
        return f"{gradient or 'it'} is {1 / factor} times what it should be{size}"

    def _reduced(self, site: Spot) -> Iterator[Repair]:
        scales = site.node in self.scaling
        for axes in self.sums:
            edit = self._sum(site, axes)
            if edit is None:
                continue
            names = " and ".join(self.mesh.names[axis] for axis in axes)
            for word, mean in (("summed", False), ("averaged", True)):
                healed = self.heals(self._sum(site, axes, mean) or {})
                if healed is not None:
                    written = site.node in self.written
                    text = f"{'it' if written else 'the gradient that comes of this line'} is never {word} over {names}"
                    what = AVERAGED if mean else SUMMED
                    amend = Amend(site.node, what, written, axes=tuple(axes), turns=self._turns(site))
                    yield Repair(site.node, "reduced", text, healed, site.place, scales, written, amend=amend)

    def _regrouped(self, site: Spot) -> Iterator[Repair]:
        """Reduced over other axes of the mesh than the program says."""
        rank, node = self._ran(site)
        group, reduce = self.joint.match_of(rank, node).group, node.kwargs.get("reduce")
        grid = Grid(self.mesh, tuple(range(self.mesh.size)))
        now = next((axes for axes in self.sums if set(grid.lanes_over(axes, rank)) == set(group)), None)
        if now is None or reduce not in REDUCTIONS:
            return
        for axes in (axes for axes in self.sums if axes != now):
            edit = self._over(site, grid, axes, str(reduce))
            healed = None if edit is None or self.late() else self.heals(edit)
            if healed is not None:
                here, meant = (" and ".join(self.mesh.names[axis] for axis in each) for each in (now, axes))
                text = f"it is reduced over {here} here, where {meant} is meant"
                amend = Amend(site.node, REGROUPED, site.node in self.written, axes=axes, turns=self._turns(site))
                kind = "regrouped, wider" if set(axes) > set(now) else "regrouped"
                yield Repair(site.node, kind, text, healed, site.place, amend=amend)

    def _over(self, site: Spot, grid: Grid, axes: Sequence[int], reduce: str) -> Edit | None:
        """The reduction over some axes; None where ranks that it needs have nothing for it."""
        edit = {}
        for turn in site.turns:
            for rank, value in turn.items():
                lanes = grid.lanes_over(axes, rank)
                if any(lane not in turn or turn[lane].shape != value.shape for lane in lanes):
                    return None
                given = [(lane, next(self.rerun.makers[lane, turn[lane]].operands())) for lane in lanes]
                edit[rank, value] = _reduction(given, reduce)
        return edit

    def _sum(self, site: Spot, axes: Sequence[int], mean: bool = False) -> Edit | None:
        """None where all ranks have the same, or some of them nothing."""
        grid, edit, alike = Grid(self.mesh, tuple(range(self.mesh.size))), {}, True
        for turn in site.turns:
            for rank, value in turn.items():
                lanes = grid.lanes_over(axes, rank)
                if any(lane not in turn or turn[lane].shape != value.shape for lane in lanes):
                    return None
                ats = [(lane, turn[lane]) for lane in lanes]
                held = [self.rerun.values[at] for at in ats]
                alike = alike and all(torch.equal(each, held[0]) for each in held[1:])
                edit[rank, value] = _summed(ats, len(ats) if mean else 1)
        return None if alike else edit

    def _factors(self, site: Spot) -> list[Fraction]:
        """The numbers that the site may have to be multiplied by, as the first wrong output says."""
        path = self.wrong[0]
        ends = self.ends[path]
        edit = {at: _times(at, 2.0) for at in site.ats}
        twice = self.rerun.changed(edit, self.rerun.after(edit) & self.useful)
        return self.rights[path].factors([self.rerun.values[at] for at in ends], [twice[at] for at in ends])

    def _is_undone(self, site: Spot, factor: Fraction) -> bool:
        """Whether a factor takes back what an operation multiplies or divides by."""
        node, rank = site.node, next(iter(site.turns[0]))
        name = name_of(node.op)
        if name not in ("div", "mul") or len(node.args) < 2:
            return False
        for arg in node.args[:2] if name == "mul" else node.args[1:2]:
            number = arg
            if isinstance(arg, Value):
                tensor = self.rerun.values.get((rank, arg))
                number = float(tensor) if tensor is not None and tensor.numel() == 1 and not tensor.is_complex() else None
            if isinstance(number, (int, float)) and abs(float(factor) * number ** (1 if name == "mul" else -1) - 1) < 1e-9:
                return True
        return False

    def heals(self, edit: Edit) -> bool | None:
        """None if some output is wrong; else whether one is right in a weak sense only."""
        if not edit:
            return None
        dirty = self.rerun.after(edit) & self.useful
        weak, changed = False, self.rerun.changed(edit, dirty)
        for path in (*self.wrong, *(path for path in self.rights if path not in self.wrong)):
            ends = self.ends[path]
            if not any(at in dirty for at in ends):
                if path in self.wrong:
                    return None
                continue
            try:
                verdict = self.rights[path].judge([changed[at] for at in ends])
            except (ReplayError, CircleError):
                return None
            if verdict is None:
                return None
            weak = weak or verdict
        return weak


def _written(joint: Joint) -> set[Node]:
    """Operations that the program has, in the forward direction, in a backward or in a hook. What autograd runs for the
    gradient of a line has the line of an operation of the forward direction."""
    nodes = [node for graph in joint.graphs for node in graph.nodes]
    forward = {node.source for node in nodes if not node.backward}
    return {node for node in nodes if not node.backward or node.source not in forward}


def _scaling(joint: Joint, written: set[Node]) -> set[Node]:
    """Operations that multiply or divide because the program says so, and those of their gradients. Autograd does both for
    reasons of its own, too."""
    nodes = [node for graph in joint.graphs for node in graph.nodes if name_of(node.op) in ("div", "mul")]
    lines = {node.source for node in nodes if node in written}
    return {node for node in nodes if node.source in lines}


def _times(at: At, factor: float) -> Change:
    def result(get):  # type: ignore[no-untyped-def]
        tensor = get(Made(at))
        grown = tensor * factor
        return grown if grown.dtype == tensor.dtype else grown.round().to(tensor.dtype)

    return Change((Made(at),), result)


def _summed(ats: Sequence[At], count: int) -> Change:
    keys = [Made(at) for at in ats]
    return Change(keys, lambda get: sum((get(key) for key in keys[1:]), get(keys[0])) / count)


def _reduction(given: Sequence[At], reduce: str) -> Change:
    return Change(given, lambda get: REDUCTIONS[reduce]([get(at) for at in given]))


def _kept(at: At, reduction: Node) -> Change:
    """What is reduced, in place of what comes of it."""
    before = at[0], next(reduction.operands())
    return Change((before,), lambda get: get(before))


@dataclass(frozen=True)
class Tried:
    """A repair that works, as reports tell it; `kind`, `text`, `weak` and `amend` as of the repair.

    line: of the operation. own: that line, or the one that called for it, which the sequential program does not run.
    used: the line that first uses the result, or the result of the forward operation whose gradient it is.
    scales: the operation multiplies or divides. unused: the line that does what is missing, to something else.
    instead: the line that does something else in its place.
    """

    kind: str
    text: str
    weak: bool
    line: Source
    own: Source
    used: Source | None
    backward: bool
    scales: bool
    unused: Source | None = None
    instead: Source | None = None
    amend: Amend | None = None

    def clues(self, is_best: bool) -> Iterator[Clue]:
        """Where to look. What is missing is told where it would be used, too. is_best: no other kind of repair says more."""
        lead = "weak repair" if self.weak else "repair" if is_best else "another repair"
        what = "scaled where it scales" if self.kind == "scaled" and self.scales else self.kind
        if self.kind == "reduced" and self.backward:
            what = "reduced gradient"
        yield Clue(self.own, f"{lead}: {what}", self.text, backward=self.backward)
        if self.line.place != self.own.place:
            yield Clue(self.line, f"{lead}: inside", self.text, backward=self.backward)
        if self.used is not None and self.used.place != self.own.place:
            yield Clue(self.used, f"{lead}: {what}, used here", backward=self.backward)
        yield from clues_at("reduces for nobody", [self.unused], self.backward, "nothing uses what this line reduces")
        yield from clues_at(f"{lead}: something else is done here", [self.instead], self.backward)


def tried(repairs: Repairs) -> tuple[Tried, ...]:
    """The repairs that work, one for each line, the most telling first."""
    suspects, own_lines = repairs.suspects, repairs.suspects.own_lines
    found: dict[object, Tried] = {}
    for each in repairs.found():
        line, own = each.source, own_lines.of(each.source)
        if line is not None and own is not None and (line.place, own.place) not in found:
            used = None if each.node.communicates else first_use(suspects.joint, each.node, own_lines)
            backward = each.node.backward
            told = each.kind, each.text, each.weak, line, own, used, backward, each.scales
            amend = None if each.once else each.amend
            found[line.place, own.place] = Tried(*told, repairs.unused(each), repairs.instead(each), amend)
    return tuple(found.values())


def first_use(joint: Joint, node: Node, own_lines: OwnLines, until: Node | None = None) -> Source | None:
    """The line that first uses what is made on the line of an operation, in the forward direction; before another one runs."""
    graph = next(graph for graph in joint.graphs if any(each is node for each in graph.nodes))
    here = own_lines.of(node.source)
    reached = set(node.outputs) if not node.backward else set()
    for each in graph.nodes:
        if each is until:
            return None
        line = own_lines.of(each.source)
        if each.backward or line is None or here is None:
            continue
        if line.place == here.place:
            reached.update(each.outputs)
        elif any(value in reached for value in each.operands()):
            beside = (s for s in line.outwards() if (s.file, s.function) == (here.file, here.function))
            return next(beside, line)
    return None
