"""The table of lemmas: the rows of all families, which of them is meant by an operator, and how it is asked.

In-place, `out=` and `_foreach_` variants need no rows: they are derived from the plain operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from graphguard.engine.interpret import Lemmas, UserLemma
from graphguard.engine.store.table import Table
from graphguard.engine.terms.term import Undescribed
from graphguard.graph.ir import Node
from graphguard.lemmas.dtypes import audited, in_words, signature
from graphguard.lemmas.registry import ROWS, Call, Describe, Row
from graphguard.lemmas.rows import (  # noqa: F401 - importing a family registers its rows
    activation,
    arithmetic,
    attention,
    contraction,
    convolution,
    creation,
    imaginary,
    index,
    loss,
    mask,
    norm,
    optimizer,
    order,
    random,
    reduction,
    strided,
    view,
)

# `out=` overloads whose names do not lead to the plain ones.
_OUT = {
    "aten.mean.out": "aten.mean.dim", "aten.sum.IntList_out": "aten.sum.dim_IntList", "aten.prod.int_out": "aten.prod.dim_int",
    "aten.max.out": "aten.maximum.default", "aten.min.out": "aten.minimum.default", "aten.any.out": "aten.any.dim",
    "aten.all.out": "aten.all.dim", "aten.div.out_mode": "aten.div.Tensor_mode",
    "aten.arange.start_out": "aten.arange.start_step",
    "aten.topk.values": "aten.topk.default", "aten.sort.values": "aten.sort.default", "aten.max.dim_max": "aten.max.dim",
    "aten.min.dim_min": "aten.min.dim", "aten.norm.out": "aten.norm.ScalarOpt_dim",
}  # fmt: skip


def all_lemmas(own: Mapping[str, UserLemma] | None = None) -> Lemmas:
    """What a proof is handed: the rows, and the user's own."""
    return Lemmas(describe, own or {})


def rows() -> Iterable[Row]:
    """All rows, by name."""
    return [ROWS[operator] for operator in sorted(ROWS)]


def lookup(operator: str) -> Row | None:
    """The row of an operator, or of the plain operator that it is a variant of."""
    if operator.startswith("aten._foreach_"):
        return _each(operator)
    return next((ROWS[name] for name in _plain_names(operator) if name in ROWS), None)


def _plain_names(operator: str) -> Iterable[str]:
    """`aten.add_.Tensor` is `aten.add.Tensor`, `aten.add.out` is `aten.add.Tensor` or the like."""
    yield operator
    if operator in _OUT:
        yield _OUT[operator]
    parts = operator.split(".")
    if len(parts) != 3:
        return
    namespace, name, overload = parts
    if name.endswith("_") and not name.endswith("__"):
        yield f"{namespace}.{name[:-1]}.{overload}"
    if overload.endswith("_out"):
        yield f"{namespace}.{name}.{overload.removesuffix('_out')}"
    if overload == "out":
        yield f"{namespace}.{name}.default"
        yield f"{namespace}.{name}.Tensor"


def _each(operator: str) -> Row | None:
    """The row that a list operator applies to each element of its lists."""
    namespace, name, overload = operator.split(".")
    name = name.removeprefix("_foreach_").removesuffix("_")
    candidates = {
        "List": ("Tensor", "default", "Tensor_Tensor"),
        "Scalar": ("Scalar", "default", "Tensor_Scalar"),
        "ScalarList": ("Scalar", "default", "Tensor_Scalar"),
        "ScalarAndTensor": ("Scalar",),
        "Tensor": ("Tensor", "default"),
        "default": ("default",),
    }.get(overload, ())
    return next((ROWS[full] for each in candidates if (full := f"{namespace}.{name}.{each}") in ROWS), None)


_UNGUARDED: list[None] = []


@contextmanager
def unguarded() -> Iterator[None]:
    """Rows are asked about all dtypes: for the audit, which finds out what they may be asked about."""
    _UNGUARDED.append(None)
    try:
        yield
    finally:
        _UNGUARDED.pop()


@cache
def _signature(describe: Describe) -> inspect.Signature:
    return inspect.signature(describe)


def describe(table: Table, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The descriptions of a node's outputs; None if no row knows the operator."""
    found = lookup(node.op)
    if found is None:
        return None
    if node.op.startswith("aten._foreach_"):
        return _describe_each(found, table, node, args, kwargs)
    written = {name.split(".")[0] for name in node.writes}  # `out.1` is an element of the list `out`
    for name in [name for name in kwargs if name in written and name not in _signature(found.describe).parameters]:
        del kwargs[name]  # of an `out=` tensor only the memory counts
    result = _described(found, table, node, args, kwargs, node.op)
    return result if isinstance(result, tuple) else (result,)


def _described(found: Row, table: Table, node: Node, args: Sequence[Any], kwargs: dict[str, Any], op: str) -> Any:
    """The one place where rows are asked, and where it is seen to it that they may be."""
    if not found.complex and any(v.dtype.startswith("complex") for v in (*node.operands(), *node.outputs)):
        raise Undescribed(f"{node.op} of complex numbers")
    if not found.draws and not _UNGUARDED:
        called = signature(found.operator, node, op)
        if called not in audited().get(found.operator, ()):
            raise Undescribed(f"{op}, {in_words(called)}, for which its lemma is not audited")
    call = Call(table, node)
    try:
        _signature(found.describe).bind(call, *args, **kwargs)
    except TypeError:
        raise Undescribed(f"{node.op} with arguments that its lemma does not know") from None
    return found.describe(call, *args, **kwargs)


def _describe_each(found: Row, table: Table, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """`_foreach_add(xs, ys)` is add(x, y) for each pair."""
    lengths = {len(arg) for arg in args if isinstance(arg, tuple)}
    if len(lengths) != 1:
        raise Undescribed("a list operator with lists of different lengths")
    results = []
    for number in range(lengths.pop()):
        plain = Node(
            found.operator,
            tuple(arg[number] if isinstance(arg, tuple) else arg for arg in node.args),
            node.kwargs,
            (node.outputs[number],),
            node.source,
            node.backward,
        )
        each = [arg[number] if isinstance(arg, tuple) else arg for arg in args]
        result = _described(found, table, plain, each, kwargs, node.op)
        results.append(result[0] if isinstance(result, tuple) else result)
    return tuple(results)
