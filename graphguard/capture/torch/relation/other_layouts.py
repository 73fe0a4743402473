"""Other layouts than shapes suggest: a weight may be several in one, each of them sharded.

How many they may be is read off the sequential program, which takes what it computes with the weight apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from graphguard.capture.torch.program import PARAMETERS
from graphguard.capture.torch.relation.made_parameters import Fused
from graphguard.capture.torch.relation.parameters import Parameter, Parameters
from graphguard.graph.ir import Graph, Mesh, Node, Value
from graphguard.graph.operators import name_of
from graphguard.graph.placement import Shard

_AT_ONCE = 2  # kinds of modules whose layout is another one: an attention and an MLP
_STEPS = 8  # operations between a weight and where its result is taken apart
_TAKE_APART = {"split", "split_with_sizes", "unbind", "unsafe_split"}


Users = dict[Value, list[Node]]


class Guess(NamedTuple):
    """A shard that only shapes speak for. parts: into how many equal ones the program takes what it makes of it."""

    shape: tuple[int, ...]
    axis: str
    dim: int
    parts: frozenset[int]


def other_layouts(parameters: Parameters, sequential: Graph, mesh: Mesh) -> Iterator[dict[str, Fused]]:
    """As `params=` states them, for the same module of all layers; the simplest first."""
    kinds: dict[str, dict[str, list[Guess]]] = {}
    users = _users(sequential)
    for name, found in parameters.items():
        if isinstance(found, Parameter) and (guess := _guess(found, sequential, users)) is not None:
            pattern = ".".join("*" if part.isdigit() else part for part in name.removeprefix(PARAMETERS).split("."))
            kinds.setdefault(pattern.rpartition(".")[0], {}).setdefault(pattern, []).append(guess)
    choices = [
        (module, {pattern: _fused(parts, each[0], mesh) for pattern, each in guesses.items()})
        for module, guesses in kinds.items()
        for parts in sorted({parts for each in guesses.values() for guess in each for parts in guess.parts})
        if all(_has_parts(parts, guess, mesh) for each in guesses.values() for guess in each)
    ]
    for count in range(1, _AT_ONCE + 1):
        for chosen in combinations(choices, count):
            if len({module for module, _ in chosen}) == count:
                yield {pattern: fused for _, stated in chosen for pattern, fused in stated.items()}


def in_code(stated: Mapping[str, Fused]) -> str:
    """`params={"h.*.c_attn.weight": gg.Fused(3)}`."""
    entries = ", ".join(f'"{pattern}": {fused.code}' for pattern, fused in stated.items())
    return f"params={{{entries}}}"


def _guess(found: Parameter, sequential: Graph, users: Users) -> Guess | None:
    placement = found.input.placement
    if not found.guessed or not isinstance(placement, Mapping) or len(placement) != 1:
        return None
    ((axis, shard),) = placement.items()
    parts = _taken_apart(sequential.inputs[found.source], users)
    return Guess(tuple(found.input.shape), axis, shard.dim, parts) if isinstance(shard, Shard) else None


def _users(graph: Graph) -> Users:
    users: Users = {}
    for node in graph.nodes:
        for value in () if node.backward else node.operands():
            users.setdefault(value, []).append(node)
    return users


def _taken_apart(value: Value, users: Users) -> frozenset[int]:
    """Into how many equal parts what is made of a value is taken, a few operations later."""
    found: set[int] = set()
    reached, seen = [value], {value}
    for _ in range(_STEPS):
        after = [node for each in reached for node in users.get(each, ())]
        for node in after:
            if name_of(node.op) in _TAKE_APART and len({made.shape for made in node.outputs}) == 1:
                found.add(len(node.outputs))
        for each in reached:
            slices = [node for node in users.get(each, ()) if name_of(node.op) == "slice"]
            if len({node.outputs[0].shape for node in slices}) == 1 and slices[0].outputs[0].shape != each.shape:
                found.add(len(slices))
        reached = [made for node in after for made in node.outputs if made not in seen]
        seen.update(reached)
    return frozenset(found - {1})


def _has_parts(parts: int, guess: Guess, mesh: Mesh) -> bool:
    return guess.shape[guess.dim] % (parts * dict(mesh.axes)[guess.axis]) == 0


def _fused(parts: int, guess: Guess, mesh: Mesh) -> Fused:
    return Fused(parts, guess.dim, guess.axis if len(mesh.axes) > 1 else None)
