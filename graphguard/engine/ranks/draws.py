"""Which random numbers of the ranks stand for which of the sequential program.

What a random operator draws is a tensor of independent numbers; which ones does not matter, so a proof is for all of them. The
n-th draw of every rank stands for the n-th of the sequential program, if all draw equally often, by the same operators with the
same parameters. Where a rank's tensor has the whole shape, all ranks must have drawn it from a generator in one state. Where it
has a part of one dim, the ranks of different parts must have drawn from different states, and those of equal parts from one;
the parts are taken in the order of the mesh. No state may be used for two parts, or twice: the numbers would be the same ones.
Then the ranks' numbers, put together, are as good a draw as the sequential one, and they are described as its tiles.

Ranks that are described one by one may draw a whole tensor from different states, as they do where rank 0 then sends its own to
all: those of the first rank's state stand for the sequential draw, and each other state gives numbers that nothing is known of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from graphguard.engine.terms.lane import Lane, collapse
from graphguard.graph.ir import Graph, Mesh, Node
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.rank_class import Each
from graphguard.graph.world import World

# Operators whose elements are drawn one by one, all in the same way.
_ALIKE = {
    "aten.bernoulli_.float", "aten.bernoulli.p", "aten.native_dropout.default", "aten.rand.default", "aten.rand_like.default",
    "aten.randn.default", "aten.randn_like.default", "aten.uniform_.default", "aten.normal_.default",
}  # fmt: skip
_ZERO_OR_ONE = {"aten.bernoulli_.float", "aten.bernoulli.p", "aten.native_dropout.default"}


Number = int | tuple[int, int]
Part = tuple[Number, int]  # of which draw, and where it begins


class Tile(NamedTuple):
    """A part of the n-th draw, of all of it if dim is None. start: of a class of ranks, one number per lane.

    number: with a second one where a rank has numbers of its own, that stand for nothing."""

    number: Number
    whole: tuple[int, ...]
    dim: int | None = None
    start: Lane = 0


@dataclass
class Draws:
    """tiles: what each drawn tensor of both programs stands for. reasons: why one stands for nothing."""

    tiles: dict[Tensor, Tile] = field(default_factory=dict)
    reasons: dict[Tensor, str] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)


def is_mask(node: Node) -> bool:
    return node.op in _ZERO_OR_ONE


def drawn(node: Node) -> Tensor:
    """The tensor of a node that holds random numbers and nothing else."""
    return node.outputs[-1]


def matched(sequential: Graph, world: World) -> Draws:
    found = Draws()
    mine = _nodes(sequential)
    theirs = [_nodes(each.graph) for each in world.classes]
    if not mine or any([_call(node) for node in nodes] != [_call(node) for node in mine] for nodes in theirs):
        return found
    used: dict[str, Part] = {}  # by state
    for number, node in enumerate(mine):
        whole = drawn(node).shape
        found.tiles[drawn(node)] = Tile(number, whole)
        there = [drawn(nodes[number]) for nodes in theirs]
        states = _states(world, there)
        meant = _meant(world, number, whole, there, states)
        if isinstance(meant, str):
            found.reasons |= dict.fromkeys(there, meant)
            continue
        if any(used.setdefault(state, part) != part for state, part in zip(states, meant.parts, strict=True)):
            found.reasons |= dict.fromkeys(there, "random numbers that are drawn a second time from the same state")
            continue
        for each, tensor in zip(world.classes, there, strict=True):
            starts = np.array([meant.parts[rank][1] for rank in each.members], dtype=np.int64)
            found.tiles[tensor] = Tile(meant.parts[each.members[0]][0], whole, meant.dim, collapse(starts))
        found.assumptions.append(f"random numbers at {node.source} are any numbers: {meant.words}")
    return found


class _Meant(NamedTuple):
    """By rank, the number of the draw and where its part begins, along a dim; and that in words."""

    parts: list[Part]
    dim: int | None
    words: str


def _meant(world: World, number: int, whole: tuple[int, ...], there: Sequence[Tensor], states: Sequence[str]) -> _Meant | str:
    """What the ranks' numbers stand for; or why for nothing."""
    split = _split(world.mesh, whole, [tensor.shape for tensor in there], states)
    if not isinstance(split, str):
        axes, dim = split
        size = 0 if dim is None else there[0].shape[dim]
        words = f"each rank's are a part along {' and '.join(axes)}" if axes else "all ranks draw the same"
        return _Meant([(number, _place(world.mesh, rank, axes) * size) for rank in range(world.mesh.size)], dim, words)
    if not _may_differ(world, whole, there):
        return split
    kinds = list(dict.fromkeys(states))
    parts: list[Part] = [(number if state == states[0] else (number, kinds.index(state)), 0) for state in states]
    return _Meant(parts, None, "those of rank 0 are the sequential ones, and others are drawn apart")


