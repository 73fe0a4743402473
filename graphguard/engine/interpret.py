"""Describes every tensor of the sequential program, then every tensor of the ranks, over one table.

Ranks of one class are described at once. Communication is dataflow: a node posts what it sends and goes on; what it receives is
there once all members have posted. What cannot be described is Unknown, with a reason and the node where it began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from graphguard.engine import exchange
from graphguard.engine.classes import Stream
from graphguard.engine.collective import Groups, groups_of
from graphguard.engine.lane import Lanes, collapse
from graphguard.engine.memo import Memo, word
from graphguard.engine.ops import Ops
from graphguard.engine.sums import folded, named
from graphguard.engine.table import Table
from graphguard.engine.term import ONE, Factor, Index, Term, Undescribed, Value
from graphguard.engine.value import add, masked, taken
from graphguard.ir import Arg, Constant, Graph, Node
from graphguard.ir import Value as Tensor
from graphguard.joint import MESSAGES, Joint, Match
from graphguard.lemmas import registry


@dataclass(frozen=True)
class Unknown:
    """A tensor without a description."""

    reason: str
    node: Node | None


Described = Value | Unknown
Environment = dict[Tensor, Described]


class UserLemma(Protocol):
    """What a user says of an operator that has no row."""

    @property
    def assumption(self) -> str: ...

    def describe(
        self, interpreter: Interpreter, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], lanes: int
    ) -> Sequence[Described]: ...


Lemmas = Mapping[str, UserLemma]  # by operator


@dataclass
class Interpretation:
    """The descriptions of all tensors: of the sequential program, and of each stream of ranks."""

    table: Table
    sequential: Environment = field(default_factory=dict)
    streams: list[tuple[Stream, Environment]] = field(default_factory=list)
    opaque: set[str] = field(default_factory=set)
    fallbacks: list[tuple[Node, str]] = field(default_factory=list)
    presumed: list[Node] = field(default_factory=list)
    relied_on: list[UserLemma] = field(default_factory=list)


class Interpreter:
    def __init__(self, table: Table, lemmas: Lemmas | None = None):
        self.table, self.ops, self.memo = table, Ops(table), Memo(table)
        self.lemmas = lemmas or {}
        self.relied_on: dict[str, UserLemma] = {}  # lemmas of the user that described something, by operator
        self.opaque: set[str] = set()  # operators that no row describes
        self.fallbacks: list[tuple[Node, str]] = []  # operations taken as opaque, and why
        self.presumed: list[Node] = []  # divisions and roots of the ranks alone, taken to be defined
        self.groups: dict[tuple[tuple[int, ...], ...], Groups] = {}  # by the lanes of their members
        self._constants: dict[Constant, Any] = {}

    # ------------------------------------------------------------------ one node
    def describe(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], lanes: int) -> list[Described]:
        unknown = next((each for each in _leaves((args, kwargs)) if isinstance(each, Unknown)), None)
        if unknown is not None:
            return [unknown] * len(node.outputs)
        reason = f"no lemma describes {node.op}"
        results: Sequence[Any] | None
        try:
            results = self._special(node, args, lanes)
            if results is None and node.op in self.lemmas:
                results = tuple(self.lemmas[node.op].describe(self, node, args, kwargs, lanes))
                self.relied_on[node.op] = self.lemmas[node.op]
            if results is None:
                operands: list[Value] = []
                what = _what(node, args, kwargs, operands)
                results = self.memo.describe(what, operands, lambda: registry.describe(self.table, node, args, dict(kwargs)))
            if results is None:
                self.opaque.add(node.op)
        except Undescribed as error:
            results, reason = None, str(error)
        if results is None:
            self.fallbacks.append((node, reason))
            results = tuple(self._opaque(node, args, kwargs, reason))
        return [self._checked(node, tensor, result) for tensor, result in zip(node.outputs, results, strict=False)]

    def _checked(self, node: Node, tensor: Tensor, result: Described | None) -> Described:
        """A result has the shape that the program says, or it is none."""
        if result is None:
            return Unknown(f"{node.op} leaves this result open", node)
        if isinstance(result, Unknown):
            return result
        shape = (*tensor.shape, 2) if tensor.dtype.startswith("complex") else tensor.shape
        if len(result.shape) != len(shape) or any(not _is(a, b) for a, b in zip(result.shape, shape, strict=True)):
            return Unknown(f"{node.op} was described with the shape {result.shape}, not {shape}", node)
        return result

    def _special(self, node: Node, args: tuple[Any, ...], lanes: int) -> tuple[Any, ...] | None:
        if node.op == "gg.part":
            return (self._part(*args),)
        if node.op.startswith(("aten.empty", "aten.new_empty")):
            return (self.unwritten(node.outputs[0].shape, lanes),)
        return None

    def _part(self, x: Value, key: str, index: Any, count: int) -> Value:
        """One of the tensors whose sum is x."""
        if len(x.terms) != 1 or len(x.terms[0].factors) != 1 or x.terms[0].coefficient != 1:
            raise Undescribed("a part of something that is not an input")
        (term,) = x.terms
        (factor,) = term.factors
        atom = self.table.atom("part", (key, factor.atom.id))
        self.table.parts[atom.id] = (factor.atom, count)
        part = term.with_(factors=(Factor(atom, (Index((), index), *factor.at)),))
        settled = self.table.settle(part)
        return Value(x.shape, () if settled is None else (settled,))

    def unwritten(self, shape: Sequence[int], lanes: int) -> Value:
        """Memory that nothing was written to: each time, and on each rank, something else."""
        lane = collapse(np.arange(lanes, dtype=np.int64))
        return self._atom("unwritten", next(self.table.names), shape, (Index((), lane),))

    def _atom(self, kind: str, name: Any, shape: Sequence[int], at: tuple[Index, ...] = ()) -> Value:
        variables = [next(self.table.names) for _ in shape]
        factor = Factor(self.table.atom(kind, name), (*at, *(Index(((v, 1),)) for v in variables)))
        ranges: dict[int, Any] = {v: (0, size) for v, size in zip(variables, shape, strict=True)}
        box: tuple[Any, ...] = tuple((0, size) for size in shape)
        settled = self.table.settle(Term(ONE, (factor,), ranges, tuple((v,) for v in variables), box))
        return Value(tuple(shape), () if settled is None else (settled,))

    def _opaque(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> list[Described]:
        """Equal arguments give equal results: of an operator of which nothing is known, or not here."""
        operands = [each for each in _leaves((args, kwargs)) if isinstance(each, Value)]
        if node.op.startswith("aten.rand") or any(isinstance(each, np.ndarray) for each in _leaves((args, kwargs))):
            return [Unknown(reason, node)] * len(node.outputs)
        words = repr([_word(arg) for arg in node.args] + [(k, _word(v)) for k, v in node.kwargs.items()])
        results: list[Described] = []
        for number, tensor in enumerate(node.outputs):
            try:
                results.append(self.ops.opaque(node.op, operands or [self.ops.ones(())], 0, tensor.shape, (number, words)))
            except (Undescribed, AssertionError):
                results.append(Unknown(reason, node))
        return results

    # ------------------------------------------------------------------ inputs and constants
    def input(self, name: str, shape: Sequence[int]) -> Value:
        return self._atom("input", name, shape)

    def constant(self, constant: Constant) -> Described:
        known = self._constants.get(constant)
        if known is None:
            known = self._constants[constant] = self._constant(constant)
        return known

    def _constant(self, constant: Constant) -> Described:
        array = elements(constant)
        if array is None:
            return self._atom("constant", constant, constant.shape)
        if array.size and (array == array.flat[0]).all() and np.isfinite(array.flat[0]):
            return self.ops.full(constant.shape, array.flat[0].item())
        if array.ndim == 1 and array.dtype.kind in "iu" and (np.diff(array) == 1).all():
            return self.ops.arange(len(array), int(array[0]))
        if array.ndim >= 1 and (array == array[:1]).all():  # rows that are alike
            return self.ops.expand(self.ops.reshape(self._of(array[0], constant.dtype), (1, *array.shape[1:])), array.shape)
        return self._atom("constant", constant, constant.shape)

    def _of(self, array: Any, dtype: str) -> Any:
        array = np.ascontiguousarray(array)
        return self.constant(Constant(dtype, array.shape, array.tobytes()))

    # ------------------------------------------------------------------ the sequential program
    def run_sequential(self, graph: Graph, inputs: Mapping[str, Value]) -> Environment:
        environment: Environment = {value: inputs[name] for name, value in graph.inputs.items()}
        environment |= {value: self.constant(constant) for value, constant in graph.constants.items()}
        uses = Counter(value for node in graph.nodes for value in node.operands())
        for node in graph.nodes:
            args, kwargs = _bound((node.args, dict(node.kwargs)), environment)
            for tensor, result in zip(node.outputs, self.describe(node, args, kwargs, 1), strict=False):
                if isinstance(result, Value) and len(result.terms) > 1 and uses[tensor] > 1:
                    result = self._as_atom(result)
                environment[tensor] = result
        return environment

    def run_graph(self, graph: Graph, inputs: Mapping[str, Value], output: str) -> Described | None:
        """One output of a graph that does not communicate, on one lane."""
        wanted = graph.outputs[output]
        return None if wanted is None else self.run_lanes(graph, inputs, 1)[wanted]

    def run_lanes(self, graph: Graph, inputs: Mapping[str, Value], lanes: int) -> Environment:
        """All tensors of a graph that does not communicate and is the same on every lane."""
        environment: Environment = {value: inputs[name] for name, value in graph.inputs.items()}
        environment |= {value: self.constant(constant) for value, constant in graph.constants.items()}
        for node in graph.nodes:
            args, kwargs = _bound((node.args, dict(node.kwargs)), environment)
            environment |= zip(node.outputs, self.describe(node, args, kwargs, lanes), strict=False)
        return environment

    def _as_atom(self, value: Value) -> Value:
        """A sum that is used more than once is named, so that what is made of it stays small."""
        try:
            (result,) = self.memo.describe("named", [value], lambda: (named(self.table, value),)) or (value,)
        except Undescribed:
            return value
        return result

    # ------------------------------------------------------------------ the ranks
    def run_streams(self, streams: Sequence[Stream], joint: Joint, inputs: Mapping[str, Value]) -> list[Environment]:
        players = [_Player(self, stream, joint, inputs) for stream in streams]
        where = {rank: (player, lane) for player in players for lane, rank in enumerate(player.stream.ranks)}
        moved = True
        while moved:
            moved = False
            for player in players:
                moved = player.advance(where) or moved
        for player in players:
            player.give_up()
        return [player.environment for player in players]


class _Player:
    """One stream while it is described."""

    def __init__(self, interpreter: Interpreter, stream: Stream, joint: Joint, inputs: Mapping[str, Value]):
        self.interpreter, self.stream, self.joint = interpreter, stream, joint
        self.graph = stream.graphs[0]
        self.environment: Environment = {}
        self.pending = list(range(len(self.graph.nodes)))
        self.posted: dict[int, list[Described]] = {}  # what each communication sends, by position
        self._positions: dict[int, dict[int, int]] = {}
        self._begin(inputs)

    def position_of(self, lane: int, node: Node) -> int:
        """The place of a rank's node in its graph."""
        if lane not in self._positions:
            self._positions[lane] = {id(each): n for n, each in enumerate(self.stream.graphs[lane].nodes)}
        return self._positions[lane][id(node)]

    def _begin(self, inputs: Mapping[str, Value]) -> None:
        relation = self.stream.relations[0]
        local: Environment = {value: inputs[name] for name, value in relation.inputs.items()}
        self._add_constants(local, self.stream.relations)
        for position, node in enumerate(relation.nodes):
            args, kwargs = _bound(self.stream.arguments("relations", position), local)
            results = self.interpreter.describe(node, args, kwargs, self.stream.lanes)
            local |= zip(node.outputs, results, strict=False)
        for name, value in self.graph.inputs.items():
            given = relation.outputs[name]
            assert given is not None
            self.environment[value] = local[given]
        self._add_constants(self.environment, self.stream.graphs)

    def _add_constants(self, environment: Environment, graphs: Sequence[Graph]) -> None:
        columns = [list(graph.constants.items()) for graph in graphs]
        for row in zip(*columns, strict=True):
            value, constant = row[0]
            if all(other == constant for _, other in row):
                environment[value] = self.interpreter.constant(constant)
                continue
            numbers = [elements(other) for _, other in row]
            if all(n is not None and n.dtype.kind in "iub" for n in numbers):
                lanes = np.array([int(n.flat[0]) for n in numbers], dtype=np.int64)
                environment[value] = self.interpreter.ops.full(value.shape, lanes)
            else:
                environment[value] = Unknown("a constant that differs between ranks", None)

    def advance(self, where: Mapping[int, tuple[_Player, int]]) -> bool:
        moved, waiting = False, []
        for position in self.pending:
            node = self.graph.nodes[position]
            if not all(value in self.environment for value in node.operands()):
                waiting.append(position)
            elif node.op == "dist.wait" or not node.communicates:
                self._compute(position, node)
                moved = True
            else:
                if position not in self.posted:
                    self.posted[position] = [self.environment[value] for value in node.operands()]
                    moved = True
                if self._deliver(position, node, where):
                    moved = True
                else:
                    waiting.append(position)
        self.pending = waiting
        return moved

    def _compute(self, position: int, node: Node) -> None:
        args, kwargs = _bound(self.stream.arguments("graphs", position), self.environment)
        if node.op == "dist.wait":
            return
        before = len(self.interpreter.table.taken_as_defined)
        results = self.interpreter.describe(node, args, kwargs, self.stream.lanes)
        self.environment |= zip(node.outputs, results, strict=False)
        if len(self.interpreter.table.taken_as_defined) > before:
            self.interpreter.presumed.append(node)

    def give_up(self) -> None:
        """What never arrived has no description."""
        for position in self.pending:
            node = self.graph.nodes[position]
            for value in node.outputs:
                self.environment.setdefault(value, Unknown("it waits for what never comes", node))

    # ------------------------------------------------------------------ communication
    def _deliver(self, position: int, node: Node, where: Mapping[int, tuple[_Player, int]]) -> bool:
        matches = [
            self.joint.match_of(rank, graph.nodes[position])
            for rank, graph in zip(self.stream.ranks, self.stream.graphs, strict=True)
        ]
        meeting = _Meeting(self, position, matches, where)
        if not meeting.complete():
            return False
        try:
            results = meeting.results(node)
        except Undescribed as error:
            results = [Unknown(str(error), node)] * len(node.outputs)
        checked = [self.interpreter._checked(node, *each) for each in zip(node.outputs, results, strict=True)]
        self.environment |= zip(node.outputs, checked, strict=True)
        return True


