"""Other operations that were tried: one of the ranks' operations is replaced by a near one, and all of their outputs are right.

What repairs (`repair.py`) and the way back from the outputs (`way.py`) do not explain is often a slip: another operator,
operand, number or order of dims, or one rank that does not do what the others do. Each is tried where the ranks have what the
sequential program does not, and run from there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property, partial

import torch

from graphguard.errors import ReplayError
from graphguard.graph.ir import Arg, Graph, Node, Source, Value
from graphguard.graph.operators import name_of
from graphguard.locate.clue import Clue
from graphguard.locate.first_wrong import MOVES, PASSED_OVER
from graphguard.locate.repair import Repairs
from graphguard.locate.rerun import At, Change, Edit, Key, minds_shapes
from graphguard.oracle.collectives import exchange

_SHARE = 0.6  # of the operations that repairs may run
_A_TRY = 16  # part of all operations, as which a try counts by itself
_MOST_TURNS, _MOST_OPERANDS = 4, 8
_DEEPEST = 3  # operations that one rank lacks
_ARITHMETIC = ("add", "sub", "mul", "div")
_CURVES = (
    "exp", "sigmoid", "tanh", "silu", "relu", "gelu", "neg", "abs", "clone", "sqrt", "rsqrt", "reciprocal", "log", "cos", "sin",
)  # fmt: skip
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_FAMILIES = (_ARITHMETIC, _CURVES, _COMPARISONS, ("amax", "amin"), ("bitwise_and", "bitwise_or"), ("tril", "triu"))
_REDUCTIONS = ("sum", "max", "min", "avg", "product")
_OFFSETS = {"slice": (2, 3), "select": (2,), "arange": (0, 1), "tril": (1,), "triu": (1,), "sub": (1,), "add": (1,)}
_OFFSETS |= dict.fromkeys(_COMPARISONS, (1,))
Result = Callable[[Callable[[Key], torch.Tensor]], torch.Tensor]
Other = Callable[[int, Node], Node | None]  # what a rank runs in place of a node


@dataclass(frozen=True)
class Substitute:
    """A change after which all outputs are right: in words, and the line of the operation."""

    text: str
    line: Source
    backward: bool

    def clue(self, is_best: bool) -> Clue:
        lead = "another operation heals" if is_best else "another operation heals, too"
        return Clue(self.line, lead, self.text, backward=self.backward)


@dataclass
class _Site:
    """An operation, each time that it is run: by the ranks on which its result may be wrong, and by all."""

    place: int
    turns: list[dict[int, Node]] = field(default_factory=list)
    every: list[dict[int, Node]] = field(default_factory=list)

    @property
    def node(self) -> Node:
        return next(iter(self.turns[0].values()))


def mends_of(repairs: Repairs, most: int = 2) -> tuple[Substitute, ...]:
    """The first that are found, on different lines."""
    found: dict[object, Substitute] = {}
    with torch.no_grad():
        for mend in _Mending(repairs).found():
            found.setdefault(mend.line.place, mend)
            if len(found) == most:
                break
    return tuple(found.values())


class _Mending:
    def __init__(self, repairs: Repairs):
        self.repairs, self.suspects, self.rerun = repairs, repairs.suspects, repairs.rerun
        self.graphs = repairs.joint.graphs
        self.rerun.steps = 0
        self.a_try = 4 + len(self.rerun.makers) // _A_TRY
        self.places = _aligned(self.graphs)
        self.values = [
            {**{(at, number): v for n, at in places.items() for number, v in enumerate(n.outputs)}, **graph.inputs}
            for graph, places in zip(self.graphs, self.places, strict=True)
        ]
        self.names = [{value: name for name, value in values.items()} for values in self.values]

    def found(self) -> Iterator[Substitute]:
        sites = self._sites()
        for site in sites:
            yield from self._as_others_do(site)
        for site in sites:
            yield from self._tried(site, site.turns)
        for site in sites:
            if 1 < len(site.turns) <= _MOST_TURNS:
                for turn in site.turns:
                    yield from self._tried(site, [turn])

    def _sites(self) -> list[_Site]:
        """Where the ranks have what the sequential program does not, on the way to wrong outputs, and what is only moved, or
        made without saying anything, on the way to there."""
        reached = self._region()
        turns: dict[object, dict[int, Node]] = {}
        for rank, graph in enumerate(self.graphs):
            for node in graph.nodes:
                if len(node.outputs) == 1:
                    turns.setdefault(self.places[rank][node], {})[rank] = node
        sites: dict[object, _Site] = {}
        for every in turns.values():
            turn = {rank: node for rank, node in every.items() if (rank, node.outputs[0]) in reached}
            if turn:
                node = next(iter(turn.values()))
                site = sites.setdefault((node.op, node.source, node.backward), _Site(self.suspects.order[node]))
                site.turns.append(turn)
                site.every.append(every)
        self.suspects.stops.over("sites", len(sites))
        return sorted(sites.values(), key=lambda site: site.place)[: self.suspects.stops.limits.sites]

    def _region(self) -> set[At]:
        ends = {at for path in self.repairs.wrong if path in self.repairs.ends for at in self.repairs.ends[path]}
        pending = list(ends)
        found: set[At] = set()
        while pending:
            at = pending.pop()
            node = self.rerun.makers.get(at)
            if at in found or node is None:
                continue
            lost = self.suspects.tells(at) and self.suspects.origin(at) is None
            if (
                at in ends
                or lost
                or not self.suspects.tells(at)
                or name_of(node.op) in MOVES | PASSED_OVER
                or node.communicates
            ):
                found.add(at)
                pending += self.suspects.operands(at[0], node)
        return found

    # ------------------------------------------------------------------ what is tried
    def _tried(self, site: _Site, turns: list[dict[int, Node]]) -> Iterator[Substitute]:
        for text, other in self._others(site.node, next(iter(turns[0]))):
            if self.repairs.late(_SHARE):
                return
            edit: dict[At, Change] = {}
            for turn in turns:
                for rank, node in turn.items():
                    made = other(rank, node) if node.op == site.node.op else None  # a line may do other things elsewhere
                    if made is not None:
                        edit.update(self._edit(rank, node, made))
            yield from self._healed(site, edit, text)

    def _healed(self, site: _Site, edit: Edit, text: str) -> Iterator[Substitute]:
        self.rerun.steps += self.a_try
        line = self.suspects.own_lines.of(site.node.source)
        if line is not None and edit and self.repairs.heals(edit) is False:
            yield Substitute(f"it would be right with {text}", line, site.node.backward)

    def _edit(self, rank: int, node: Node, made: Node) -> Edit:
        at = rank, node.outputs[0]
        if not node.communicates:
            return {at: Change([(rank, value) for value in made.operands()], self._run(made, lambda value: (rank, value)))}
        match = self.repairs.joint.match_of(rank, node)
        every = {r: _as(n, kwargs={**n.kwargs, "reduce": made.kwargs["reduce"]}) for r, n in match.nodes.items()}
        needs = [(r, value) for r, n in every.items() for value in n.operands()]

        def result(get):  # type: ignore[no-untyped-def]
            given = {r: [get((r, value)) for value in n.operands()] for r, n in every.items()}
            return exchange(replace(match, nodes=every), given)[rank][0].reshape(at[1].shape)

        return {at: Change(needs, result)}

    def _run(self, node: Node, at: Callable[[Value], At], made: Mapping[Value, Change] | None = None) -> Result:
        """What an operation gives. at: where its operands are found, but for those that are made for it."""

        def result(get: Callable[[Key], torch.Tensor]) -> torch.Tensor:
            def lookup(value: Value) -> torch.Tensor:
                found = made[value].result(get) if made and value in made else get(at(value))
                if tuple(found.shape) != value.shape and minds_shapes(node):
                    raise ReplayError(f"{node} would be given a tensor of another shape")
                return found

            try:
                (found,) = self.rerun.kernels.run(node, lookup)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise ReplayError(f"{node} failed: {error}") from error
            if tuple(found.shape) != node.outputs[0].shape:
                raise ReplayError(f"{node} gave the shape {tuple(found.shape)}")
            return found

        return result

    def _others(self, node: Node, rank: int) -> Iterator[tuple[str, Other]]:
        """Operations that are near to one, in words."""
        if node.communicates:
            for reduce in _REDUCTIONS if "reduce" in node.kwargs else ():
                if reduce != node.kwargs["reduce"]:
                    yield f"{reduce} as the reduce operation", _instead(kwargs={**node.kwargs, "reduce": reduce})
            return
        yield from self._operators(node)
        yield from self._offsets(node)
        yield from self._layouts(node)
        yield from self._operands(node, rank)

    def _operators(self, node: Node) -> Iterator[tuple[str, Other]]:
        name = name_of(node.op)
        others = [(other, _overload(node)) for family in _FAMILIES if name in family for other in family if other != name]
        if name in ("sum", "mean"):
            overload = {"dim_IntList": "dim", "dim": "dim_IntList"}.get(_overload(node), "default")
            others.append(("mean" if name == "sum" else "sum", overload))
        for other, overload in others:
            yield f"{other} in place of {name}", _instead(op=f"aten.{other}.{overload}")

    def _offsets(self, node: Node) -> Iterator[tuple[str, Other]]:
        """Larger or smaller by one, or by what lies between ranks, on all of them or on one."""
        places = [i for i in _OFFSETS.get(name_of(node.op), ()) if i < len(node.args) and type(node.args[i]) is int]
        for step in (1, -1, self.gap, -self.gap) if places else ():
            for only in (None, *range(len(self.graphs))):
                who = "" if only is None else f" on rank {only}"
                text = f"offsets that are {'larger' if step > 0 else 'smaller'} by {abs(step)}{who}"
                yield text, partial(_moved, places=places, step=step, only=only)

    @cached_property
    def gap(self) -> int:
        """How far the offsets of neighbours lie from each other."""
        found = Counter[int]()
        for mine, its in zip(self.places[0], self.places[-1], strict=False):
            if mine.op == its.op and not mine.communicates:
                found.update(b - a for a, b in zip(mine.args, its.args, strict=False) if type(a) is int and type(b) is int)
        found.pop(0, None)
        most = found.most_common(1)
        return max(1, abs(most[0][0]) // max(1, len(self.graphs) - 1)) if most else 1

    def _layouts(self, node: Node) -> Iterator[tuple[str, Other]]:
        """A tensor with two dims exchanged, where that gives the same shape."""
        if name_of(node.op) not in MOVES | PASSED_OVER or not node.args or type(node.args[0]) is not Value:
            return
        value, shape = node.args[0], node.outputs[0].shape
        dims = range(len(value.shape))
        if value.numel != node.outputs[0].numel:
            return
        if name_of(node.op) not in ("view", "_unsafe_view", "reshape") and len(dims) > 1:
            yield "the order of its elements kept", _instead(op="aten.reshape.default", after=(shape,))
        for one, two in itertools.combinations(dims, 2):
            order = tuple({one: two, two: one}.get(dim, dim) for dim in dims)
            yield f"the dims {one} and {two} exchanged", _instead(op="aten.permute.default", after=(order,))

    def _operands(self, node: Node, rank: int) -> Iterator[tuple[str, Other]]:
        """Another tensor of the same kind that is there, in place of one; or two that change places."""
        for number, operand in enumerate(node.operands()):
            held = self.rerun.values.get((rank, operand))
            for value in self._alike(node, rank, operand) if held is not None else ():
                if not torch.equal(self.rerun.values[rank, value], held):
                    maker, name = self.rerun.makers.get((rank, value)), self.names[rank][value]
                    what = f"the result of {maker.source}" if maker is not None else f"the input {name}"
                    yield f"{what} as operand {number}", partial(self._with, number=number, name=name)
        if len(node.args) > 1 and all(type(a) is Value and a.shape == node.outputs[0].shape for a in node.args[:2]):
            yield "its operands exchanged", lambda r, n: _as(n, args=(n.args[1], n.args[0], *n.args[2:]))

    def _alike(self, node: Node, rank: int, operand: Value) -> list[Value]:
        graph, order = self.graphs[rank], self.suspects.order
        here = order[node]
        earlier = [(here - order[n], n.outputs[0], n) for n in graph.nodes[:here] if len(n.outputs) == 1]
        near = [
            (n.source is None or node.source is None or n.source.function != node.source.function, d, v) for d, v, n in earlier
        ]
        found = [v for *_, v in sorted(near, key=lambda each: each[:2])] + list(graph.inputs.values())
        alike = [v for v in found if (v.shape, v.dtype) == (operand.shape, operand.dtype) and v is not operand]
        return [v for v in alike if (rank, v) in self.rerun.values][:_MOST_OPERANDS]

    def _with(self, rank: int, node: Node, *, number: int, name: object) -> Node | None:
        value, operands = self.values[rank].get(name), list(node.operands())
        if value is None or number >= len(operands) or value.shape != operands[number].shape:
            return None
        return _as(node, args=[_put(arg, operands[number], value) for arg in node.args])

    # ------------------------------------------------------------------ one rank that is unlike the others
    def _as_others_do(self, site: _Site) -> Iterator[Substitute]:
        """One rank does something else than all others: as they do."""
        for turn in site.every:
            made = {rank: self._signature(rank, node) for rank, node in turn.items() if not node.communicates}
            for rank, mine in made.items():
                others = {made[other] for other in made if other != rank}
                if len(others) != 1 or mine in others or self.repairs.late(_SHARE):
                    continue
                model = next(other for other in made if other != rank)
                try:
                    change = self._like(rank, model, turn[model], _DEEPEST)
                except KeyError:
                    continue
                yield from self._healed(site, {(rank, turn[rank].outputs[0]): change}, "what the other ranks do here")

    def _signature(self, rank: int, node: Node) -> object:
        names = self.names[rank]

        def told(arg: Arg) -> object:
            if type(arg) is Value:
                return names.get(arg)
            return tuple(map(told, arg)) if type(arg) is tuple else (type(arg), arg)

        return node.op, tuple(map(told, node.args)), node.outputs[0].shape

    def _like(self, rank: int, model: int, node: Node, deep: int) -> Change:
        """What a rank would have if it did what another does; KeyError where it has not what that takes."""
        needs: list[At] = []
        made: dict[Value, Change] = {}
        for value in node.operands():
            name = self.names[model][value]
            if name in self.values[rank]:
                needs.append((rank, self.values[rank][name]))
            else:
                maker = self.rerun.makers[model, value]
                if maker.communicates or not deep or len(maker.outputs) != 1:
                    raise KeyError(name)
                made[value] = self._like(rank, model, maker, deep - 1)
                needs += made[value].needs  # type: ignore[arg-type]

        return Change(needs, self._run(node, lambda value: (rank, self.values[rank][self.names[model][value]]), made))


def _aligned(graphs: Sequence[Graph]) -> list[dict[Node, object]]:
    """By rank, what names an operation on all of them: its line, and which one it is there, as far as the operations of the
    ranks on that line can be laid side by side."""
    lines: dict[object, list[list[Node]]] = {}
    for rank, graph in enumerate(graphs):
        for node in graph.nodes:
            lines.setdefault((node.source, node.backward), [[] for _ in graphs])[rank].append(node)
    found: list[dict[Node, object]] = [{} for _ in graphs]
    for line, nodes in lines.items():
        model = max(nodes, key=len)
        for rank, mine in enumerate(nodes):
            found[rank].update((node, (line, rank, place)) for place, node in enumerate(mine))
            for place, number in _side_by_side([node.op for node in model], [node.op for node in mine]):
                found[rank][mine[number]] = (line, place)
    return found


def _side_by_side(model: list[str], mine: list[str]) -> Iterator[tuple[int, int]]:
    if len(model) == len(mine):
        yield from ((place, place) for place in range(len(model)))
        return
    for tag, start, end, low, high in SequenceMatcher(None, model, mine, autojunk=False).get_opcodes():
        if tag == "equal" or (tag == "replace" and end - start == high - low):
            yield from zip(range(start, end), range(low, high), strict=True)


def _instead(op: str | None = None, after: Sequence[Arg] | None = None, kwargs: dict[str, Arg] | None = None) -> Other:
    """Another operation. after: what it is given after its first operand."""
    return lambda rank, node: _as(node, op=op, args=None if after is None else (node.args[0], *after), kwargs=kwargs)


def _moved(rank: int, node: Node, places: Sequence[int], step: int, only: int | None) -> Node | None:
    if only not in (None, rank):
        return None
    return _as(node, args=[arg + step if i in places and isinstance(arg, int) else arg for i, arg in enumerate(node.args)])


def _as(node: Node, *, op: str | None = None, args: Sequence[Arg] | None = None, kwargs: dict[str, Arg] | None = None) -> Node:
    """The same operation but for what is given, as one that writes nothing in place."""
    given = node.args if args is None else tuple(args)
    return Node(op or node.op, given, node.kwargs if kwargs is None else kwargs, node.outputs, node.source, node.backward)


def _put(arg: Arg, old: Value, new: Value) -> Arg:
    if type(arg) is Value:
        return new if arg is old or arg == old else arg
    return tuple(_put(each, old, new) for each in arg) if type(arg) is tuple else arg


def _overload(node: Node) -> str:
    return node.op.split(".")[2] if node.op.count(".") > 1 else "default"
