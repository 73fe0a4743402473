"""A communication of described ranks: who takes part, what each sends, and what each gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, Protocol

import numpy as np

from graphguard.engine.algebra.sums import folded
from graphguard.engine.algebra.value import add, masked, taken
from graphguard.engine.ranks import semantics
from graphguard.engine.ranks.collective import Groups, groups_of
from graphguard.engine.ranks.rank_classes import Stream
from graphguard.engine.store.memo import Memo, word
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.ops import Ops
from graphguard.engine.terms.lane import Lanes, collapse
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.engine.terms.unknown import Described, Unknown
from graphguard.graph.collectives import COLLECTIVES, MESSAGES, Count, Meanings
from graphguard.graph.dtypes import is_narrow
from graphguard.graph.ir import Node
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.matching import Match


class Interpreter(Protocol):
    """Who describes the ranks."""

    ops: Ops
    memo: Memo
    groups: dict[tuple[tuple[int, ...], ...], Groups]

    def unwritten(self, shape: Sequence[int], lanes: int) -> Value: ...


class Player(Protocol):
    """A stream while it is described."""

    stream: Stream
    posted: dict[int, list[Described]]  # what each communication sends, by position

    @property
    def interpreter(self) -> Interpreter: ...

    def position_of(self, lane: int, node: Node) -> int: ...

    def behind(self, position: int) -> int: ...


class CollectiveCall:
    """The ranks that take part in one communication of a stream, in all of its groups."""

    def __init__(self, player: Player, position: int, matches: list[Match], where: Mapping[int, tuple[Player, int]]):
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
        own = [graph.nodes[self.position] for graph in self.player.stream.graphs]
        met: Iterable[Node]
        if len(self.distinct) == 1:
            met = map(self.distinct[0].nodes.__getitem__, self.ranks)
        else:
            met = (match.nodes[rank] for rank, match in zip(self.ranks, self.matches, strict=True))
        return all(map(is_, met, own))

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

    def behind(self) -> int:
        """The work on the longest way to what is sent, from what was last related to the sequential program."""
        if self.at_home:
            return self.player.behind(self.position)
        sent = {(id(self.where[r][0]), self._position(r, match)): r for match in self.distinct for r in match.group}
        return max(self.where[rank][0].behind(position) for (_, position), rank in sent.items())

    def operand(self, number: int, like: Tensor, only: set[int] | None = None) -> Value:
        """What the ranks of the call send, by lane of the call: all of them, or those that count. Count of other ranks
        may have another shape, if they are as large: memory is sent, so that they count in the shape of the own one."""
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
            value = self.shaped(_described(player.posted[position][number]), like)
            lanes = np.zeros(len(self.ranks), dtype=np.int64)
            present = np.zeros(len(self.ranks), dtype=np.int64)
            for rank in ranks:
                lanes[self.lane_of[rank]], present[self.lane_of[rank]] = self.where[rank][1], 1
            parts.append(spread(self.ops.table, value, lanes, present))
        return folded(self.ops.table, add(self.ops.table, parts)) if len(parts) > 1 else parts[0]

    def shaped(self, value: Value, like: Tensor) -> Value:
        shape = _described_shape(like, like.shape)
        sizes = [int(size) for size in value.shape if not isinstance(size, np.ndarray)]
        if len(sizes) < len(value.shape) or tuple(sizes) == shape or math.prod(sizes) != math.prod(shape):
            return value
        return self.ops.reshape(value, shape)

    def operand_of(self, place: int, groups: Groups, like: Tensor) -> Value:
        """What the members at one place of the groups send, on every lane. The others may send tensors of other sizes."""
        held = self.operand(0, like, {match.group[place] for match in self.distinct})
        return taken(self.ops.table, held, groups.members[groups.group, place])

    def groups(self) -> Groups:
        members = tuple(tuple(self.lane_of[r] for r in match.group) for match in self.distinct)
        known = self.player.interpreter.groups.get(members)
        if known is None:
            if len({len(lanes) for lanes in members}) > 1:
                raise Undescribed("groups of different sizes meet at one operation")
            known = self.player.interpreter.groups[members] = groups_of(np.array(members, dtype=np.int64))
        return known

    def require_arithmetic(self, node: Node) -> None:
        """Sums of booleans are disjunctions, those of few bits wrap around, and means of whole numbers are rounded: none of it
        is what the algebra does."""
        dtype, reduce = next(node.operands()).dtype, node.kwargs["reduce"]
        if dtype == "bool" and reduce not in ("max", "min"):
            raise Undescribed(f"a reduction of booleans by {reduce}")
        if reduce not in ("max", "min") and is_narrow(dtype):
            raise Undescribed(f"a reduction of {dtype} by {reduce}, which wraps around")
        if dtype.startswith("complex") and reduce == "product":
            raise Undescribed("a reduction of complex numbers by product")
        if reduce in ("avg", "premul_sum") and not dtype.startswith(("float", "bfloat", "complex")):
            raise Undescribed(f"a reduction of whole numbers by {reduce}")
        factors = {each.kwargs.get("factor") for match in self.distinct for each in match.nodes.values()}
        if len(factors) > 1:
            raise Undescribed("a sum in which each rank has a factor of its own")

    def own(self, value: Value) -> Value:
        """A result of the call as the stream's lanes see it."""
        if self.ranks == self.player.stream.ranks:
            return value
        return taken(self.ops.table, value, np.array([self.lane_of[r] for r in self.player.stream.ranks], dtype=np.int64))

    def results(self, node: Node) -> Sequence[Described]:
        meaning = MEANINGS[node.op]
        if not self.at_home or not _is_of_operands(node):
            return meaning(self, node)
        operands = [_described(value) for value in self.player.posted[self.position]]
        kwargs = tuple((name, word(arg)) for name, arg in node.kwargs.items() if name not in _IN_NO_RESULT)
        outputs = tuple((tensor.shape, tensor.dtype) for tensor in (*node.operands(), *node.outputs))
        what = node.op, kwargs, outputs, id(self.groups())
        return self.player.interpreter.memo.describe(what, operands, lambda: meaning(self, node)) or ()