class _Meeting:
    """The ranks that take part in one communication of a stream, in all of its groups."""

    def __init__(self, player: _Player, position: int, matches: list[Match], where: Mapping[int, tuple[_Player, int]]):
        self.player, self.position, self.matches, self.where = player, position, matches, where
        self.ops = player.interpreter.ops
        self.distinct = list({match.id: match for match in matches}.values())
        self.ranks = sorted(rank for match in self.distinct for rank in match.group)
        self.lane_of = {rank: lane for lane, rank in enumerate(self.ranks)}
        self.at_home = self._is_at_home()

    def _is_at_home(self) -> bool:
        """Whether the stream meets itself: all members are its ranks, at this very operation."""
        if self.ranks != self.player.stream.ranks:
            return False
        graphs = self.player.stream.graphs
        return all(
            m.nodes[rank] is graphs[lane].nodes[self.position]
            for lane, (rank, m) in enumerate(zip(self.ranks, self.matches, strict=True))
        )

    def complete(self) -> bool:
        """Whether all that is sent has been described. Of a message, only the sender counts."""
        return self.at_home or all(
            self._position(rank, match) in self.where[rank][0].posted
            for match in self.distinct
            for rank in (match.group[:1] if match.op in MESSAGES else match.group)
        )

    def _position(self, rank: int, match: Match) -> int:
        """Where a rank's part in a communication is among its operations."""
        other, lane = self.where[rank]
        return other.position_of(lane, match.nodes[rank])

    def operand(self, number: int, only: set[int] | None = None) -> Value:
        """What the ranks of the meeting send, by lane of the meeting: all of them, or those that count."""
        if self.at_home:
            return _described(self.player.posted[self.position][number])
        sources: dict[tuple[int, int], list[int]] = {}
        match_of = {rank: match for match in self.distinct for rank in match.group}
        for rank in self.ranks if only is None else sorted(only):
            sources.setdefault((id(self.where[rank][0]), self._position(rank, match_of[rank])), []).append(rank)
        parts = []
        for (_, position), ranks in sources.items():
            player = self.where[ranks[0]][0]
            if number >= len(player.posted[position]):
                continue  # a rank that sends nothing
            value = _described(player.posted[position][number])
            lanes = np.zeros(len(self.ranks), dtype=np.int64)
            present = np.zeros(len(self.ranks), dtype=np.int64)
            for rank in ranks:
                lanes[self.lane_of[rank]], present[self.lane_of[rank]] = self.where[rank][1], 1
            parts.append(_spread(self.ops.table, value, lanes, present))
        return folded(self.ops.table, add(self.ops.table, parts)) if len(parts) > 1 else parts[0]

    def operand_of(self, place: int, groups: Groups) -> Value:
        """What the members at one place of the groups send, on every lane."""
        return taken(self.ops.table, self.operand(0), groups.members[groups.group, place])

    def groups(self) -> Groups:
        members = tuple(tuple(self.lane_of[r] for r in match.group) for match in self.distinct)
        known = self.player.interpreter.groups.get(members)
        if known is None:
            if len({len(lanes) for lanes in members}) > 1:
                raise Undescribed("groups of different sizes meet at one operation")
            known = self.player.interpreter.groups[members] = groups_of(np.array(members, dtype=np.int64))
        return known

    def own(self, value: Value) -> Value:
        """A result of the meeting as the stream's lanes see it."""
        if self.ranks == self.player.stream.ranks:
            return value
        return taken(self.ops.table, value, np.array([self.lane_of[r] for r in self.player.stream.ranks], dtype=np.int64))

    def results(self, node: Node) -> Sequence[Described]:
        handler = _HANDLERS.get(node.op)
        if handler is None:
            raise Undescribed(f"{node.op} is not described")
        if not self.at_home or node.op not in _OF_OPERANDS:
            return handler(self, node)
        operands = [_described(value) for value in self.player.posted[self.position]]
        kwargs = tuple((name, word(arg)) for name, arg in node.kwargs.items() if name in _OF_OPERANDS[node.op])
        outputs = tuple((tensor.shape, tensor.dtype) for tensor in (*node.operands(), *node.outputs))
        what = node.op, kwargs, outputs, id(self.groups())
        return self.player.interpreter.memo.describe(what, operands, lambda: handler(self, node)) or ()