def _may_differ(world: World, whole: tuple[int, ...], tensors: Sequence[Tensor]) -> bool:
    """Whether ranks may have whole tensors of their own: each is described by itself."""
    return all(each.lanes == 1 for each in world.classes) and all(tensor.shape == whole for tensor in tensors)


def _states(world: World, tensors: Sequence[Tensor]) -> list[str]:
    """By rank, the state that it draws from."""
    states = [""] * world.mesh.size
    for each, tensor in zip(world.classes, tensors, strict=True):
        held: Any = each.graph.states[tensor]
        for lane, rank in enumerate(each.members):
            states[rank] = held.at(lane) if isinstance(held, Each) else held
    return states


def _nodes(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.outputs and drawn(node) in graph.states]


def _call(node: Node) -> object:
    """What is drawn, but for the shape; nothing is like an operator whose elements are not alike."""
    if node.op not in _ALIKE:
        return object()
    if "rand" in node.op:
        return node.op  # no parameter but the shape says what is drawn
    named = [(name, arg) for name, arg in node.kwargs.items() if isinstance(arg, float | int)]
    return node.op, [arg for arg in node.args[1:] if isinstance(arg, float | int)], sorted(named)


def _split(
    mesh: Mesh, whole: tuple[int, ...], shapes: Sequence[tuple[int, ...]], states: Sequence[str]
) -> tuple[tuple[str, ...], int | None] | str:
    """The axes along which ranks have different parts, and of which dim; or why that is not so."""
    shape = shapes[0]
    if any(other != shape for other in shapes) or len(shape) != len(whole):
        return "random numbers in parts of different shapes"
    dims = [dim for dim, (a, b) in enumerate(zip(shape, whole, strict=True)) if a != b]
    axes = tuple(name for name in mesh.names if _varies(mesh, states, name))
    if not dims:
        return (axes, None) if not axes else f"random numbers that differ along {axes[0]}, of a tensor that is whole there"
    parts = whole[dims[0]] // max(shape[dims[0]], 1)
    if len(dims) > 1 or whole[dims[0]] % shape[dims[0]] or math.prod(dict(mesh.axes)[name] for name in axes) != parts:
        return "the same random numbers for different parts of a tensor" if not axes else "random numbers in other parts"
    by_place = {(_place(mesh, rank, axes), state) for rank, state in enumerate(states)}
    if len(by_place) != parts or len({state for _, state in by_place}) != parts:
        return "the same random numbers for different parts of a tensor"
    return axes, dims[0]


def _varies(mesh: Mesh, states: Sequence[str], axis: str) -> bool:
    """Whether ranks that differ in this axis alone have drawn from different states."""
    groups: dict[tuple[tuple[str, int], ...], set[str]] = {}
    for rank, state in enumerate(states):
        others = tuple((name, at) for name, at in mesh.coordinate(rank).items() if name != axis)
        groups.setdefault(others, set()).add(state)
    return any(len(group) > 1 for group in groups.values())


def _place(mesh: Mesh, rank: int, axes: Sequence[str]) -> int:
    place = 0
    for name in axes:
        place = place * dict(mesh.axes)[name] + mesh.coordinate(rank)[name]
    return place
