"""The graph of many ranks while it is made: where ranks differ, an argument is one number per rank, or one group per rank.

Output shapes come from torch's meta kernels, so that every node is a valid ATen call, which the oracle can execute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from graphguard.aten.operators import DTYPES, overload
from graphguard.capture.jax.mesh import Along, Places
from graphguard.errors import CaptureError, first_line
from graphguard.graph.ir import Constant, Graph, Mesh, Node, Source, Symbol, Value
from graphguard.graph.rank_class import Groups, Numbers, PerRank

_Type = tuple[tuple[int, ...], str]  # the shape and the dtype of a value
_SHAPES: dict[Any, tuple[_Type, ...]] = {}  # what calls give: the same in every graph


class Builder:
    """ranks: those that the graph is of; empty for a program without ranks."""

    def __init__(self, mesh: Mesh, ranks: Numbers):
        self.mesh, self.ranks = mesh, ranks
        self.places = Places(mesh)
        self.inputs: dict[str, Value] = {}
        self.outputs: dict[str, Value | None] = {}
        self.nodes: list[Node] = []
        self.constants: dict[Value, Constant] = {}
        self.assumptions: set[str] = set()
        self.source: Source | None = None
        self.backward = False
        self.made: dict[Value, Node] = {}  # by value, the node that gives it
        self._fixed: dict[Value, bool] = {}
        self._values = self._works = 0
        self._groups: dict[Along, tuple[Numbers, Groups]] = {}

    @property
    def is_sequential(self) -> bool:
        return not len(self.ranks)

    # ------------------------------------------------------------------ values
    def value(self, shape: Sequence[int], dtype: str) -> Value:
        self._values += 1
        return Value(self._values - 1, tuple(map(int, shape)), dtype)

    def input(self, name: str, shape: Sequence[int], dtype: str) -> Value:
        self.inputs[name] = self.value(shape, dtype)
        return self.inputs[name]

    def constant(self, array: np.ndarray[Any, Any]) -> Value:
        value = self.value(array.shape, str(array.dtype))
        self.constants[value] = Constant(value.dtype, value.shape, np.ascontiguousarray(array).tobytes())
        return value

    def is_fixed(self, value: Value) -> bool:
        """Whether no input decides a value."""
        if value not in self._fixed:
            node = self.made.get(value)
            fixed = value in self.constants if node is None else all(map(self.is_fixed, node.operands()))
            self._fixed[value] = fixed and (node is None or not node.communicates)
        return self._fixed[value]

    # ------------------------------------------------------------------ operations
    def aten(self, name: str, *args: Any, **kwargs: Any) -> Value:
        """One call of what gives one tensor. Lists are tuples, and a dtype is its name."""
        (output,) = self.several(name, *args, **kwargs)
        return output

    def several(self, name: str, *args: Any, **kwargs: Any) -> tuple[Value, ...]:
        """One call of what gives several tensors."""
        op = f"aten.{name}" if "." in name else f"aten.{name}.default"
        settled = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args)
        named = {key: Symbol("dtype", arg) if key == "dtype" else arg for key, arg in kwargs.items()}
        outputs = tuple(self.value(*each) for each in _types(op, settled, named))
        node = Node(op, settled, named, outputs, self.source, self.backward)
        self.nodes.append(node)
        self.made.update(dict.fromkeys(outputs, node))
        return outputs

    def collective(self, name: str, x: Value, shape: Sequence[int], along: Along, **kwargs: Any) -> Value:
        """A collective that reads one tensor and fills one, and the wait for it."""
        output = self.value(shape, x.dtype)
        work = self._start(name, (x,), (output,), {**kwargs, "group": self.groups(along)})
        self._wait(work)
        return output

    def exchange(self, x: Value, along: Along, target: Numbers | None, origin: Numbers | None) -> Value | None:
        """A message to one rank and one from another, both under way before either is waited for."""
        works, output = [], None
        shared = {"group": self.groups(along), "tag": 0}
        if target is not None:
            works.append(self._start("send", (x,), (), {"peer": per_rank(target), **shared}))
        if origin is not None:
            output = self.value(x.shape, x.dtype)
            works.append(self._start("recv", (), (output,), {"peer": per_rank(origin), **shared}))
        for work in works:
            self._wait(work)
        return output

    def _start(self, name: str, args: tuple[Value, ...], outputs: tuple[Value, ...], kwargs: Mapping[str, Any]) -> int:
        self._works += 1
        node = Node(f"dist.{name}", args, {**kwargs, "work": self._works}, outputs, self.source, self.backward)
        self.nodes.append(node)
        self.made.update(dict.fromkeys(outputs, node))
        return self._works

    def _wait(self, work: int) -> None:
        self.nodes.append(Node("dist.wait", (), {"work": work}, (), self.source, self.backward))

    # ------------------------------------------------------------------ ranks
    def groups(self, along: Along) -> Groups:
        """By rank, the group that it is in."""
        return self._placed(along)[1]

    def place_in(self, along: Along) -> Numbers:
        """By rank, its place in its group."""
        return self._placed(along)[0]

    def member(self, along: Along, places: Numbers) -> Numbers:
        """By rank, who has a place in its group."""
        groups = self.groups(along)
        return groups.members[groups.rows, places]

    def _placed(self, along: Along) -> tuple[Numbers, Groups]:
        if along not in self._groups:
            members = self.places.groups(along)
            rows, places = (np.empty(self.mesh.size, dtype=np.int64) for _ in range(2))
            rows[members] = np.arange(len(members))[:, None]
            places[members] = np.arange(members.shape[1])
            self._groups[along] = places[self.ranks], Groups(members, rows[self.ranks])
        return self._groups[along]

    # ------------------------------------------------------------------ graphs
    def graph(self) -> Graph:
        rank = None if self.is_sequential else int(self.ranks[0])
        return Graph(
            "sequential" if rank is None else f"rank {rank}",
            dict(self.inputs),
            dict(self.outputs),
            self.nodes,
            self.constants,
            mesh=None if rank is None else self.mesh,
            rank=rank,
            assumptions=tuple(sorted(self.assumptions)),
        )

    def relation(self) -> Graph:
        """Both programs take the same global arrays."""
        rank = int(self.ranks[0])
        inputs = {name: Value(place, value.shape, value.dtype) for place, (name, value) in enumerate(self.inputs.items())}
        return Graph(f"inputs of rank {rank}", inputs, dict(inputs), mesh=self.mesh, rank=rank)


def per_rank(numbers: Numbers) -> int | PerRank:
    """One number if all ranks have it."""
    return int(numbers[0]) if (numbers == numbers[0]).all() else PerRank(numbers)


# ---------------------------------------------------------------------- shapes
def _types(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Type, ...]:
    key = (op, _form(args), *((name, _form(arg)) for name, arg in kwargs.items()))
    if key not in _SHAPES:
        func = torch.ops.aten.reshape.default if op == "aten.view.default" else overload(op)
        device = {"device": "meta"} if any(each.name == "device" for each in func._schema.arguments) else {}
        try:
            made = func(*map(_meta, args), **{name: _meta(arg) for name, arg in kwargs.items()}, **device)
        except Exception as error:
            raise CaptureError(f"torch has no {op.removesuffix('.default')} of this: {first_line(error)}") from None
        tensors = made if isinstance(made, (tuple, list)) else [made]
        _SHAPES[key] = tuple((tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in tensors)
    return _SHAPES[key]


def _form(arg: Any) -> Any:
    if isinstance(arg, Value):
        return "%", arg.shape, arg.dtype
    if isinstance(arg, PerRank):
        return "#", arg.at(0)
    return tuple(map(_form, arg)) if isinstance(arg, tuple) else (type(arg).__name__, arg)


def _meta(arg: Any) -> Any:
    if isinstance(arg, Value):
        return torch.empty(arg.shape, dtype=DTYPES[arg.dtype], device="meta")
    if isinstance(arg, PerRank):
        return arg.at(0)
    if isinstance(arg, Symbol):
        return DTYPES[arg.name]
    return [_meta(each) for each in arg] if isinstance(arg, tuple) else arg