def _spread(table: Table, value: Value, lanes: Lanes, present: Lanes) -> Value:
    """A value of other lanes, held by some of the lanes here and zero in the others."""
    return masked(table, taken(table, value, lanes), present)


def _described(value: Described) -> Value:
    if isinstance(value, Unknown):
        raise Undescribed(value.reason)
    return value


def _require_arithmetic(node: Node) -> None:
    """Sums of booleans are disjunctions, and means of whole numbers are rounded: neither is what the algebra does."""
    dtype, reduce = next(node.operands()).dtype, node.kwargs["reduce"]
    if dtype == "bool" and reduce not in ("max", "min"):
        raise Undescribed(f"a reduction of booleans by {reduce}")
    if reduce in ("avg", "premul_sum") and not dtype.startswith(("float", "bfloat", "complex")):
        raise Undescribed(f"a reduction of whole numbers by {reduce}")


def _all_reduce(m: _Meeting, node: Node) -> list[Described]:
    _require_arithmetic(node)
    return [m.own(exchange.reduced(m.ops, m.operand(0), m.groups(), dict(node.kwargs)))]


def _reduce(m: _Meeting, node: Node) -> list[Described]:
    """On the root the reduction; what the others hold afterwards is not promised."""
    roots = [match.any_node.kwargs["root"] == rank for match, rank in zip(m.matches, m.player.stream.ranks, strict=True)]
    if not any(roots):
        return [Unknown("after dist.reduce, only the root holds something that is promised", node)]
    (total,) = _all_reduce(m, node)
    if all(roots):
        return [total]
    there = np.array(roots, dtype=np.int64)
    scratch = m.player.interpreter.unwritten(node.outputs[0].shape, m.player.stream.lanes)
    lanes = np.arange(len(roots), dtype=np.int64)
    parts = [_spread(m.ops.table, _described(total), lanes, there), _spread(m.ops.table, scratch, lanes, 1 - there)]
    return [add(m.ops.table, parts)]


