"""A communication of described ranks: who takes part, what each sends, and what each gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from graphguard.engine.algebra.sums import folded
from graphguard.engine.algebra.value import add, masked, taken
from graphguard.engine.ranks import semantics
from graphguard.engine.ranks.collective import Groups, groups_of
from graphguard.engine.store.memo import Memo, word
from graphguard.engine.store.table import Table
from graphguard.engine.tensors.ops import Ops
from graphguard.engine.terms.lane import Lanes, collapse
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.engine.terms.unknown import Described, Unknown
from graphguard.graph.collectives import COLLECTIVES, Count, Meanings
from graphguard.graph.dtypes import is_narrow
from graphguard.graph.ir import Node
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.rank_class import numbers_in
from graphguard.graph.world import Meeting, Messages, Place, World

Members = np.ndarray[Any, np.dtype[Any]]  # ranks, a row for each group


class Interpreter(Protocol):
    """Who describes the ranks."""

    ops: Ops
    memo: Memo
    groups: dict[int, tuple[Members, Groups]]

    def unwritten(self, shape: Sequence[int], lanes: int) -> Value: ...


class Player(Protocol):
    """A class while it is described."""

    posted: dict[int, list[Described]]  # what each communication sends, by position

    @property
    def interpreter(self) -> Interpreter: ...

    def behind(self, position: int) -> int: ...


class CollectiveCall:
    """One communication of a class. The lanes of the call are the members of all of its groups, in order; of messages, they
    are those of the class."""

    def __init__(self, world: World, place: Place, players: Sequence[Player]):
        self.world, self.place, self.players = world, place, players
        self.call, self.held = world.calls[place], world.classes[place[0]]
        self.interpreter = players[place[0]].interpreter
        self.ops = self.interpreter.ops

    @cached_property
    def meeting(self) -> Meeting:
        assert isinstance(self.call, Meeting)
        return self.call

    @cached_property
    def ranks(self) -> Members:
        return np.sort(self.meeting.members, axis=None)

    @cached_property
    def at_home(self) -> bool:
        """Whether the class meets itself alone, all of it."""
        return (
            self.call.places == (self.place,) and isinstance(self.call, Meeting) and self.call.members.size == self.held.lanes
        )

    def complete(self) -> bool:
        """Whether all that is sent has been described. Of a message, only the sender counts."""
        if self.world.node(self.place).op == "dist.send":
            return True
        return self.at_home or all(position in self.players[number].posted for number, position in self.call.places)

    def behind(self) -> int:
        """The work on the longest way to what is sent, from what was last related to the sequential program."""
        return max(self.players[number].behind(position) for number, position in {self.place, *self.call.places})

    def nodes(self) -> list[Node]:
        """The operations that meet, one for each class."""
        return [self.world.node(place) for place in self.meeting.places]

    def numbers(self, arg: Callable[[Node], Any]) -> Members:
        """By lane of the call, a number that each rank's operation has."""
        found = np.empty(self.world.mesh.size, dtype=np.int64)
        for place in self.meeting.places:
            held = self.world.classes[place[0]]
            found[held.ranks] = numbers_in(arg(self.world.node(place)), held.lanes)
        return found[self.ranks]

    def lane_of(self, ranks: Members) -> Members:
        return np.searchsorted(self.ranks, ranks)

    def operand(self, number: int, like: Tensor, only: Members | None = None) -> Value:
        """What the ranks of the call send, by lane of the call: all of them, or those that count. What other ranks send may
        have another shape, if it is as large: memory is sent, so that it counts in the shape of the own one."""
        if self.at_home:
            return _described(self.players[self.place[0]].posted[self.place[1]][number])
        counting = self.ranks if only is None else np.sort(only)
        class_of = self.world.class_of[counting]
        position_of = dict(self.meeting.places)
        parts = []
        for other in dict.fromkeys(class_of.tolist()):
            sent = self.players[other].posted[position_of[other]]
            if number >= len(sent):
                continue  # a rank that sends nothing
            ranks = counting[class_of == other]
            here = self.lane_of(ranks)
            lanes, present = np.zeros(len(self.ranks), dtype=np.int64), np.zeros(len(self.ranks), dtype=np.int64)
            lanes[here], present[here] = self.world.lane_of[ranks], 1
            parts.append(spread(self.ops.table, self.shaped(_described(sent[number]), like), lanes, present))
        return folded(self.ops.table, add(self.ops.table, parts)) if len(parts) > 1 else parts[0]

    def shaped(self, value: Value, like: Tensor) -> Value:
        shape = _described_shape(like, like.shape)
        sizes = [int(size) for size in value.shape if not isinstance(size, np.ndarray)]
        if len(sizes) < len(value.shape) or tuple(sizes) == shape or math.prod(sizes) != math.prod(shape):
            return value
        return self.ops.reshape(value, shape)

    def operand_of(self, place: int, groups: Groups, like: Tensor) -> Value:
        """What the members at one place of the groups send, on every lane. The others may send tensors of other sizes."""
        held = self.operand(0, like, self.meeting.members[:, place])
        return taken(self.ops.table, held, groups.members[groups.group, place])

    def groups(self) -> Groups:
        members = self.meeting.members
        known = self.interpreter.groups.get(id(members))
        if known is None:
            known = self.interpreter.groups[id(members)] = members, groups_of(self.lane_of(members))
        return known[1]

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
        if len({each.kwargs.get("factor") for each in self.nodes()}) > 1:
            raise Undescribed("a sum in which each rank has a factor of its own")

    def own(self, value: Value) -> Value:
        """A result of the call as the lanes of the class see it."""
        if np.array_equal(self.ranks, self.held.ranks):
            return value
        return taken(self.ops.table, value, self.lane_of(self.held.ranks))

    def results(self, node: Node) -> Sequence[Described]:
        meaning = MEANINGS[node.op]
        if not self.at_home or not _is_of_operands(node):
            return meaning(self, node)
        operands = [_described(value) for value in self.players[self.place[0]].posted[self.place[1]]]
        kwargs = tuple((name, word(arg)) for name, arg in node.kwargs.items() if name not in _IN_NO_RESULT)
        outputs = tuple((tensor.shape, tensor.dtype) for tensor in (*node.operands(), *node.outputs))
        what = node.op, kwargs, outputs, id(self.groups())
        return self.interpreter.memo.describe(what, operands, lambda: meaning(self, node)) or ()


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
    there = (numbers_in(node.kwargs["root"], m.held.lanes) == m.held.ranks).astype(np.int64)
    if not there.any():
        return [Unknown("after dist.reduce, only the root holds something that is promised", node)]
    (total,) = _all_reduce(m, node)
    if there.all():
        return [total]
    scratch = m.interpreter.unwritten(node.outputs[0].shape, m.held.lanes)
    lanes = np.arange(len(there), dtype=np.int64)
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
    nodes = m.nodes()
    splits: list[Any] = [each.kwargs.get(name) or () for each in nodes for name in ("input_splits", "output_splits")]
    if any(len(set(sizes)) > 1 for sizes in splits):
        return [m.own(_exchanged_unevenly(m))]
    try:
        return [_exchanged_evenly(m, node)]
    except Undescribed:  # parts of equal size, of a tensor in pieces that are not
        if m.ops.table.over("crossings", m.groups().size):
            raise
        return [m.own(_exchanged_unevenly(m))]


