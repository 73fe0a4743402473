"""Describes every tensor of the sequential program, then every tensor of the ranks, over one table.

Ranks of one class are described at once. Communication is dataflow: a node posts what it sends and goes on; what it receives is
there once all members have posted. What cannot be described is Unknown, with a reason and the node where it began.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

import numpy as np

from graphguard.engine.algebra.sums import named
from graphguard.engine.ranks import draws
from graphguard.engine.ranks.astray import Astray
from graphguard.engine.ranks.collective import Groups
from graphguard.engine.ranks.collective_call import CollectiveCall, Members
from graphguard.engine.ranks.draws import Draws
from graphguard.engine.store.memo import Memo, word
from graphguard.engine.store.need import Need
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.ops import Ops, fraction
from graphguard.engine.terms.lane import collapse
from graphguard.engine.terms.part import Axis, Whole
from graphguard.engine.terms.term import ONE, Factor, Index, Term, Undescribed, Value
from graphguard.engine.terms.unknown import Described, Environment, Unknown
from graphguard.graph.alike import NOT_OPERANDS
from graphguard.graph.collectives import WAIT
from graphguard.graph.exposure import Exposure, Shown
from graphguard.graph.ir import Arg, Constant, Graph, Node
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.operators import class_of
from graphguard.graph.rank_class import Each, PerRank, RankClass
from graphguard.graph.world import Place, World


class UserLemma(Protocol):
    """What a user says of an operator that has no row."""

    @property
    def assumption(self) -> str: ...

    def describe(
        self, interpreter: Interpreter, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], lanes: int
    ) -> Sequence[Described]: ...


@dataclass(frozen=True)
class Lemmas:
    """What operators mean. It is handed in: the engine itself knows no operator.

    rows: the descriptions of a node's outputs, given those of its arguments; None if no row knows the operator.
    own: the user's, by operator, which come first."""

    rows: Callable[[Table, Node, tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]
    own: Mapping[str, UserLemma] = field(default_factory=dict)


class IsRelated(Protocol):
    """Whether what the ranks of a class hold is a copy, a tile, a summand or a multiple of a sequential tensor."""

    def __call__(self, held: RankClass, value: Described) -> bool: ...


class NodeNeeds(NamedTuple):
    """What an operation of a class needs, so that it is defined."""

    place: Place
    needs: tuple[Need, ...]


@dataclass
class Interpretation:
    """The descriptions of all tensors: of the sequential program, and of each class of ranks."""

    table: Table
    lemmas: Lemmas
    sequential: Environment = field(default_factory=dict)
    streams: list[tuple[RankClass, Environment]] = field(default_factory=list)
    opaque: set[str] = field(default_factory=set)
    fallbacks: list[tuple[Node, str]] = field(default_factory=list)
    needs: list[NodeNeeds] = field(default_factory=list)  # what the ranks' operations need, so that they are defined
    relied_on: list[UserLemma] = field(default_factory=list)
    draws: Draws = field(default_factory=Draws)


class Interpreter:
    def __init__(self, table: Table, lemmas: Lemmas):
        self.table, self.ops, self.memo = table, Ops(table), Memo(table)
        self.lemmas = lemmas
        self.relied_on: dict[str, UserLemma] = {}  # lemmas of the user that described something, by operator
        self.opaque: set[str] = set()  # operators that no row describes
        self.fallbacks: list[tuple[Node, str]] = []  # operations taken as opaque, and why
        self.needs: list[NodeNeeds] = []
        self.groups: dict[int, tuple[Members, Groups]] = {}  # by the array of their members, which is kept
        self.draws = Draws()
        self.is_related: IsRelated | None = None  # to the sequential program; ways that lead far from it are then not followed
        self._constants: dict[Constant, Any] = {}

    # ------------------------------------------------------------------ one node
    def describe(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], lanes: int) -> list[Described]:
        if node.outputs and all(0 in tensor.shape for tensor in node.outputs):
            return [Value(_described_shape(tensor), ()) for tensor in node.outputs]  # without elements nothing is said
        args = _form_only(node, args)
        unknown = _unknown_in(args) or (_unknown_in(kwargs.values()) if kwargs else None)
        if unknown is not None:
            return [unknown] * len(node.outputs)
        reason, before = f"no lemma describes {node.op}", self.table.needs.count()
        results: Sequence[Any] | None
        try:
            results = self._special(node, args, lanes)
            if results is None and node.op in self.lemmas.own:
                results = tuple(self.lemmas.own[node.op].describe(self, node, args, kwargs, lanes))
                self.relied_on[node.op] = self.lemmas.own[node.op]
            if results is None:
                operands: list[Value] = []
                what = _what(node, args, kwargs, operands)
                results = self.memo.describe(what, operands, lambda: self.lemmas.rows(self.table, node, args, dict(kwargs)))
            if results is None:
                self.opaque.add(node.op)
        except Undescribed as error:
            results, reason = None, str(error)
        if results is None:
            self.fallbacks.append((node, reason))
            self.table.needs.forget_since(before)
            results = tuple(self._opaque(node, args, kwargs, reason))
        return [self._checked(node, tensor, result) for tensor, result in zip(node.outputs, results, strict=False)]

    def _checked(self, node: Node, tensor: Tensor, result: Described | None) -> Described:
        """A result has the shape that the program says, or it is none."""
        if result is None:
            return Unknown(f"{node.op} leaves this result open", node)
        if isinstance(result, Unknown):
            return result
        shape = _described_shape(tensor)
        if not _same_shape(result.shape, shape):
            return Unknown(f"{node.op} was described with the shape {result.shape}, not {shape}", node)
        return result

    def random(self, node: Node, args: tuple[Any, ...]) -> list[Described] | None:
        """What the lanes draw, if that stands for something; None if nothing was drawn."""
        drawn = draws.drawn(node) if node.outputs else None
        tile = None if drawn is None else self.draws.tiles.get(drawn)
        if drawn is not None and drawn in self.draws.reasons:
            return [Unknown(self.draws.reasons[drawn], node)] * len(node.outputs)
        if drawn is None or tile is None:
            return None
        whole = self._atom("draw", tile.number, tile.whole)
        if draws.is_mask(node):
            for term in whole.terms:
                term.factors[0].atom.indicator = term.factors[0].atom.nonnegative = True
        if tile.dim is not None:
            whole = self.ops.cut(whole, tile.dim, tile.start, collapse(tile.start + drawn.shape[tile.dim]))
        if node.op != "aten.native_dropout.default":
            return [whole]
        x, share, training = args
        if training is not True or isinstance(x, Unknown) or not 0 <= share < 1:
            return None
        try:
            return [self.ops.scale(self.ops.mul(x, whole), 1 / (1 - fraction(share))), whole]
        except Undescribed as error:
            return [Unknown(str(error), node)] * len(node.outputs)

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
        at = tuple(Index(((-2 - dim, 1),)) for dim in range(len(factor.at)))
        axes = (Axis(0, None, 1), *(Axis(0, None) for _ in factor.at))
        self.table.sums.note_whole(atom, Whole(count, axes, ONE, (Factor(factor.atom, at),)))
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
        operands = [each for each in leaves((args, kwargs)) if isinstance(each, Value)]
        if node.op.startswith("aten.rand") or any(isinstance(each, np.ndarray) for each in leaves((args, kwargs))):
            return [Unknown(reason, node)] * len(node.outputs)
        if _reads_bits(node):
            return [Unknown("what floats are in memory, or the sign of a zero, real numbers do not say", node)] * len(
                node.outputs
            )
        words = repr([_word(arg) for arg in node.args] + [(k, _word(v)) for k, v in node.kwargs.items()])
        results: list[Described] = []
        for number, tensor in enumerate(node.outputs):
            try:
                parameters = (number, tensor.dtype, words)
                found = self.ops.opaque(node.op, operands or [self.ops.ones(())], 0, tensor.shape, parameters)
                self.ops.need_defined(found)
                results.append(found)
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
            return self._data(constant, finite=constant.dtype == "bfloat16" and _is_finite_bfloat16(constant))
        if array.size and (array == array.flat[0]).all() and np.isfinite(array.flat[0]):
            return self.ops.full(constant.shape, array.flat[0].item())
        if array.ndim == 1 and array.dtype.kind in "iu" and array.size:
            runs = np.split(array, np.flatnonzero((array[1:] != array[:-1] + 1) | (array[1:] < array[:-1])) + 1)  # no wrap
            if not self.table.over("constant_runs", len(runs)):  # positions, such as those of the chunks that a rank has
                return self.ops.concat([self.ops.arange(len(run), int(run[0])) for run in runs], 0)
        if array.ndim >= 1 and array.size and (array == array[:1]).all():  # rows that are alike
            return self.ops.expand(self.ops.reshape(self._of(array[0], constant.dtype), (1, *array.shape[1:])), array.shape)
        return self._data(constant, finite=array.dtype.kind not in "fc" or bool(np.isfinite(array).all()))

    def _data(self, constant: Constant, finite: bool) -> Value:
        found = self._atom("constant", constant, constant.shape)
        if not finite:
            for term in found.terms:
                self.table.facts.note_infinite(term.factors[0].atom)
        return found

    def _of(self, array: Any, dtype: str) -> Any:
        array = np.ascontiguousarray(array)
        return self.constant(Constant(dtype, array.shape, array.tobytes()))

    # ------------------------------------------------------------------ the sequential program
    def run_sequential(self, graph: Graph, inputs: Mapping[str, Value]) -> Environment:
        environment: Environment = {value: inputs[name] for name, value in graph.inputs.items()}
        environment |= {value: self.constant(constant) for value, constant in graph.constants.items()}
        uses = Counter(value for node in graph.nodes for value in node.operands())
        exposure = Exposure(graph)
        for node in graph.nodes:
            args, kwargs = bound((node.args, dict(node.kwargs)), environment)
            self.table.stops.at, self.table.shown = node, exposure.of(node)
            results = self.random(node, args) or self.describe(node, args, kwargs, 1)
            for tensor, result in zip(node.outputs, results, strict=False):
                if isinstance(result, Value) and len(result.terms) > 1 and uses[tensor] > 1 and tensor.dtype != "bool":
                    result = self._as_atom(result)  # a mask stays open: its complement is simple
                environment[tensor] = result
        self.table.shown = Shown.ALL
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
            args, kwargs = bound((node.args, dict(node.kwargs)), environment)
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
    def run_classes(self, world: World, inputs: Mapping[str, Value]) -> list[Environment]:
        players = [Player(self, world, number, inputs) for number in range(len(world.classes))]
        moved = True
        while moved:
            moved = False
            for player in players:
                moved = player.advance(players) or moved
        for player in players:
            player.give_up()
        return [player.environment for player in players]


