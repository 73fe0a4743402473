"""Matrix products."""

from __future__ import annotations

from typing import Any

from graphguard.engine.term import Value
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


@row("aten.dot.default", means="k, k -> ")
def dot(c: Call, a: Value, b: Value) -> Value:
    return c.einsum(["k", "k"], "", a, b)


@row("aten.outer.default", "aten.ger.default", means="m, n -> mn")
def outer(c: Call, a: Value, b: Value) -> Value:
    return c.einsum(["m", "n"], "mn", a, b)


@row("aten.addmm.default", means="beta x + alpha (mk, kn -> mn)")
def addmm(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return c.add(c.scale(x, beta), c.scale(c.einsum(["mk", "kn"], "mn", a, b), alpha))


@row("aten.baddbmm.default", means="beta x + alpha (bmk, bkn -> bmn)")
def baddbmm(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return c.add(c.scale(x, beta), c.scale(c.einsum(["bmk", "bkn"], "bmn", a, b), alpha))


@row("aten.addmv.default", means="beta x + alpha (mk, k -> m)")
def addmv(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return c.add(c.scale(x, beta), c.scale(c.einsum(["mk", "k"], "m", a, b), alpha))


@row("aten.linear.default", means="...k, nk -> ...n, plus a bias")
def linear(c: Call, x: Value, w: Value, b: Value | None = None) -> Value:
    lead = "abcdefghij"[: len(x.shape) - 1]
    y = c.einsum([f"{lead}k", "nk"], f"{lead}n", x, w)
    return y if b is None else c.add(y, b)
