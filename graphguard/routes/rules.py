"""What each operator at known positions becomes. A rule answers None where it does not apply: the node then stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphguard.graph.ir import Node, Value
from graphguard.routes.builder import Box, Builder
from graphguard.routes.evaluated import Known
from graphguard.routes.positions import added, flat_places, grid_places, inside, picked, put

Results = Value | tuple[Value | None, ...] | None
Rule = Callable[..., Results]
RULES: dict[str, Rule] = {}


@dataclass(frozen=True)
class Site:
    """A node that may be replaced. raw: as it was recorded, whose operands are those that have data."""

    raw: Node
    known: Known
    build: Builder

    def data(self, place: int, name: str = "") -> torch.Tensor | None:
        """The numbers of an argument, if they are known and rest on data: positions alone have rows of their own."""
        value = self.raw.args[place] if place < len(self.raw.args) else self.raw.kwargs.get(name)
        return self.known.data(value) if type(value) is Value and self.known.rests_on_data(value) else None


def rule(*operators: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register


# ---------------------------------------------------------------------- reading
@rule("aten.index_select.default")
def index_select(site: Site, x: Value, dim: int, index: Value) -> Results:
    data = site.data(2)
    if data is None or not x.shape:
        return None
    dim %= len(x.shape)
    rows = inside(data, x.shape[dim])
    return None if rows is None else picked(site.build, x, dim, flat_places(rows))


@rule("aten.embedding.default")
def embedding(site: Site, table: Value, ids: Value, *_: Any) -> Results:
    data = site.data(1)
    rows = None if data is None else inside(data, table.shape[0])
    if rows is None:
        return None
    found = picked(site.build, table, 0, flat_places(rows))
    return site.build.view(found, (*ids.shape, table.shape[1]))


@rule("aten.gather.default")
def gather(site: Site, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Results:
    return _gathered(site, x, dim, site.data(2))


def _gathered(site: Site, x: Value, dim: int, data: torch.Tensor | None) -> Value | None:
    if data is None or not x.shape or not data.dim():
        return None
    dim %= len(x.shape)
    rows = inside(data, x.shape[dim])
    if rows is None or not rows.numel():
        return None

    def leaf(block: torch.Tensor, box: Box) -> Value:
        return picked(site.build, site.build.box(x, box), dim, flat_places(block))

    return site.build.in_blocks(rows, [d for d in range(rows.dim()) if d != dim], leaf)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(site: Site, x: Value, indices: Sequence[Value | None]) -> Results:
    found = _places(site, x)
    if found is None:
        return None
    first, shape, places = found
    rows = picked(site.build, x, first, places)
    return site.build.view(rows, (*x.shape[:first], *shape, *x.shape[first + places.shape[1] :]))


def _places(site: Site, x: Value) -> tuple[int, tuple[int, ...], torch.Tensor] | None:
    """The first indexed dim, the shape of the index, and the places. Masks are the places where they are true."""
    indices: Any = site.raw.args[1]
    chosen = [d for d, each in enumerate(indices) if each is not None]
    if not chosen or chosen != list(range(chosen[0], chosen[-1] + 1)):
        return None
    if not any(site.known.rests_on_data(indices[d]) for d in chosen):
        return None
    found: list[torch.Tensor] = []
    for each in indices[chosen[0] :]:
        data = site.known.data(each) if each is not None else None
        if data is None:
            if each is not None:
                return None
            continue
        spread = list(data.nonzero(as_tuple=True)) if data.dtype in (torch.bool, torch.uint8) else [data]
        for one in spread:
            rows = inside(one, x.shape[chosen[0] + len(found)], wraps=True)
            if rows is None:
                return None
            found.append(rows)
    shape = torch.broadcast_shapes(*(each.shape for each in found))
    return chosen[0], tuple(shape), grid_places(found, shape)


@rule("aten.masked_select.default")
def masked_select(site: Site, x: Value, mask: Value) -> Results:
    data = site.data(1)
    if data is None or not x.shape or data.shape != x.shape or data.dtype != torch.bool:
        return None
    return picked(site.build, x, 0, data.nonzero())


# ---------------------------------------------------------------------- writing
@rule("aten.index_add.default")
def index_add(site: Site, x: Value, dim: int, index: Value, y: Value, *, alpha: Any = 1) -> Results:
    data = site.data(2)
    if data is None or alpha != 1 or not x.shape or not y.shape:
        return None
    dim %= len(x.shape)
    rows = inside(data, x.shape[dim])
    return None if rows is None else added(site.build, x, dim, flat_places(rows), y)


@rule("aten.index_copy.default")
def index_copy(site: Site, x: Value, dim: int, index: Value, y: Value) -> Results:
    data = site.data(2)
    if data is None or not x.shape or not y.shape:
        return None
    dim %= len(x.shape)
    rows = inside(data, x.shape[dim])
    return None if rows is None else put(site.build, x, dim, flat_places(rows), y)


@rule("aten.index_put.default", "aten._unsafe_index_put.default", "aten._index_put_impl.default")
def index_put(site: Site, x: Value, indices: Sequence[Value | None], y: Value, accumulate: bool = False, *_: Any) -> Results:
    found = _places(site, x)
    if found is None:
        return None
    first, shape, places = found
    before, after = x.shape[:first], x.shape[first + places.shape[1] :]
    y = site.build.expand(y, (*before, *shape, *after))
    y = site.build.view(y, (*before, places.shape[0], *after))
    return (added if accumulate else put)(site.build, x, first, places, y)


@rule("aten.embedding_dense_backward.default")
def embedding_backward(site: Site, grad: Value, ids: Value, rows: int, padding: int, scaled: bool) -> Results:
    data = site.data(1)
    at = None if data is None else inside(data, rows)
    if at is None or scaled:
        return None
    build, width = site.build, grad.shape[-1]
    keep = (at.flatten() != padding).nonzero()
    flat = build.view(grad, (at.numel(), width))
    total = build.zeros((rows, width), grad.dtype)
    return added(build, total, 0, flat_places(at.flatten()[keep]), picked(build, flat, 0, keep))


@rule("aten.scatter_add.default")
def scatter_add(site: Site, x: Value, dim: int, index: Value, y: Value) -> Results:
    return _scattered(site, x, dim, y, added)


@rule("aten.scatter.src", "aten.scatter.value")
def scatter(site: Site, x: Value, dim: int, index: Value, y: Value | int | float) -> Results:
    if not isinstance(y, Value):
        y = site.build.full(index.shape, y, x.dtype)
    return _scattered(site, x, dim, y, put)


def _scattered(site: Site, x: Value, dim: int, y: Value, write: Callable[..., Value | None]) -> Results:
    """Block by block of the other dims; rows of x that the index has no rows for stay."""
    data, build = site.data(2), site.build
    if data is None or not x.shape or not data.dim():
        return None
    dim %= len(x.shape)
    at = inside(data, x.shape[dim])
    if at is None or x.dtype != y.dtype or (write is put and _is_twice(at, dim)):
        return None
    if not at.numel():
        return x

    def leaf(block: torch.Tensor, box: Box) -> Value:
        mine = build.cut(build.box(y, box), dim, 0, at.shape[dim])
        made = write(build, build.box(x, box), dim, flat_places(block), mine)
        assert made is not None
        return made

    others = [d for d in range(at.dim()) if d != dim]
    return _within(build, x, build.in_blocks(at, others, leaf), {d: (0, at.shape[d]) for d in others})


def _is_twice(at: torch.Tensor, dim: int) -> bool:
    """Whether two elements go to one place, so that which one is left is not known."""
    return bool((at.sort(dim).values.diff(dim=dim) == 0).any())


def _within(build: Builder, x: Value, part: Value, box: Box) -> Value:
    """x with a part of it replaced: the dims before are whole, those after are cut."""
    for done in range(len(box), 0, -1):
        dim, (low, high) = list(box.items())[done - 1]
        if (low, high) == (0, x.shape[dim]):
            continue
        rest = build.box(x, dict(list(box.items())[: done - 1]))
        part = build.joined([build.cut(rest, dim, 0, low), part, build.cut(rest, dim, high, x.shape[dim])], dim)
    return part


@rule("aten.masked_scatter.default")
def masked_scatter(site: Site, x: Value, mask: Value, y: Value) -> Results:
    data, build, shape = site.data(1), site.build, site.raw.outputs[0].shape
    if data is None or not shape or data.dtype != torch.bool:
        return None
    places = data.expand(shape).nonzero()
    if len(places) > y.numel:
        return None
    flat = build.view(y, (y.numel,))
    return put(build, build.expand(x, shape), 0, places, build.cut(flat, 0, 0, len(places)))


@rule("aten.masked_scatter_backward.default")
def masked_scatter_backward(site: Site, grad: Value, mask: Value, sizes: Sequence[int]) -> Results:
    data, build = site.data(1), site.build
    if data is None or not grad.shape or data.dtype != torch.bool:
        return None
    flat = picked(build, grad, 0, data.expand(grad.shape).nonzero())
    rest = site.raw.outputs[0].numel - flat.shape[0]
    return build.view(build.joined([flat, build.zeros((rest,), grad.dtype)], 0), site.raw.outputs[0].shape)


# ---------------------------------------------------------------------- choosing
@rule("aten.where.self")
def where(site: Site, mask: Value, a: Value, b: Value) -> Results:
    shape = site.raw.outputs[0].shape
    return _chosen(site, site.data(0), shape, _wide(site, a, shape), _wide(site, b, shape))


@rule("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(site: Site, x: Value, mask: Value, number: Any) -> Results:
    data, shape = site.data(1), site.raw.outputs[0].shape
    if isinstance(number, Value):
        return _chosen(site, data, shape, _wide(site, number, shape), _wide(site, x, shape))
    return _chosen(site, data, shape, lambda box: site.build.full(_sizes(box), number, x.dtype), _wide(site, x, shape))


def _wide(site: Site, x: Value, shape: Sequence[int]) -> Callable[[Box], Value] | None:
    """A tensor on a box of a larger shape, which it is broadcast to."""
    if x.dtype != site.raw.outputs[0].dtype:
        return None
    lead = len(shape) - len(x.shape)

    def on(box: Box) -> Value:
        here = {d - lead: span for d, span in box.items() if d >= lead and x.shape[d - lead] != 1}
        return site.build.expand(site.build.box(x, here), _sizes(box))

    return on


def _sizes(box: Box) -> list[int]:
    return [box[dim][1] - box[dim][0] for dim in sorted(box)]


def _chosen(site: Site, mask: torch.Tensor | None, shape: Sequence[int], yes: Any, no: Any) -> Results:
    if mask is None or mask.dtype != torch.bool or yes is None or no is None or 0 in shape:
        return None
    wide = mask.expand(tuple(shape))
    return site.build.in_blocks(wide, range(len(shape)), lambda block, box: (yes if block.item() else no)(box))


# ---------------------------------------------------------------------- choices that were made
@rule("aten.topk.default", "aten.sort.default", "aten.sort.stable", "aten.max.dim", "aten.min.dim", "aten.kthvalue.default",
      "aten.median.dim", "aten.mode.default", "aten.cummax.default", "aten.cummin.default")  # fmt: skip
def chosen(site: Site, x: Value, *args: Any, **kwargs: Any) -> Results:
    """Where the positions are known, the values are what is there."""
    values, positions = site.raw.outputs
    data = site.known.data(positions)
    if data is None or not x.shape:
        return None
    dim = _dim_of(site.raw, args, kwargs)
    kept = data if data.dim() == len(x.shape) else data.unsqueeze(dim)
    found = _gathered(site, x, dim, kept)
    return None if found is None else (site.build.view(found, values.shape), None)


def _dim_of(node: Node, args: Sequence[Any], kwargs: Any) -> int:
    place = {"aten.topk.default": 1, "aten.kthvalue.default": 1}.get(node.op, 0)
    dim: int = kwargs.get("dim", args[place] if place < len(args) else -1)
    return dim


# ---------------------------------------------------------------------- products in groups
@rule("aten._grouped_mm.default")
def grouped_mm(
    site: Site, a: Value, b: Value, offs: Value | None = None, bias: Value | None = None, out_dtype: Any = None
) -> Results:
    """A product for each group of rows, or, of two matrices, of the summed dim."""
    ends, build = site.data(2, "offs"), site.build
    if ends is None or bias is not None or site.raw.outputs[0].dtype != a.dtype or len(a.shape) != 2:
        return None
    spans = list(zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True))
    if not spans or a.dtype != b.dtype or (len(b.shape) == 3 and b.shape[0] != len(spans)):
        return None
    if any(low > high for low, high in spans) or spans[-1][1] > a.shape[0 if len(b.shape) == 3 else 1]:
        return None
    if len(b.shape) == 2:
        parts = [build.product(build.cut(a, 1, *span), build.cut(b, 0, *span)) for span in spans]
        return build.joined([build.view(each, (1, *each.shape)) for each in parts], 0)
    parts = [_of_group(build, a, b, number, *span) for number, span in enumerate(spans) if span[0] < span[1]]
    left = a.shape[0] - spans[-1][1]
    if left or not parts:  # rows that no group has are not written
        parts.append(build.empty((left, b.shape[2]), a.dtype))
    return build.joined(parts, 0)


def _of_group(build: Builder, a: Value, b: Value, number: int, low: int, high: int) -> Value:
    weight = build.view(build.cut(b, 0, number, number + 1), b.shape[1:])
    return build.product(build.cut(a, 0, low, high), weight)
