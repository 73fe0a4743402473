"""The table of lemmas. A row says what an operator computes, in operations that the engine describes exactly.

In-place, `out=` and `_foreach_` variants need no rows: they are derived from the plain operator. A complex tensor is described
with one more dim of two, the real and the imaginary part; only rows that say so may see one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np

from graphguard.engine.lane import Lane, varies
from graphguard.engine.ops import Ops
from graphguard.engine.table import Table
from graphguard.engine.term import Undescribed, Value
from graphguard.ir import Node, values_in
from graphguard.ir import Value as Tensor
from graphguard.lemmas.dtypes import audited, fits, holds, in_words, is_narrow, signature

Describe = Callable[..., Any]
D = TypeVar("D", bound=Describe)


@dataclass(frozen=True)
class Row:
    operator: str  # `aten.mm.default`
    kind: str  # the family
    definition: str  # one line for people
    conditions: str  # what has to hold, else the operator is opaque
    describe: Describe
    complex: bool = False  # whether it may be asked about complex tensors
    draws: bool = False  # whether nothing is said of its results


_ROWS: dict[str, Row] = {}
# `out=` overloads whose names do not lead to the plain ones.
_OUT = {
    "aten.mean.out": "aten.mean.dim", "aten.sum.IntList_out": "aten.sum.dim_IntList", "aten.prod.int_out": "aten.prod.dim_int",
    "aten.max.out": "aten.maximum.default", "aten.min.out": "aten.minimum.default", "aten.any.out": "aten.any.dim",
    "aten.all.out": "aten.all.dim", "aten.div.out_mode": "aten.div.Tensor_mode",
    "aten.arange.start_out": "aten.arange.start_step",
    "aten.topk.values": "aten.topk.default", "aten.sort.values": "aten.sort.default", "aten.max.dim_max": "aten.max.dim",
    "aten.min.dim_min": "aten.min.dim", "aten.norm.out": "aten.norm.ScalarOpt_dim",
}  # fmt: skip


def row(*operators: str, means: str, needs: str = "", complex: bool = False, draws: bool = False) -> Callable[[D], D]:
    """Register what operators mean. The function gets a Call and the operator's arguments, tensors as descriptions."""

    def register(describe: D) -> D:
        for operator in operators:
            if operator in _ROWS:
                raise ValueError(f"{operator} has two rows")
            kind = describe.__module__.rsplit(".", 1)[-1]
            _ROWS[operator] = Row(operator, kind, means, needs, describe, complex, draws)
        return describe

    return register


@cache
def _load() -> None:
    from graphguard.lemmas import (  # noqa: F401 - importing a family registers its rows
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
        view,
    )


def rows() -> Iterable[Row]:
    """All rows, by name."""
    _load()
    return [_ROWS[operator] for operator in sorted(_ROWS)]