def _exchanged_evenly(m: CollectiveCall, node: Node) -> Described:
    nodes, own = m.nodes(), next(node.operands())
    if len({each.shape for one in nodes for each in (*one.operands(), *one.outputs)}) == 1:
        return m.own(semantics.exchanged(m.ops, m.operand(0, own), m.groups()))
    flat = m.ops.reshape(m.operand(0, own), _described_shape(own, (own.numel,)))  # equal rows are equal parts of the memory
    return m.shaped(m.own(semantics.exchanged(m.ops, flat, m.groups())), node.outputs[0])


def _exchanged_unevenly(m: CollectiveCall) -> Value:
    """Member by member: a member gets from each other one the part that the other one has for it."""
    groups, parts = m.groups(), []
    tensors = [tensor for each in m.nodes() for tensor in (*each.operands(), *each.outputs)]
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        raise Undescribed("rows of different shapes are exchanged unevenly")
    sizes = [
        m.numbers(partial(_split_at, place=place, ranks=groups.size)) for place in range(groups.size)
    ]  # by place of who gets it
    ends = np.cumsum([np.zeros_like(sizes[0]), *sizes], axis=0)
    for place in range(groups.size):
        sent, sender = m.operand_of(place, groups, tensors[0]), groups.members[groups.group, place]
        start, stop = ends[groups.place, sender], ends[groups.place + 1, sender]
        parts.append(m.ops.cut(sent, 0, collapse(start), collapse(stop)))
    return folded(m.ops.table, m.ops.concat(parts, 0))


def _split_at(node: Node, place: int, ranks: int) -> Any:
    splits: Any = node.kwargs.get("input_splits")
    return splits[place] if splits else next(node.operands()).shape[0] // ranks


def _from_root(m: CollectiveCall) -> Lanes:
    """For each lane of the call, the lane of its root."""
    return m.lane_of(m.numbers(lambda node: node.kwargs["root"]))


@MEANINGS.of("dist.broadcast")
def _broadcast(m: CollectiveCall, node: Node) -> list[Described]:
    roots = np.unique(m.numbers(lambda each: each.kwargs["root"]))
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
    assert isinstance(m.call, Messages)
    parts = []
    for (number, position), here, there in m.call.peers:
        value = m.shaped(_described(m.players[number].posted[position][0]), node.outputs[0])
        lanes, present = np.zeros(m.held.lanes, dtype=np.int64), np.zeros(m.held.lanes, dtype=np.int64)
        lanes[here], present[here] = there, 1
        parts.append(spread(m.ops.table, value, lanes, present))
    return [folded(m.ops.table, add(m.ops.table, parts)) if len(parts) > 1 else parts[0]]


@MEANINGS.of("dist.barrier")
def _barrier(m: CollectiveCall, node: Node) -> list[Described]:
    return []