MEANINGS: Meanings[Callable[[CollectiveCall, Node], list[Described]]] = Meanings()
_IN_NO_RESULT = {"group", "channel", "work", "strides"}  # arguments; the groups themselves are known


def _is_of_operands(node: Node) -> bool:
    """Whether the results are functions of what is sent, of the groups, and of the arguments alone; roots differ from group to
    group."""
    row = COLLECTIVES[node.op]
    return row.fills is not Count.NONE and not row.is_message and not row.rooted


def _described_shape(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A complex number is described as two."""
    return (*shape, 2) if tensor.dtype.startswith("complex") else shape


def spread(table: Table, value: Value, lanes: Lanes, present: Lanes) -> Value:
    """A value of other lanes, held by some of the lanes here and zero in the others."""
    return masked(table, taken(table, value, lanes), present)


def _described(value: Described) -> Value:
    if isinstance(value, Unknown):
        raise Undescribed(value.reason)
    return value


@MEANINGS.of("dist.all_reduce")
def _all_reduce(m: CollectiveCall, node: Node) -> list[Described]:
    m.require_arithmetic(node)
    return [m.own(semantics.reduced(m.ops, m.operand(0, node.outputs[0]), m.groups(), dict(node.kwargs)))]


@MEANINGS.of("dist.reduce")
def _reduce(m: CollectiveCall, node: Node) -> list[Described]:
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
    parts = [spread(m.ops.table, _described(total), lanes, there), spread(m.ops.table, scratch, lanes, 1 - there)]
    return [add(m.ops.table, parts)]


@MEANINGS.of("dist.all_gather_into_tensor")
def _all_gather_into_tensor(m: CollectiveCall, node: Node) -> list[Described]:
    sent = m.operand(0, next(node.operands()))
    return [m.own(semantics.gathered(m.ops, sent, m.groups(), node.outputs[0].shape))]


@MEANINGS.of("dist.all_gather")
def _all_gather(m: CollectiveCall, node: Node) -> list[Described]:
    groups = m.groups()
    held = [m.operand_of(place, groups, node.outputs[place]) for place in range(groups.size)]
    return [m.own(value) for value in held]


@MEANINGS.of("dist.reduce_scatter_tensor")
def _reduce_scatter_tensor(m: CollectiveCall, node: Node) -> list[Described]:
    m.require_arithmetic(node)
    groups = m.groups()
    total = semantics.reduced(m.ops, m.operand(0, next(node.operands())), groups, dict(node.kwargs))
    return [m.own(semantics.own_part(m.ops, total, groups, node.outputs[0].shape))]


def _stacked(m: CollectiveCall, like: Sequence[Tensor]) -> Value:
    """A list of equal tensors as one, along a new first dim."""
    rows = [m.operand(number, tensor) for number, tensor in enumerate(like)]
    return m.ops.concat([m.ops.reshape(row, (1, *row.shape)) for row in rows], 0)


@MEANINGS.of("dist.reduce_scatter")
def _reduce_scatter(m: CollectiveCall, node: Node) -> list[Described]:
    m.require_arithmetic(node)
    groups = m.groups()
    sent = list(node.operands())
    if len({tensor.shape for tensor in sent}) > 1:
        return [m.own(_reduced_unevenly(m, node, sent))]
    total = semantics.reduced(m.ops, _stacked(m, sent), groups, dict(node.kwargs))
    return [m.own(semantics.own_part(m.ops, total, groups, node.outputs[0].shape))]


def _reduced_unevenly(m: CollectiveCall, node: Node, sent: Sequence[Tensor]) -> Value:
    """The tensors of a list side by side, of which each member keeps the one at its place."""
    groups = m.groups()
    if len({tensor.shape[1:] for tensor in sent}) > 1 or any(not tensor.shape for tensor in sent):
        raise Undescribed("a reduce_scatter of tensors that differ in more than their length")
    joined = m.ops.concat([m.operand(number, tensor) for number, tensor in enumerate(sent)], 0)
    total = semantics.reduced(m.ops, joined, groups, dict(node.kwargs))
    ends = np.cumsum([0, *(tensor.shape[0] for tensor in sent)])
    kept = m.ops.cut(total, 0, collapse(ends[groups.place]), collapse(ends[groups.place + 1]))
    return folded(m.ops.table, kept)


@MEANINGS.of("dist.all_to_all")
def _all_to_all(m: CollectiveCall, node: Node) -> list[Described]:
    groups = m.groups()
    moved = semantics.exchanged(m.ops, _stacked(m, list(node.operands())), groups)
    parts = [m.ops.cut(moved, 0, n, n + 1) for n in range(groups.size)]
    return [m.own(m.ops.reshape(part, part.shape[1:])) for part in parts]


@MEANINGS.of("dist.all_to_all_single")
def _all_to_all_single(m: CollectiveCall, node: Node) -> list[Described]:
    nodes = [each for match in m.distinct for each in match.nodes.values()]
    splits: list[Any] = [each.kwargs.get(name) or () for each in nodes for name in ("input_splits", "output_splits")]
    if any(len(set(sizes)) > 1 for sizes in splits):
        return [m.own(_exchanged_unevenly(m))]
    own = next(node.operands())
    if len({each.shape for one in nodes for each in (*one.operands(), *one.outputs)}) == 1:
        return [m.own(semantics.exchanged(m.ops, m.operand(0, own), m.groups()))]
    flat = m.ops.reshape(m.operand(0, own), _described_shape(own, (own.numel,)))  # equal rows are equal parts of the memory
    return [m.shaped(m.own(semantics.exchanged(m.ops, flat, m.groups())), node.outputs[0])]


def _exchanged_unevenly(m: CollectiveCall) -> Value:
    """Member by member: a member gets from each other one the part that the other one has for it."""
    groups, parts = m.groups(), []
    tensors = [tensor for match in m.distinct for each in match.nodes.values() for tensor in (*each.operands(), *each.outputs)]
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        raise Undescribed("rows of different shapes are exchanged unevenly")
    for place in range(groups.size):
        sent = m.operand_of(place, groups, tensors[0])
        ends = np.zeros((2, len(m.ranks)), dtype=np.int64)
        for match in m.distinct:
            splits: Any = match.nodes[match.group[place]].kwargs.get("input_splits")
            sizes = splits or [m.ops.size(sent, 0) // groups.size] * groups.size
            for number, rank in enumerate(match.group):
                ends[:, m.lane_of[rank]] = sum(sizes[:number]), sum(sizes[: number + 1])
        parts.append(m.ops.cut(sent, 0, collapse(ends[0]), collapse(ends[1])))
    return folded(m.ops.table, m.ops.concat(parts, 0))


def _from_root(m: CollectiveCall) -> Lanes:
    """For each lane of the call, the lane of its root."""
    lanes = np.zeros(len(m.ranks), dtype=np.int64)
    for match in m.distinct:
        root: int = match.any_node.kwargs["root"]  # type: ignore[assignment]
        for rank in match.group:
            lanes[m.lane_of[rank]] = m.lane_of[root]
    return lanes


@MEANINGS.of("dist.broadcast")
def _broadcast(m: CollectiveCall, node: Node) -> list[Described]:
    roots = {int(match.any_node.kwargs["root"]) for match in m.distinct}  # type: ignore[arg-type]
    return [m.own(taken(m.ops.table, m.operand(0, node.outputs[0], roots), _from_root(m)))]


@MEANINGS.of("dist.gather")
def _gather(m: CollectiveCall, node: Node) -> list[Described]:
    return _all_gather(m, node)[: len(node.outputs)] if node.outputs else []


@MEANINGS.of("dist.scatter")
def _scatter(m: CollectiveCall, node: Node) -> list[Described]:
    groups = m.groups()
    stacked = taken(m.ops.table, _stacked(m, [node.outputs[0]] * groups.size), _from_root(m))
    return [m.own(semantics.own_part(m.ops, stacked, groups, node.outputs[0].shape))]


@MEANINGS.of("dist.send", "dist.recv")
def _message(m: CollectiveCall, node: Node) -> list[Described]:
    if node.op == "dist.send":
        return []
    senders = [match.group[0] for match in m.matches]
    sources: dict[tuple[int, int], list[int]] = {}
    for lane, rank in enumerate(senders):
        sources.setdefault((id(m.where[rank][0]), m._position(rank, m.matches[lane])), []).append(lane)
    parts = []
    for (_, position), lanes in sources.items():
        player = m.where[senders[lanes[0]]][0]
        value = m.shaped(_described(player.posted[position][0]), node.outputs[0])
        index = np.zeros(len(senders), dtype=np.int64)
        present = np.zeros(len(senders), dtype=np.int64)
        for lane in lanes:
            index[lane], present[lane] = m.where[senders[lane]][1], 1
        parts.append(spread(m.ops.table, value, index, present))
    return [folded(m.ops.table, add(m.ops.table, parts)) if len(parts) > 1 else parts[0]]


@MEANINGS.of("dist.barrier")
def _barrier(m: CollectiveCall, node: Node) -> list[Described]:
    return []
