"""Parameters of the ranks that are put together from several of the sequential module, or have another name there.

Their gradients go through the same map: what the map reads of the sequential parameters becomes one sequential output, the
elements of their gradients in a row, and each rank must hold of it what the map takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphguard.capture.torch.relation.inputs import Coordinate, chunk
from graphguard.errors import UsageError
from graphguard.graph.ir import Graph, Mesh, Node, Value
from graphguard.oracle.coverage import MOST_ELEMENTS

GRADIENTS = "grads."
Run = tuple[int, int]


@dataclass(frozen=True)
class Fused:
    """`n` equal parts along a dim, each of them sharded: the rows of queries, keys and values in one weight.

    axis: of the mesh, if it has several.
    """

    parts: int
    dim: int = 0
    axis: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parts, bool) or not isinstance(self.parts, int) or self.parts < 1:
            raise UsageError(f"gg.Fused({self.parts!r}): write the number of equal parts, as in gg.Fused(3)")

    def on(self, mesh: Mesh) -> Callable[[torch.Tensor, Coordinate], torch.Tensor]:
        """As `fn(full, coord)` for a mesh."""
        axis = mesh.names[0] if self.axis is None and len(mesh.names) == 1 else self.axis
        if axis not in mesh.names:
            raise UsageError(f"{self}: name its axis of the mesh, one of {list(mesh.names)}: gg.Fused({self.parts}, axis=...)")
        count = dict(mesh.axes)[axis]

        def fused(full: torch.Tensor, coord: Coordinate) -> torch.Tensor:
            if full.shape[self.dim] % self.parts:
                raise UsageError(f"{self}: dim {self.dim} of the shape {tuple(full.shape)} has no {self.parts} equal parts")
            pieces = full.chunk(self.parts, self.dim)
            return torch.cat([chunk(piece, self.dim, coord[axis], count) for piece in pieces], self.dim)

        fused.__name__ = str(self)
        return fused

    @property
    def code(self) -> str:
        """As the user writes it."""
        dim, axis = f", dim={self.dim}" if self.dim else "", f', axis="{self.axis}"' if self.axis is not None else ""
        return f"gg.Fused({self.parts}{dim}{axis})"

    def __str__(self) -> str:
        return f"Fused({self.parts})"


@dataclass(frozen=True)
class MadeParameter:
    """A parameter of the ranks that `make(all_params, coord)` makes of those of the sequential module.

    shapes: of the sequential parameters, by name. reads: those that it reads.
    """

    make: Callable[[Mapping[str, torch.Tensor], Coordinate], torch.Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    reads: tuple[str, ...]
    runs: tuple[Run, ...]

    def __str__(self) -> str:
        name = getattr(self.make, "__name__", type(self.make).__name__)
        return f"made by {name} of {', '.join(self.reads)}, as params= states"

    @property
    def total(self) -> int:
        return sum(math.prod(self.shapes[name]) for name in self.reads)

    def local(self, name: str, full: Mapping[str, torch.Tensor], coord: Coordinate) -> torch.Tensor:
        made: Any = self.make(full, dict(coord))
        if not isinstance(made, torch.Tensor):
            raise UsageError(f"params=: the function of {name!r} returned {type(made).__name__}, not a tensor")
        return made

    def of_row(self) -> Callable[[torch.Tensor, Coordinate], torch.Tensor]:
        """What the map takes of the elements that it reads, which are in a row: `fn(full, coord)`."""

        def taken(row: torch.Tensor, coord: Coordinate) -> torch.Tensor:
            pieces, end, begin = [], 0, 0
            for low, high in self.runs:
                pieces += [row.new_zeros(low - end), row[begin : begin + high - low]]
                end, begin = high, begin + high - low
            flat = torch.cat([*pieces, row.new_zeros(self.total - end)])
            return self.make(_split(flat, self.reads, self.shapes), dict(coord))

        taken.__name__ = getattr(self.make, "__name__", type(self.make).__name__)
        return taken

    def add_gradient(self, graph: Graph, path: str) -> bool:
        """Give the sequential program the gradients that the map reads as one output; False if it does not return them."""
        grads = [graph.outputs.get(GRADIENTS + name) for name in self.reads]
        values = [value for value in grads if value is not None]
        if not values:
            return False
        if len(values) != len(grads):
            without = next(name for name, value in zip(self.reads, grads, strict=True) if value is None)
            raise UsageError(
                f"params=: {path.removeprefix(GRADIENTS)} is made of {without}, which has no gradient, and of such as have"
            )
        rows = [_view(graph, value) for value in values]
        row = rows[0] if len(rows) == 1 else _joined(graph, rows)
        if self.runs != ((0, self.total),):
            cuts = [_slice(graph, row, run) for run in self.runs]
            row = cuts[0] if len(cuts) == 1 else _joined(graph, cuts)
        graph.outputs[path] = row
        return True


def made_parameter(name: str, make: Callable[..., Any], shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> MadeParameter:
    """Which parameters a map reads, and which elements of them on all ranks together."""
    known = _Watched({key: torch.empty(shape, device="meta") for key, shape in shapes.items()})
    places = [mesh.coordinate(rank) for rank in range(mesh.size)]
    for place in places:
        _called(name, make, known, place)
    reads = tuple(key for key in shapes if key in known.read)
    if not reads:
        raise UsageError(f"params=: the function of {name!r} reads no parameter of the sequential module")
    total = sum(math.prod(shapes[key]) for key in reads)
    if total * mesh.size > MOST_ELEMENTS:
        return MadeParameter(make, shapes, reads, ((0, total),))
    labels = torch.arange(1, total + 1, dtype=torch.float64, device="cpu")
    with torch.device("cpu"):
        seen = [_called(name, make, _split(labels, reads, shapes), place) for place in places]
    held = torch.zeros(total + 1, dtype=torch.bool, device="cpu")
    for each in seen:
        held[each.reshape(-1).to(torch.int64).clamp(0, total)] = True
    return MadeParameter(make, shapes, reads, tuple(_runs(held[1:].tolist())))


def require_all_read(made: Mapping[str, MadeParameter], named: Mapping[str, object]) -> None:
    """Of a parameter that maps read, some map must read every element: else its gradient is nowhere."""
    covered: dict[str, torch.Tensor] = {}
    for each in made.values():
        flat = torch.zeros(each.total, dtype=torch.bool, device="cpu")
        for low, high in each.runs:
            flat[low:high] = True
        for key, part in _split(flat, each.reads, each.shapes).items():
            covered[key] = covered.get(key, torch.zeros_like(part)) | part
    for key, part in covered.items():
        if key not in named and not bool(part.all()):
            place = (~part).nonzero()[0].tolist()
            raise UsageError(f"params=: no rank has {key}{place}; the functions of {', '.join(made)} leave it out")


class _Watched(dict[str, torch.Tensor]):
    """Notes which parameters are read."""

    def __init__(self, items: Mapping[str, torch.Tensor]):
        super().__init__(items)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> torch.Tensor:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def values(self) -> Any:
        self.read.update(self)
        return super().values()

    def items(self) -> Any:
        self.read.update(self)
        return super().items()


def _called(name: str, make: Callable[..., Any], full: Mapping[str, torch.Tensor], coord: Coordinate) -> torch.Tensor:
    try:
        made = make(full, dict(coord))
    except UsageError:
        raise
    except KeyError as error:
        raise UsageError(
            f"params=: the function of {name!r} reads {error.args[0]!r}, which the sequential module does not have; it has "
            f"{', '.join(full)}"
        ) from None
    except Exception as error:
        raise UsageError(f"params=: the function of {name!r} raised {type(error).__name__}: {error}") from None
    if not isinstance(made, torch.Tensor):
        raise UsageError(f"params=: the function of {name!r} returned {type(made).__name__}, not a tensor")
    return made


def _split(flat: torch.Tensor, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    parts = flat.split([math.prod(shapes[name]) for name in names])
    return {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}


def _runs(held: Sequence[bool]) -> Iterator[Run]:
    low = None
    for place, there in enumerate([*held, False]):
        if there and low is None:
            low = place
        elif not there and low is not None:
            yield low, place
            low = None


# ---------------------------------------------------------------------- nodes of the sequential program
def _new(graph: Graph, op: str, args: tuple[Any, ...], size: int, like: Value) -> Value:
    values = [value for node in graph.nodes for value in node.outputs]
    number = 1 + max(value.id for value in [*values, *graph.inputs.values(), *graph.constants])
    made = Value(number, (size,), like.dtype)
    source = next((node.source for node in graph.nodes if like in node.outputs), None)
    graph.nodes.append(Node(op, args, {}, (made,), source, backward=True))
    return made


def _view(graph: Graph, value: Value) -> Value:
    return _new(graph, "aten.view.default", (value, (value.numel,)), value.numel, value)


def _joined(graph: Graph, values: Sequence[Value]) -> Value:
    return _new(graph, "aten.cat.default", (tuple(values),), sum(value.numel for value in values), values[0])


def _slice(graph: Graph, value: Value, run: Run) -> Value:
    return _new(graph, "aten.slice.Tensor", (value, 0, *run, 1), run[1] - run[0], value)