class Call(Ops):
    """One operation that is being described: the vocabulary, and what is known of its arguments and results."""

    def __init__(self, table: Table, node: Node):
        super().__init__(table)
        self.node = node

    @property
    def shape(self) -> tuple[int, ...]:
        return described_shape(self.node.outputs[0])

    @property
    def result_dtype(self) -> str:
        return self.node.outputs[0].dtype

    def dtype(self, position: int) -> str:
        """The dtype of a tensor argument; of a number, the dtype that it has in torch."""
        if position >= len(self.node.args):
            raise Undescribed(f"arguments by keyword, in {self.node.op}")
        arg = self.node.args[position]
        return arg.dtype if isinstance(arg, Tensor) else type(arg).__name__

    def rank(self, position: int = 0) -> int:
        """How many dims torch sees."""
        arg = self.node.args[position]
        return len(arg.shape) if isinstance(arg, Tensor) else 0

    def is_whole(self, position: int) -> bool:
        """Whether an argument holds whole numbers."""
        return is_whole(self.dtype(position))

    def is_complex(self, position: int = 0) -> bool:
        return self.dtype(position).startswith("complex")

    def value(self, operand: Any) -> Value:
        """A tensor argument, or a number as a tensor. Beside a tensor of few bits, a number is one of few bits, too."""
        if isinstance(operand, Value):
            return operand
        self.require_fits(operand)
        return self.full((), operand)

    def require_fits(self, number: Any) -> None:
        for tensor in self.node.operands():
            if not fits(number, tensor.dtype):
                raise Undescribed(f"a number that {tensor.dtype} does not have")

    def opaque(
        self, name: str, operands: Sequence[Value], parallel: int, shape: Sequence[int], parameters: tuple[Hashable, ...] = ()
    ) -> Value:
        """What an operator makes of whole numbers depends on their dtype; of floats it is a function of real numbers."""
        dtypes = tuple(tensor.dtype if is_whole(tensor.dtype) else "float" for tensor in self.node.operands())
        return super().opaque(name, operands, parallel, shape, (*parameters, dtypes))

    def full(self, shape: Sequence[Lane], number: Any) -> Value:
        if isinstance(number, complex):
            raise Undescribed("a complex number")
        return self.neg(super().full(shape, -number)) if _is_infinity(number) else super().full(shape, number)

    def choose(self, mask: Value, a: Any, b: Any) -> Value:
        """a where the mask is 1, b where it is 0. An infinity is added, not multiplied: 0 times infinity is nothing."""
        a, b = self.value(a), self.value(b)
        if self.is_minus_infinity(self.neg(a)):
            return self.neg(self.choose(mask, self.neg(a), self.neg(b)))
        if self.is_minus_infinity(self.neg(b)):
            return self.neg(self.choose(mask, self.neg(a), self.neg(b)))
        return super().choose(mask, a, b)

    def stored(self, number: Any, dtype: str) -> Any:
        """A number as a tensor of a dtype holds it."""
        if isinstance(number, (int, float)):
            if dtype == "bool":
                return int(bool(number))
            if is_whole(dtype):
                number = int(number) if math.isfinite(number) else number
        elif dtype == "bool" and varies(number):
            return (number != 0).astype(np.int64)
        if not fits(number, dtype):
            raise Undescribed(f"a number that {dtype} does not have")
        return number

    def cast(self, x: Value, before: str, after: str) -> Value:
        """What a change of dtype does to numbers, but for rounding to fewer bits."""
        if before == after:
            return x
        if before.startswith("complex") != after.startswith("complex"):
            raise Undescribed("a cast between real and complex numbers")
        if after == "bool":
            return self.compare("ne", x, self.zeros(()), whole=is_whole(before))
        if not is_whole(after) or holds(after, before) or self._is_known_to_fit(x, after):
            return x
        if not is_narrow(after):
            return x if is_whole(before) else self.fn("trunc", x)
        if is_whole(before):
            return self.fn("wrapped", x, parameters=(after,))
        return self.fn("narrowed", self.fn("trunc", x), parameters=(after,))  # of what it has no number for, C says nothing

    def _is_known_to_fit(self, x: Value, dtype: str) -> bool:
        from graphguard.lemmas.whole import span_of  # it builds on this module

        span = span_of(self.table, x)
        return span is not None and all(fits(end, dtype) for end in span)

    def to_dtype(self, x: Value, position: int, dtype: Any) -> Value:
        """An argument as an operator with a `dtype` reads it."""
        return x if dtype is None else self.cast(x, self.dtype(position), str(dtype))


def _is_infinity(number: Any) -> bool:
    return isinstance(number, float) and number == math.inf


def is_whole(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


def described_shape(tensor: Tensor) -> tuple[int, ...]:
    return (*tensor.shape, 2) if tensor.dtype.startswith("complex") else tensor.shape


def lookup(operator: str) -> Row | None:
    """The row of an operator, or of the plain operator that it is a variant of."""
    _load()
    if operator.startswith("aten._foreach_"):
        return _each(operator)
    return next((_ROWS[name] for name in _plain_names(operator) if name in _ROWS), None)


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
    return next((_ROWS[full] for each in candidates if (full := f"{namespace}.{name}.{each}") in _ROWS), None)


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


__all__ = ["Call", "Row", "describe", "described_shape", "is_whole", "lookup", "row", "rows", "values_in"]
