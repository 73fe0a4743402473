"""The graph that every part of GraphGuard shares: values, nodes, constants, the mesh. No torch objects inside.

A graph is in static single assignment form. A value is defined once: as an input, as a constant, or as an output of a
node. Nothing is changed in place: an operator that writes to an argument yields the argument's new value as an output
(first the written arguments in schema order, then what else it returns).

Communication is explicit. The operators of the `dist` namespace carry the ranks of their group, and those that may
run in the background carry a work id that a later `dist.wait` names. docs/graph.md has one line on each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from graphguard.graph.cells import cell

if TYPE_CHECKING:
    from graphguard.graph.findings import Finding

SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "complex128": "c128", "complex64": "c64", "complex32": "c32",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8", "bool": "bool",
    "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2", "float8_e4m3fnuz": "f8e4m3z", "float8_e5m2fnuz": "f8e5m2z",
}  # fmt: skip
ITEM_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip


class Value:
    """One tensor of the program. Identity is the object; the id is its name in print and in files."""

    __slots__ = ("dtype", "id", "shape")

    def __init__(self, id: int, shape: tuple[int, ...], dtype: str):
        self.id, self.shape, self.dtype = id, shape, dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def type(self) -> str:
        return f"{SHORT_DTYPES.get(self.dtype, self.dtype)}[{', '.join(map(str, self.shape))}]"

    def __repr__(self) -> str:
        return f"%{self.id}"


class Symbol(NamedTuple):
    """An argument that names something of the framework: a dtype, a layout, a memory format."""

    kind: str
    name: str

    def __repr__(self) -> str:
        return self.name


class Source(NamedTuple):
    """Where in the user's files a node comes from, and from where the function there was called."""

    file: str
    line: int
    function: str = ""
    caller: Source | None = None

    @property
    def place(self) -> tuple[str, int]:
        return self.file, self.line

    def outwards(self) -> Iterator[Source]:
        """The line, the line that called its function, and so on, each in its own module."""
        source: Source | None = self
        while source is not None:
            yield source
            source = source.caller

    @property
    def module(self) -> str:
        """The path of the module that ran the line, as `named_modules` has it; empty where no module is known."""
        return ""

    def inside(self, module: str) -> Source:
        """The line, as it was run by a module."""
        if module == self.module:
            return self
        placed = InModule(*self) if module else Source(*self)
        if isinstance(placed, InModule):
            placed.path = module
        return placed

    @property
    def told(self) -> str:
        """With its module: `model.layers.2.mlp (tp.py:37)`."""
        return f"{self.module} ({self})" if self.module else str(self)

    def __str__(self) -> str:
        return f"{self.short_file}:{self.line}"

    @property
    def short_file(self) -> str:
        """The path below the working folder; for a file elsewhere, its folder and its name; for a cell, its number."""
        if (known := cell(self.file)) is not None or self.file.startswith("<"):
            return known or self.file
        relative = os.path.relpath(self.file) if self.file else ""
        return relative if not relative.startswith("..") else os.path.join(*self.file.split(os.sep)[-2:])


class InModule(Source):
    """A line that a module ran. It is equal to the line alone: what is done on one line is one thing, in all layers."""

    path: str = ""

    @property
    def module(self) -> str:
        return self.path


Arg: TypeAlias = Value | Symbol | bool | int | float | complex | str | tuple["Arg", ...] | None  # a recursive union


class Node:
    """One operation. `writes` names the arguments whose new values are the first outputs."""

    __slots__ = ("args", "backward", "kwargs", "op", "outputs", "source", "writes")

    def __init__(
        self,
        op: str,
        args: tuple[Arg, ...],
        kwargs: Mapping[str, Arg],
        outputs: tuple[Value, ...],
        source: Source | None = None,
        backward: bool = False,
        writes: tuple[str, ...] = (),
    ):
        self.op, self.args, self.kwargs, self.outputs = op, args, kwargs, outputs
        self.source, self.backward, self.writes = source, backward, writes

    @property
    def communicates(self) -> bool:
        return self.op.startswith("dist.")

    @property
    def module(self) -> str:
        """The path of the module whose operation it is; of a backward pass, whose gradient it computes."""
        return "" if self.source is None else self.source.module

    def operands(self) -> Iterator[Value]:
        """The values that the node reads, in order, with repetitions."""
        yield from values_in(self.args)
        if self.kwargs:
            yield from values_in(arg for name, arg in self.kwargs.items() if name != "group")  # which may be of very many ranks

    def __str__(self) -> str:
        call = ", ".join([*map(show, self.args), *(f"{k}={show(v)}" for k, v in self.kwargs.items())])
        outputs = ", ".join(f"{v}: {v.type}" for v in self.outputs)
        where = f"  # {self.source.told}{' backward' if self.backward else ''}" if self.source else ""
        return f"{outputs}{' = ' if outputs else ''}{self.op.removesuffix('.default')}({call}){where}"

    __repr__ = __str__


