"""Reading and writing at positions that are data: embeddings, gathers, scatters, masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphguard.engine.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row

LETTERS = "abcdefghijklmnop"


def declare(c: Call, index: Value, size: int) -> None:
    """What indexes a dim of the sequential program lies in it."""
    if not c.table.recording:
        return
    for term in index.terms:
        if len(index.terms) == 1 and len(term.factors) == 1 and term.coefficient == 1:
            c.table.declare(term.factors[0].atom, 0, size)


@row("aten.embedding.default", means="Σ_v [ids = v] W[v]")
def embedding(c: Call, w: Value, ids: Value, padding: int = -1, *_: Any) -> Value:
    declare(c, ids, c.size(w, 0))
    lead = LETTERS[: len(ids.shape)]
    return c.einsum([f"{lead}v", "vh"], f"{lead}h", c.one_hot(ids, c.size(w, 0), len(ids.shape)), w)


@row("aten.embedding_dense_backward.default", means="Σ [ids = v] g", needs="no padding row, no scaling by frequency")
def embedding_backward(c: Call, g: Value, ids: Value, rows: int, padding: int = -1, scaled: bool = False) -> Value:
    if scaled:
        raise Undescribed("a gradient scaled by frequency")
    lead = LETTERS[: len(ids.shape)]
    grad = c.einsum([f"{lead}v", f"{lead}h"], "vh", c.one_hot(ids, rows, len(ids.shape)), g)
    if padding >= 0:
        keep = c.compare("ne", c.arange(rows), c.full((rows,), padding), whole=True)
        grad = c.mul(grad, c.reshape(keep, [rows, 1]))
    return grad


@row("aten.gather.default", means="Σ_v [index = v] x[v] along a dim")
def gather(c: Call, x: Value, dim: int, index: Value, **_: Any) -> Value:
    if not x.shape:
        return x
    dim %= len(x.shape)
    declare(c, index, c.size(x, dim))
    for other in range(len(x.shape)):
        if other != dim and x.shape[other] != index.shape[other]:
            x = c.cut(x, other, 0, index.shape[other])
    labels = LETTERS[: len(x.shape)]
    hot = c.one_hot(index, c.size(x, dim), len(x.shape))
    return c.einsum([labels[:dim] + "z" + labels[dim + 1 :], labels + "z"], labels, x, hot)


@row("aten.scatter_add.default", means="x + Σ [index = v] y along a dim")
def scatter_add(c: Call, x: Value, dim: int, index: Value, y: Value) -> Value:
    dim %= len(x.shape)
    declare(c, index, c.size(x, dim))
    labels = LETTERS[: len(x.shape)]
    for other in range(len(x.shape)):
        if y.shape[other] != index.shape[other]:
            y = c.cut(y, other, 0, index.shape[other])
        if other != dim and x.shape[other] != index.shape[other]:
            raise Undescribed("a scatter to a part of the rows")
    hot = c.one_hot(index, c.size(x, dim), len(x.shape))
    return c.add(x, c.einsum([labels, labels + "z"], labels[:dim] + "z" + labels[dim + 1 :], y, hot))


@row("aten.scatter.src", "aten.scatter.value", means="x with elements replaced", needs="one element per row")
def scatter(c: Call, x: Value, dim: int, index: Value, y: Any) -> Value:
    dim %= len(x.shape)
    if index.shape[dim] != 1 or any(a != b for d, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if d != dim):
        raise Undescribed("a scatter of several elements per row")
    declare(c, index, c.size(x, dim))
    hot = c.one_hot(c.reshape(index, [*index.shape[:dim], *index.shape[dim + 1 :]]), c.size(x, dim), dim)
    return c.choose(hot, c.expand(y, x.shape) if isinstance(y, Value) else y, x)


@row("aten.index_select.default", means="Σ_v [index = v] x[v] along a dim")
def index_select(c: Call, x: Value, dim: int, index: Value) -> Value:
    dim %= len(x.shape)
    declare(c, index, c.size(x, dim))
    labels = LETTERS[: len(x.shape)]
    hot = c.one_hot(index, c.size(x, dim), 1)
    return c.einsum([labels, "z" + labels[dim]], labels[:dim] + "z" + labels[dim + 1 :], x, hot)


@row("aten.one_hot.default", means="[ids = v]")
def one_hot(c: Call, ids: Value, classes: int = -1) -> Value:
    declare(c, ids, c.shape[-1])
    return c.one_hot(ids, c.shape[-1], len(ids.shape))


@row("aten.index.Tensor", means="Σ_v [i = v] x[v], over the dims that are indexed", needs="neighbouring dims; no masks")
def index(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    places = [d for d, each in enumerate(indices) if each is not None]
    if any(c.node.args[1][d].dtype == "bool" for d in places):  # type: ignore[index, union-attr]
        raise Undescribed("a selection by a mask, whose size depends on data")
    if places != list(range(places[0], places[-1] + 1)):
        raise Undescribed("an index of dims that are not neighbours")
    picked = c.broadcast(*(each for each in indices if each is not None))
    rank = len(picked[0].shape)
    labels = LETTERS[: len(x.shape)]
    shared = "qrstuvwxyz"[:rank]
    hots = []
    for dim, each in zip(places, picked, strict=True):
        declare(c, each, c.size(x, dim))
        hots.append(c.one_hot(each, c.size(x, dim), rank))
    names = [labels, *(shared + labels[dim] for dim in places)]
    return c.einsum(names, labels[: places[0]] + shared + labels[places[-1] + 1 :], x, *hots)


@row("aten.index_put.default", "aten._unsafe_index_put.default", means="x with elements replaced or added to",
     needs="a mask with one number, or accumulation")  # fmt: skip
def index_put(c: Call, x: Value, indices: Sequence[Value | None], y: Value, accumulate: bool = False) -> Value:
    tensors = c.node.args[1]
    (first, *others) = indices
    if not others and first is not None and tensors[0].dtype == "bool":  # type: ignore[index, union-attr]
        if accumulate or any(size != 1 for size in y.shape):
            raise Undescribed("a write of several elements by a mask")
        mask = c.reshape(first, [*first.shape, *[1] * (len(x.shape) - len(first.shape))])
        return c.choose(c.expand(mask, x.shape), c.expand(c.reshape(y, [1] * len(x.shape)), x.shape), x)
    if not accumulate:
        raise Undescribed("a write to positions that are data")
    picked = c.broadcast(*(each for each in indices if each is not None))
    places = [d for d, each in enumerate(indices) if each is not None]
    if places != list(range(len(places))):
        raise Undescribed("a write to inner dims")
    rank = len(picked[0].shape)
    shared = "qrstuvwxyz"[:rank]
    labels = LETTERS[: len(x.shape)]
    rest = labels[len(places) :]
    hots = [c.one_hot(each, c.size(x, dim), rank) for dim, each in zip(places, picked, strict=True)]
    y = c.expand(y, [*picked[0].shape, *x.shape[len(places) :]])
    return c.add(x, c.einsum([shared + rest, *(shared + labels[d] for d in places)], labels, y, *hots))