class Player:
    """One class while it is described."""

    def __init__(self, interpreter: Interpreter, world: World, number: int, inputs: Mapping[str, Value]):
        self.interpreter, self.world, self.number = interpreter, world, number
        self.held = world.classes[number]
        self.graph = self.held.graph
        self.environment: Environment = {}
        self.queue = Queue(self.graph)
        self.posted: dict[int, list[Described]] = {}  # what each communication sends, by position
        related = interpreter.is_related
        self.astray = None if related is None else Astray(interpreter.table, len(world.classes), partial(related, self.held))
        self._begin(inputs)

    def _begin(self, inputs: Mapping[str, Value]) -> None:
        relation = self.held.relation
        local: Environment = {value: inputs[name] for name, value in relation.inputs.items()}
        self._add_constants(local, relation)
        for node in relation.nodes:
            args, kwargs = bound(arguments(node), local)
            results = self.interpreter.describe(node, args, kwargs, self.held.lanes)
            local |= zip(node.outputs, results, strict=False)
        for name, value in self.graph.inputs.items():
            given = relation.outputs[name]
            assert given is not None
            self.environment[value] = local[given]
        self._add_constants(self.environment, self.graph)

    def _add_constants(self, environment: Environment, graph: Graph) -> None:
        for value, constant in graph.constants.items():
            if not isinstance(constant, Each):
                environment[value] = self.interpreter.constant(constant)
                continue
            numbers = np.array([int(elements(each).flat[0]) for each in constant.items], dtype=np.int64)
            environment[value] = self.interpreter.ops.full(value.shape, numbers)

    def advance(self, players: Sequence[Player]) -> bool:
        """Describe all that can be. What communicates, and does not come through, is tried again the next time."""
        moved, waiting = False, []
        while (position := self.queue.next()) is not None:
            node = self.graph.nodes[position]
            if node.op != WAIT and node.communicates:
                if position not in self.posted:
                    self.posted[position] = [self.environment[value] for value in node.operands()]
                    moved = True
                if not self._deliver(position, node, players):
                    waiting.append(position)
                    continue
            elif node.op != WAIT:
                self._compute(position, node)
            self.queue.done(node)
            moved = True
        self.queue.put_back(waiting)
        return moved

    def _compute(self, position: int, node: Node) -> None:
        args, kwargs = bound(arguments(node), self.environment)
        before, work = self.interpreter.table.needs.count(), self.interpreter.table.work
        self.interpreter.table.stops.at = node
        results = self.interpreter.random(node, args) or self.interpreter.describe(node, args, kwargs, self.held.lanes)
        if self.astray is not None:
            work = self.interpreter.table.work - work + self.behind(position)
            results = self.astray.checked(node, results, work)
        self.environment |= zip(node.outputs, results, strict=False)
        needs = self.interpreter.table.needs.since(before)
        if needs:
            self.interpreter.needs.append(NodeNeeds((self.number, position), needs))

    def give_up(self) -> None:
        """What never arrived has no description."""
        for node in self.graph.nodes:
            for value in node.outputs:
                self.environment.setdefault(value, Unknown("it waits for what never comes", node))

    # ------------------------------------------------------------------ communication
    def _deliver(self, position: int, node: Node, players: Sequence[Player]) -> bool:
        self.interpreter.table.stops.at = node
        call, work = CollectiveCall(self.world, (self.number, position), players), self.interpreter.table.work
        if not call.complete():
            return False
        try:
            results = call.results(node)
        except Undescribed as error:
            results = [Unknown(str(error), node)] * len(node.outputs)
        checked = [self.interpreter._checked(node, *each) for each in zip(node.outputs, results, strict=True)]
        if self.astray is not None:
            work = self.interpreter.table.work - work + call.behind()
            checked = self.astray.checked(node, checked, work)
        self.environment |= zip(node.outputs, checked, strict=True)
        return True

    def behind(self, position: int) -> int:
        """The work on the longest way to what an operation reads, from what was last related to the sequential program."""
        return 0 if self.astray is None else self.astray.behind(self.graph.nodes[position].operands())


