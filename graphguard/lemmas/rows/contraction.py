"""Matrix products."""

from __future__ import annotations

from typing import Any

from graphguard.engine.terms.term import Value
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


def _beside(c: Call, x: Value, beta: Any, product: Value) -> Value:
    """beta x + product. Torch does not read x where beta is 0: it may be memory that nothing was written to."""
    return product if isinstance(beta, (int, float)) and beta == 0 else c.add(c.scale(x, beta), product)


@row("aten.addmm.default", means="beta x + alpha (mk, kn -> mn)")
def addmm(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _beside(c, x, beta, c.scale(c.einsum(["mk", "kn"], "mn", a, b), alpha))


@row("aten.baddbmm.default", means="beta x + alpha (bmk, bkn -> bmn)")
def baddbmm(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _beside(c, x, beta, c.scale(c.einsum(["bmk", "bkn"], "bmn", a, b), alpha))


@row("aten.addmv.default", means="beta x + alpha (mk, k -> m)")
def addmv(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _beside(c, x, beta, c.scale(c.einsum(["mk", "k"], "m", a, b), alpha))


@row("aten.addbmm.default", means="beta x + alpha (bmk, bkn -> mn)")
def addbmm(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _beside(c, x, beta, c.scale(c.einsum(["bmk", "bkn"], "mn", a, b), alpha))


@row("aten.addr.default", means="beta x + alpha (m, n -> mn)")
def addr(c: Call, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _beside(c, x, beta, c.scale(c.einsum(["m", "n"], "mn", a, b), alpha))
