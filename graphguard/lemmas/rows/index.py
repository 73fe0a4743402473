"""Reading and writing at positions that are data: embeddings, gathers, scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphguard.engine.tensors.known_numbers import numbers_of, row_of
from graphguard.engine.terms.lane import equal
from graphguard.engine.terms.term import IDX, Undescribed, Value
from graphguard.lemmas.registry import Call, row
from graphguard.lemmas.rows.order import are_distinct, is_constant_along
from graphguard.lemmas.rows.positions import bounded, hot

LETTERS = "abcdefghijklmnop"
SHARED = "qrstuvwxyz"


@row("aten.embedding.default", means="Σ_v [ids = v] W[v]")
def embedding(c: Call, w: Value, ids: Value, *_: Any) -> Value:
    lead = LETTERS[: len(ids.shape)]
    return c.selected([f"{lead}y", "yz"], f"{lead}z", hot(c, ids, c.size(w, 0), len(ids.shape)), w)


@row("aten.embedding_dense_backward.default", means="Σ [ids = v] g, and 0 for the padding row", needs="no scaling by frequency")
def embedding_backward(c: Call, g: Value, ids: Value, rows: int, padding: int, scaled: bool) -> Value:
    if scaled:
        raise Undescribed("a gradient scaled by frequency")
    lead = LETTERS[: len(ids.shape)]
    grad = c.selected([f"{lead}y", f"{lead}z"], "yz", hot(c, ids, rows, len(ids.shape)), g)
    if padding >= 0:
        keep = c.compare("ne", c.arange(rows), c.full((rows,), padding), whole=True)
        grad = c.mul(grad, c.reshape(keep, [rows, 1]))
    return grad


def _shrunk(c: Call, x: Value, sizes: Sequence[Any], but: int | None = None) -> Value:
    """The first elements of each dim, as many as an index has."""
    for dim, size in enumerate(sizes):
        if dim != but and x.shape[dim] != size:
            x = c.cut(x, dim, 0, size)
    return x


@row("aten.gather.default", means="Σ_v [index = v] x[v] along a dim", complex=True)
def gather(c: Call, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if not x.shape:
        return c.expand(x, index.shape)
    if not index.shape:
        raise Undescribed("an index without dims")
    if 0 in index.shape:  # which may have other dims
        return c.zeros((*index.shape, 2) if c.is_complex() else index.shape)
    dim %= len(index.shape)
    labels, pair = LETTERS[: len(index.shape)], "y" if c.is_complex() else ""
    x = _shrunk(c, x, index.shape, dim)
    chosen = hot(c, index, c.size(x, dim), len(index.shape))
    return c.selected([labels[:dim] + "z" + labels[dim + 1 :] + pair, labels + "z"], labels + pair, x, chosen)


@row("aten.scatter_add.default", means="x + Σ [index = v] y along a dim")
def scatter_add(c: Call, x: Value, dim: int, index: Value, y: Value) -> Value:
    if not x.shape or not index.shape:
        raise Undescribed("a scatter without dims")
    dim %= len(x.shape)
    labels = LETTERS[: len(x.shape)]
    y = _shrunk(c, y, index.shape)
    if any(x.shape[d] != index.shape[d] for d in range(len(x.shape)) if d != dim):
        raise Undescribed("a scatter to a part of the rows")
    chosen = hot(c, index, c.size(x, dim), len(x.shape))
    return c.add(x, c.selected([labels, labels + "z"], labels[:dim] + "z" + labels[dim + 1 :], y, chosen))


@row("aten.scatter_reduce.two", means="x + Σ [index = v] y along a dim", needs="a sum, with what was there")
def scatter_reduce(c: Call, x: Value, dim: int, index: Value, y: Value, reduce: str, *, include_self: bool = True) -> Value:
    if reduce != "sum" or not include_self:
        raise Undescribed(f"a scatter by {reduce}")
    return scatter_add(c, x, dim, index, y)


@row("aten.scatter.src", "aten.scatter.value", means="x with elements replaced",
     needs="one element per row, or the positions that topk or sort found; else rows are opaque")  # fmt: skip
def scatter(c: Call, x: Value, dim: int, index: Value, y: Any) -> Value:
    if not x.shape or not index.shape:
        raise Undescribed("a scatter without dims")
    dim %= len(x.shape)
    if any(a != b for d, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if d != dim):
        raise Undescribed("a scatter to a part of the rows")
    if index.shape[dim] != 1:
        y = c.expand(c.full((), c.stored(y, c.result_dtype)), index.shape) if not isinstance(y, Value) else y
        return _scatter_several(c, x, dim, index, _shrunk(c, y, index.shape))
    chosen = hot(c, c.reshape(index, [*index.shape[:dim], *index.shape[dim + 1 :]]), c.size(x, dim), dim)
    if not isinstance(y, Value):
        return c.choose(chosen, c.stored(y, c.result_dtype), x)
    return c.choose(chosen, c.expand(_shrunk(c, y, index.shape), x.shape), x)


def _scatter_several(c: Call, x: Value, dim: int, index: Value, y: Value) -> Value:
    if are_distinct(c, index, dim):
        labels = LETTERS[: len(x.shape)]
        row_of = labels[:dim] + "z" + labels[dim + 1 :]
        chosen = hot(c, index, c.size(x, dim), len(x.shape))  # refuses positions that may lie outside
        everywhere = equal(index.shape[dim], c.size(x, dim))  # as many as there are, and all different: each of them once
        if everywhere and is_constant_along(y, dim):
            return y
        new = c.selected([labels, labels + "z"], row_of, y, chosen)
        return new if everywhere else c.add(c.sub(x, c.mul(x, c.selected([labels + "z"], row_of, chosen))), new)
    last = len(x.shape) - 1
    order = [*(d for d in range(last + 1) if d != dim), dim]
    rows = [c.permute(each, order) for each in (x, index, y)]
    found = c.opaque(c.node.op, rows, last, (c.size(x, dim),))
    return c.permute(found, [*range(dim), last, *range(dim, last)])


@row("aten.index_select.default", means="Σ_v [index = v] x[v] along a dim")
def index_select(c: Call, x: Value, dim: int, index: Value) -> Value:
    if not x.shape:
        return x
    dim %= len(x.shape)
    labels = LETTERS[: len(x.shape)]
    index = index if index.shape else c.reshape(index, [1])
    return c.selected([labels, "z" + labels[dim]], labels[:dim] + "z" + labels[dim + 1 :], x, hot(c, index, c.size(x, dim), 1))


@row("aten.index_add.default", means="x + alpha Σ [index = v] y along a dim")
def index_add(c: Call, x: Value, dim: int, index: Value, y: Value, *, alpha: Any = 1) -> Value:
    if not x.shape or not y.shape:
        raise Undescribed("an index without dims")
    dim %= len(x.shape)
    labels = LETTERS[: len(x.shape)]
    index = index if index.shape else c.reshape(index, [1])
    chosen = hot(c, index, c.size(x, dim), 1)
    total = c.selected([labels[:dim] + "z" + labels[dim + 1 :], "z" + labels[dim]], labels, y, chosen)
    return c.add(x, c.scale(total, alpha))


@row("aten.index_copy.default", means="x with rows replaced", needs="positions that differ from each other")
def index_copy(c: Call, x: Value, dim: int, index: Value, y: Value) -> Value:
    if not x.shape or not y.shape:
        raise Undescribed("an index without dims")
    dim %= len(x.shape)
    labels = LETTERS[: len(x.shape)]
    index = index if index.shape else c.reshape(index, [1])
    _require_distinct(c, index)
    chosen = hot(c, index, c.size(x, dim), 1)
    there = c.reshape(c.sum(chosen, [0]), [c.size(x, dim) if d == dim else 1 for d in range(len(x.shape))])
    new = c.selected([labels[:dim] + "z" + labels[dim + 1 :], "z" + labels[dim]], labels, y, chosen)
    return c.add(c.mul(x, c.negate(there)), new)


def _require_distinct(c: Call, *indices: Value) -> None:
    """Several elements at one position: which one is left is not known."""
    if not any(_is_distinct(c, index) for index in indices):
        raise Undescribed("a write to positions that are data")


def _is_distinct(c: Call, index: Value) -> bool:
    if all(c.size(index, dim) == 1 for dim in range(len(index.shape))):
        return True
    terms = index.terms
    if len(index.shape) != 1 or len(terms) != 1 or len(terms[0].factors) != 1 or terms[0].factors[0].atom is not IDX:
        return False
    (visible,) = terms[0].dims
    return not terms[0].summed and len(visible) == 1 and bool(dict(terms[0].factors[0].at[0].terms).get(visible[0]))


def _places(c: Call, indices: Sequence[Value | None]) -> list[int]:
    tensors: Any = c.node.args[1]
    places = [d for d, each in enumerate(indices) if each is not None]
    if any(tensors[d].dtype in ("bool", "uint8") for d in places):
        raise Undescribed("a selection by a mask, whose size depends on data")
    if not places or places != list(range(places[0], places[-1] + 1)):
        raise Undescribed("an index of dims that are not neighbours")
    return places


@row("aten.index.Tensor", "aten._unsafe_index.Tensor", means="Σ_v [i = v] x[v], over the dims that are indexed",
     needs="neighbouring dims; no masks; no negative positions")  # fmt: skip
def index(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    places = _places(c, indices)
    picked = c.broadcast(*(each for each in indices if each is not None))
    rank = len(picked[0].shape)
    labels, shared = LETTERS[: len(x.shape)], SHARED[:rank]
    hots = [hot(c, each, c.size(x, dim), rank, wraps=True) for dim, each in zip(places, picked, strict=True)]
    names = [labels, *(shared + labels[dim] for dim in places)]
    return c.selected(names, labels[: places[0]] + shared + labels[places[-1] + 1 :], x, *hots)


@row("aten.index_put.default", "aten._unsafe_index_put.default", means="x with elements replaced or added to",
     needs="a mask with one number, accumulation, or one position")  # fmt: skip
def index_put(c: Call, x: Value, indices: Sequence[Value | None], y: Value, accumulate: bool = False) -> Value:
    tensors: Any = c.node.args[1]
    if len(indices) == 1 and indices[0] is not None and tensors[0].dtype == "bool":
        return _masked_put(c, x, indices[0], y, accumulate)
    places = _places(c, indices)
    picked = c.broadcast(*(each for each in indices if each is not None))
    rank = len(picked[0].shape)
    if not accumulate:
        _require_distinct(c, *picked)
    shared, labels = SHARED[:rank], LETTERS[: len(x.shape)]
    before, after = labels[: places[0]], labels[places[-1] + 1 :]
    hots = [hot(c, each, c.size(x, dim), rank, wraps=True) for dim, each in zip(places, picked, strict=True)]
    names = [shared + labels[d] for d in places]
    y = c.expand(y, [*x.shape[: places[0]], *picked[0].shape, *x.shape[places[-1] + 1 :]])
    if not accumulate:
        change = c.sub(y, index(c, x, indices))
        if len(change.terms) < len(y.terms):  # x[i] -= c changes x by c there
            y, accumulate = change, True
    new = c.selected([before + shared + after, *names], labels, y, *hots)
    if accumulate:
        return c.add(x, new)
    there = c.selected(names, "".join(labels[d] for d in places), *hots)
    wide = c.reshape(there, [c.size(x, d) if d in places else 1 for d in range(len(x.shape))])
    return c.add(c.mul(x, c.negate(wide)), new)


def _masked_put(c: Call, x: Value, mask: Value, y: Value, accumulate: bool) -> Value:
    if accumulate or any(size != 1 for size in y.shape):
        raise Undescribed("a write of several elements by a mask")
    mask = c.reshape(mask, [*mask.shape, *[1] * (len(x.shape) - len(mask.shape))])
    return c.choose(c.expand(mask, x.shape), c.expand(c.reshape(y, [1] * len(x.shape)), x.shape), x)


@row("aten.bucketize.Tensor", "aten.searchsorted.Tensor", means="where each element belongs in a sorted row",
     needs="one whole row")  # fmt: skip
def bucketize(c: Call, first: Value, second: Value, *, out_int32: bool = False, right: bool = False, side: str | None = None,
              sorter: Value | None = None) -> Value:  # fmt: skip
    x, edges = (first, second) if "bucketize" in c.node.op else (second, first)
    if len(edges.shape) != 1 or sorter is not None:
        raise Undescribed("a search in several rows")
    known = numbers_of(c, [x, edges]) if len(x.shape) == 1 and x.shape[0] else None
    if known is not None and all((np.diff(row) >= 0).all() for row in known[1]):
        behind = "right" if right or side == "right" else "left"
        return row_of(c, [np.searchsorted(row, each, behind) for each, row in zip(*known, strict=True)])  # type: ignore[call-overload]
    wide = c.expand(c.reshape(edges, [*[1] * len(x.shape), *edges.shape]), [*x.shape, *edges.shape])
    found = c.opaque("bucketize", [x, wide], len(x.shape), (), (right or side == "right",))
    return bounded(c, found, 0, c.size(edges, 0) + 1)


@row("aten.repeat_interleave.Tensor", means="each position as often as its number says", needs="numbers that are known")
def repeat_interleave(c: Call, counts: Value, *, output_size: int | None = None) -> Value:
    known = numbers_of(c, [counts])
    if known is None or not c.shape[0]:
        raise Undescribed("positions that are repeated as data says")
    return row_of(c, [np.repeat(np.arange(row.size), row) for row in known[0]])