class Queue:
    """The operations of a graph whose operands are there, the first one first."""

    def __init__(self, graph: Graph):
        self._ready: list[int] = []
        self._missing: dict[int, int] = {}  # by position, how many operands are not there yet
        self._waiting: dict[Tensor, list[int]] = defaultdict(list)
        made = {value for node in graph.nodes for value in node.outputs}
        for position, node in enumerate(graph.nodes):
            operands = {value for value in node.operands() if value in made}
            self._missing[position] = len(operands)
            for value in operands:
                self._waiting[value].append(position)
        self.put_back([position for position, missing in self._missing.items() if not missing])

    def next(self) -> int | None:
        return heappop(self._ready) if self._ready else None

    def done(self, node: Node) -> None:
        for value in node.outputs:
            for position in self._waiting.pop(value, ()):
                self._missing[position] -= 1
                if not self._missing[position]:
                    heappush(self._ready, position)

    def put_back(self, positions: Sequence[int]) -> None:
        for position in positions:
            heappush(self._ready, position)


def arguments(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation of a class, with one number per lane where the ranks differ."""

    def numbers(arg: Any) -> Any:
        return collapse(arg.numbers) if type(arg) is PerRank else arg

    kwargs = {name: arg for name, arg in node.kwargs.items() if name not in NOT_OPERANDS} if node.communicates else node.kwargs
    return tuple([numbers(arg) for arg in node.args]), dict(kwargs)


# ---------------------------------------------------------------------- small things
def elements(constant: Constant) -> Any:
    """A constant as an array; None for dtypes that numpy does not have of its own: packages such as ml_dtypes add more, which
    are other kinds of numbers than those that are looked for here."""
    try:
        dtype = np.dtype(constant.dtype)
    except TypeError:
        return None
    return None if dtype.kind not in "biufc" else np.frombuffer(constant.data, dtype=dtype).reshape(constant.shape)


def _is_finite_bfloat16(constant: Constant) -> bool:
    """numpy has no such dtype: the upper half of a float32, of which an exponent of ones is no number."""
    halves = np.frombuffer(constant.data, dtype=np.uint16)
    return bool(((halves & 0x7F80) != 0x7F80).all())


def _same_shape(shape: Sequence[Any], wanted: Sequence[int]) -> bool:
    if len(shape) != len(wanted):
        return False
    for size, other in zip(shape, wanted, strict=True):  # noqa: SIM110 - this is quicker, and done for every tensor
        if isinstance(size, np.ndarray) or size != other:
            return False
    return True


def _form_only(node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What creates a tensor in the form of another one reads no number of it."""
    if not args or not isinstance(args[0], Unknown) or class_of(node.op) != "creates":
        return args
    (form,) = itertools.islice(node.operands(), 1)
    return Value(_described_shape(form), ()), *args[1:]


def _described_shape(tensor: Tensor) -> tuple[int, ...]:
    """A complex number is two."""
    return (*tensor.shape, 2) if tensor.dtype.startswith("complex") else tuple(tensor.shape)


def _unknown_in(args: Iterable[Any]) -> Unknown | None:
    for arg in args:
        if type(arg) is Unknown:
            return arg
        if type(arg) is tuple:
            inside = _unknown_in(arg)
            if inside is not None:
                return inside
    return None


def bound(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], environment: Mapping[Tensor, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with descriptions in place of tensors."""

    def described(arg: Any) -> Any:
        if type(arg) is Tensor:
            return environment[arg]
        if type(arg) is tuple:
            return tuple(described(each) for each in arg)
        return arg

    args, kwargs = arguments
    return tuple(described(arg) for arg in args), {name: described(arg) for name, arg in kwargs.items()}


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


def leaves(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)) and not hasattr(tree, "_fields"):
        for each in tree:
            yield from leaves(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from leaves(each)
    else:
        yield tree


_SIGNS = ("aten.signbit.", "aten.copysign.", "aten.copysign_.", "aten.atan2.", "aten.atan2_.")


def _reads_bits(node: Node) -> bool:
    """Whether floats are taken for what they are in memory: as numbers of another size or no floats, or zeros with a sign."""
    before, after = next((tensor.dtype for tensor in node.operands()), ""), node.outputs[0].dtype if node.outputs else ""
    if node.op.startswith(_SIGNS):
        return any(_is_float(tensor.dtype) for tensor in node.operands())
    if node.op != "aten.view.dtype" or not _is_float(before):
        return False
    return not _is_float(after) or before.removeprefix("complex") != after.removeprefix("complex")


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def _word(arg: Arg) -> Any:
    """An argument for a key: of tensors the dtypes count, with which an operator does what it does."""
    if type(arg) is Tensor:
        return arg.dtype
    if type(arg) is tuple:
        return tuple(_word(each) for each in arg)
    return arg