def _all_gather_into_tensor(m: _Meeting, node: Node) -> list[Described]:
    return [m.own(exchange.gathered(m.ops, m.operand(0), m.groups(), node.outputs[0].shape))]


def _all_gather(m: _Meeting, node: Node) -> list[Described]:
    groups = m.groups()
    held = [m.operand_of(place, groups) for place in range(groups.size)]
    return [m.own(value) for value in held]


def _reduce_scatter_tensor(m: _Meeting, node: Node) -> list[Described]:
    _require_arithmetic(node)
    groups = m.groups()
    total = exchange.reduced(m.ops, m.operand(0), groups, dict(node.kwargs))
    return [m.own(exchange.own_part(m.ops, total, groups, node.outputs[0].shape))]


def _stacked(m: _Meeting, count: int) -> Value:
    """A list of equal tensors as one, along a new first dim."""
    rows = [m.operand(number) for number in range(count)]
    return m.ops.concat([m.ops.reshape(row, (1, *row.shape)) for row in rows], 0)


def _reduce_scatter(m: _Meeting, node: Node) -> list[Described]:
    _require_arithmetic(node)
    groups = m.groups()
    total = exchange.reduced(m.ops, _stacked(m, groups.size), groups, dict(node.kwargs))
    return [m.own(exchange.own_part(m.ops, total, groups, node.outputs[0].shape))]