def is_unwritten(node: Node) -> bool:
    """Whether a node gives memory that nothing was written to, which holds no value yet."""
    return node.op.split(".")[1].removeprefix("new_").startswith("empty")


class Constant(NamedTuple):
    """The value of a tensor that does not depend on the inputs, as raw little-endian bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


MARKED = "mark"  # of a layout that a parameter's `tensor_model_parallel` mark says, not a DTensor


class Layout(NamedTuple):
    """How a rank's tensor stands for a larger one: the placements that a DTensor has on its own mesh, or what a mark says.

    A mark may not say which ranks share the tensor: `mesh_ranks` is then empty.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    placements: tuple[str, ...]
    by: str = "DTensor"


@dataclass(frozen=True)
class Mesh:
    """Named axes over the ranks, laid out row-major."""

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(axes: Mapping[str, int]) -> Mesh:
        return Mesh(tuple(axes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def coordinate(self, rank: int) -> dict[str, int]:
        coordinate = {}
        for name, size in reversed(self.axes):
            rank, coordinate[name] = divmod(rank, size)
        return {name: coordinate[name] for name in self.names}

    def rank_at(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a place; on an axis that is not named, the first."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def sub_grid(self, ranks: Sequence[int]) -> Mesh | None:
        """The mesh that some of the ranks form: for each axis, some of its positions. None if they do not."""
        if len(ranks) == self.size:
            return self
        coordinates = [self.coordinate(rank) for rank in ranks]
        grid = Mesh.of({name: len({each[name] for each in coordinates}) for name in self.names})
        return grid if grid.size == len(ranks) else None

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.axes)


@dataclass
class Graph:
    """A captured program: the sequential one (rank None), one rank's, or one rank's part of the input relation."""

    name: str
    inputs: dict[str, Value] = field(default_factory=dict)
    outputs: dict[str, Value | None] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[Value, Constant] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)  # of outputs that were DTensors
    input_layouts: dict[str, Layout] = field(default_factory=dict)  # of parameters that are DTensors, or marked as parts
    ties: dict[str, str] = field(default_factory=dict)  # other names of parameters, each with the input's
    states: dict[Value, str] = field(default_factory=dict)  # of the generators that random numbers are drawn from, before that
    mesh: Mesh | None = None
    rank: int | None = None
    assumptions: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    built: int = 0  # so many of the first nodes only built a module; they are dropped once the ranks are matched

    def values(self) -> Iterator[Value]:
        """Every value, each once, in the order of definition."""
        yield from self.inputs.values()
        yield from self.constants
        for node in self.nodes:
            yield from node.outputs

    def __str__(self) -> str:
        head = f"graph {self.name}" + (f" on {self.mesh}" if self.mesh else "")
        lines = [head]
        lines += [f"  input {name} = {v}: {v.type}{stands(self.input_layouts, name)}" for name, v in self.inputs.items()]
        lines += [f"  {v}: {v.type} = constant({preview(c)})" for v, c in self.constants.items()]
        lines += [f"  {node}" for node in self.nodes]
        lines += [f"  output {path} = {output}{stands(self.layouts, path)}" for path, output in self.outputs.items()]
        return "\n".join(lines)


def stands(layouts: Mapping[str, Layout], path: str) -> str:
    """A comment on the larger tensor that a rank's tensor is part of."""
    layout = layouts.get(path)
    return f"  # part of {layout.shape}: {', '.join(layout.placements)}" if layout else ""


def values_in(args: Iterable[object]) -> Iterator[Value]:
    for arg in args:
        if type(arg) is Value:
            yield arg
        elif type(arg) is tuple:
            yield from values_in(arg)


def show(arg: Arg) -> str:
    if type(arg) is tuple:
        return f"[{', '.join(map(show, arg))}]"
    return repr(arg)


def preview(constant: Constant, limit: int = 8) -> str:
    """The first elements of a constant, where its dtype is one that plain Python can read."""
    import struct

    codes = {"float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
             "uint8": "B", "bool": "?"}  # fmt: skip
    code = codes.get(constant.dtype)
    if code is None:
        return f"{len(constant.data)} bytes"
    count = min(limit, math.prod(constant.shape))
    items = struct.unpack_from(f"<{count}{code}", constant.data)
    shown = ", ".join(f"{x:.6g}" if isinstance(x, float) else str(x) for x in items)
    return f"[{shown}{', ...' if count < math.prod(constant.shape) else ''}]"
