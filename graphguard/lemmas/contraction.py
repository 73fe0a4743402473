"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphguard.engine.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row


@row("aten.mm.default", means="mk, kn -> mn")
def mm(c: Call, a: Value, b: Value) -> Value:
    return c.einsum(["mk", "kn"], "mn", a, b)


@row("aten.bmm.default", means="bmk, bkn -> bmn")
def bmm(c: Call, a: Value, b: Value) -> Value:
    return c.einsum(["bmk", "bkn"], "bmn", a, b)


@row("aten.mv.default", means="mk, k -> m")
def mv(c: Call, a: Value, b: Value) -> Value:
    return c.einsum(["mk", "k"], "m", a, b)


@row("aten.dot.default", "aten.vdot.default", means="k, k -> ")
def dot(c: Call, a: Value, b: Value) -> Value:
    return c.einsum(["k", "k"], "", a, b)


@row("aten.addmm.default", means="beta x + alpha (mk, kn -> mn)")
def addmm(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return c.add(c.scale(x, beta), c.scale(c.einsum(["mk", "kn"], "mn", a, b), alpha))


@row("aten.baddbmm.default", means="beta x + alpha (bmk, bkn -> bmn)")
def baddbmm(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return c.add(c.scale(x, beta), c.scale(c.einsum(["bmk", "bkn"], "bmn", a, b), alpha))


@row("aten.addmv.default", means="beta x + alpha (mk, k -> m)")
def addmv(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return c.add(c.scale(x, beta), c.scale(c.einsum(["mk", "k"], "m", a, b), alpha))


@row("aten.addbmm.default", means="beta x + alpha (bmk, bkn -> mn)")
def addbmm(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return c.add(c.scale(x, beta), c.scale(c.einsum(["bmk", "bkn"], "mn", a, b), alpha))


@row("aten.addr.default", means="beta x + alpha (m, n -> mn)")
def addr(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return c.add(c.scale(x, beta), c.scale(c.einsum(["m", "n"], "mn", a, b), alpha))


def _patches(c: Call, x: Value, kernel: Sequence[int]) -> tuple[Value, str, str]:
    """x as [batch, channels, patches..., elements of a patch...], what is left over cut off; labels of both."""
    count = len(kernel)
    split: list[int] = []
    for place, size in enumerate(kernel):
        rows = c.size(x, 2 + place) // size
        x = c.cut(x, 2 + place, 0, rows * size)
        split += [rows, size]
    wide = c.reshape(x, [*x.shape[:2], *split])
    order = [0, 1, *range(2, 2 + 2 * count, 2), *range(3, 3 + 2 * count, 2)]
    return c.permute(wide, order), "pqr"[:count], "uvw"[:count]


def _require_patches(x: Value, w: Value, stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int) -> list[int]:
    kernel = [int(size) for size in w.shape[2:]]
    steps = [*stride] * len(kernel) if len(stride) == 1 else [*stride]
    if (
        transposed
        or groups != 1
        or any(padding)
        or kernel != steps
        or (any(d != 1 for d in dilation) and any(k > 1 for k in kernel))
    ):
        raise Undescribed("a convolution with windows that overlap")
    if len(x.shape) != len(w.shape):
        raise Undescribed("a convolution without a batch")
    return kernel


@row(
    "aten.convolution.default",
    means="a product with each patch",
    needs="patches beside each other: stride = kernel, no padding",
)
def convolution(
    c: Call,
    x: Value,
    w: Value,
    b: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    _: Any,
    groups: int,
) -> Value:
    kernel = _require_patches(x, w, stride, padding, dilation, transposed, groups)
    wide, places, inside = _patches(c, x, kernel)
    y = c.einsum([f"nc{places}{inside}", f"oc{inside}"], f"no{places}", wide, w)
    return y if b is None else c.add(y, c.reshape(b, [c.size(b, 0), *[1] * len(kernel)]))


@row("aten.convolution_backward.default", means="the gradients of a product with each patch",
     needs="patches beside each other: stride = kernel, no padding")  # fmt: skip
def convolution_backward(
    c: Call, g: Value, x: Value, w: Value, _bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, _: Any,
    groups: int, asked: Sequence[bool],
) -> tuple[Value | None, ...]:  # fmt: skip
    kernel = _require_patches(x, w, stride, padding, dilation, transposed, groups)
    wide, places, inside = _patches(c, x, kernel)
    dx = None
    if asked[0]:
        if any(c.size(x, 2 + place) % size for place, size in enumerate(kernel)):
            raise Undescribed("a convolution that leaves a margin out")
        rows = c.einsum([f"no{places}", f"oc{inside}"], f"nc{places}{inside}", g, w)
        count = len(kernel)
        order = [0, 1, *(2 + place + count * part for place in range(count) for part in (0, 1))]
        dx = c.reshape(c.permute(rows, order), x.shape)
    dw = c.einsum([f"no{places}", f"nc{places}{inside}"], f"oc{inside}", g, wide) if asked[1] else None
    db = c.sum(g, [0, *range(2, len(g.shape))]) if asked[2] else None
    return tuple(each for each in (dx, dw, db) if each is not None)