def _all_to_all(m: _Meeting, node: Node) -> list[Described]:
    groups = m.groups()
    moved = exchange.exchanged(m.ops, _stacked(m, groups.size), groups)
    parts = [m.ops.cut(moved, 0, n, n + 1) for n in range(groups.size)]
    return [m.own(m.ops.reshape(part, part.shape[1:])) for part in parts]


def _all_to_all_single(m: _Meeting, node: Node) -> list[Described]:
    nodes = [each for match in m.distinct for each in match.nodes.values()]
    splits: list[Any] = [each.kwargs.get(name) or () for each in nodes for name in ("input_splits", "output_splits")]
    if any(len(set(sizes)) > 1 for sizes in splits):
        return [m.own(_exchanged_unevenly(m))]
    return [m.own(exchange.exchanged(m.ops, m.operand(0), m.groups()))]


def _exchanged_unevenly(m: _Meeting) -> Value:
    """Member by member: a member gets from each other one the part that the other one has for it."""
    groups, parts = m.groups(), []
    for place in range(groups.size):
        held = m.operand(0, {match.group[place] for match in m.distinct})
        sent = taken(m.ops.table, held, groups.members[groups.group, place])
        ends = np.zeros((2, len(m.ranks)), dtype=np.int64)
        for match in m.distinct:
            splits: Any = match.nodes[match.group[place]].kwargs.get("input_splits")
            sizes = splits or [m.ops.size(sent, 0) // groups.size] * groups.size
            for number, rank in enumerate(match.group):
                ends[:, m.lane_of[rank]] = sum(sizes[:number]), sum(sizes[: number + 1])
        parts.append(m.ops.cut(sent, 0, collapse(ends[0]), collapse(ends[1])))
    return folded(m.ops.table, m.ops.concat(parts, 0))


def _from_root(m: _Meeting) -> Lanes:
    """For each lane of the meeting, the lane of its root."""
    lanes = np.zeros(len(m.ranks), dtype=np.int64)
    for match in m.distinct:
        root: int = match.any_node.kwargs["root"]  # type: ignore[assignment]
        for rank in match.group:
            lanes[m.lane_of[rank]] = m.lane_of[root]
    return lanes


def _broadcast(m: _Meeting, node: Node) -> list[Described]:
    roots = {int(match.any_node.kwargs["root"]) for match in m.distinct}  # type: ignore[arg-type]
    return [m.own(taken(m.ops.table, m.operand(0, roots), _from_root(m)))]


def _gather(m: _Meeting, node: Node) -> list[Described]:
    return _all_gather(m, node)[: len(node.outputs)] if node.outputs else []


def _scatter(m: _Meeting, node: Node) -> list[Described]:
    groups = m.groups()
    stacked = taken(m.ops.table, _stacked(m, groups.size), _from_root(m))
    return [m.own(exchange.own_part(m.ops, stacked, groups, node.outputs[0].shape))]


def _message(m: _Meeting, node: Node) -> list[Described]:
    if node.op == "dist.send":
        return []
    senders = [match.group[0] for match in m.matches]
    sources: dict[tuple[int, int], list[int]] = {}
    for lane, rank in enumerate(senders):
        sources.setdefault((id(m.where[rank][0]), m._position(rank, m.matches[lane])), []).append(lane)
    parts = []
    for (_, position), lanes in sources.items():
        player = m.where[senders[lanes[0]]][0]
        value = _described(player.posted[position][0])
        index = np.zeros(len(senders), dtype=np.int64)
        present = np.zeros(len(senders), dtype=np.int64)
        for lane in lanes:
            index[lane], present[lane] = m.where[senders[lane]][1], 1
        parts.append(_spread(m.ops.table, value, index, present))
    return [folded(m.ops.table, add(m.ops.table, parts)) if len(parts) > 1 else parts[0]]


_HANDLERS: dict[str, Callable[[_Meeting, Node], list[Described]]] = {
    "dist.all_reduce": _all_reduce,
    "dist.reduce": _reduce,
    "dist.all_gather": _all_gather,
    "dist.all_gather_into_tensor": _all_gather_into_tensor,
    "dist.reduce_scatter": _reduce_scatter,
    "dist.reduce_scatter_tensor": _reduce_scatter_tensor,
    "dist.all_to_all": _all_to_all,
    "dist.all_to_all_single": _all_to_all_single,
    "dist.broadcast": _broadcast,
    "dist.gather": _gather,
    "dist.scatter": _scatter,
    "dist.send": _message,
    "dist.recv": _message,
    "dist.barrier": lambda m, node: [],
}

# The operators whose results are functions of what is sent, of the groups, and of these arguments alone.
_OF_OPERANDS: dict[str, tuple[str, ...]] = {
    "dist.all_reduce": ("reduce", "factor"),
    "dist.reduce_scatter": ("reduce", "factor"),
    "dist.reduce_scatter_tensor": ("reduce", "factor"),
    "dist.all_gather": (),
    "dist.all_gather_into_tensor": (),
    "dist.all_to_all": (),
    "dist.all_to_all_single": ("input_splits", "output_splits"),
}


# ---------------------------------------------------------------------- small things
def elements(constant: Constant) -> Any:
    """A constant as an array; None for dtypes that numpy does not have."""
    try:
        dtype = np.dtype(constant.dtype)
    except TypeError:
        return None
    return np.frombuffer(constant.data, dtype=dtype).reshape(constant.shape)


def _is(a: Any, b: int) -> bool:
    return not isinstance(a, np.ndarray) and a == b


def _bound(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], environment: Environment
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with descriptions in place of tensors."""

    def bound(arg: Any) -> Any:
        if type(arg) is Tensor:
            return environment[arg]
        if type(arg) is tuple:
            return tuple(bound(each) for each in arg)
        return arg

    args, kwargs = arguments
    return tuple(bound(arg) for arg in args), {name: bound(arg) for name, arg in kwargs.items()}


def _what(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Value]) -> Hashable:
    """All that a description may look at, but for the descriptions of the operands, which are listed."""

    def words(arg: Any, tensor: Any) -> Any:
        if type(arg) is Value:
            operands.append(arg)
            return tensor.dtype
        if type(arg) is tuple:
            return tuple([words(*each) for each in zip(arg, tensor, strict=True)])
        return word(arg)

    given = tuple([words(*each) for each in zip(args, node.args, strict=True)])
    named = tuple([(name, words(arg, node.kwargs[name])) for name, arg in kwargs.items()]) if kwargs else ()
    return node.op, given, named, tuple([(tensor.shape, tensor.dtype) for tensor in node.outputs])


def _leaves(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)) and not hasattr(tree, "_fields"):
        for each in tree:
            yield from _leaves(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _leaves(each)
    else:
        yield tree


def _word(arg: Arg) -> Any:
    """An argument for a key: tensors are counted by their place alone."""
    if type(arg) is Tensor:
        return "%"
    if type(arg) is tuple:
        return tuple(_word(each) for each in arg)
    return arg
