"""Rows, and how they are written. A row says what an operator computes, in operations that the engine describes exactly.

A complex tensor is described with one more dim of two, the real and the imaginary part; only rows that say so may see one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from graphguard.engine.store.table import Table
from graphguard.engine.tensors.ops import Ops
from graphguard.engine.terms.lane import Lane, varies
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.graph.dtypes import is_narrow
from graphguard.graph.ir import Node
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.operators import class_of
from graphguard.lemmas.dtypes import fits, holds
from graphguard.lemmas.spans import span_of

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

    @property
    def draws(self) -> bool:
        """Whether nothing is said of its results."""
        return class_of(self.operator) == "draws"


ROWS: dict[str, Row] = {}


def row(*operators: str, means: str, needs: str = "", complex: bool = False) -> Callable[[D], D]:
    """Register what operators mean. The function gets a Call and the operator's arguments, tensors as descriptions. Their
    class stands in `graph/operators.py`, where parts that know no lemmas find it."""

    def register(describe: D) -> D:
        for operator in operators:
            if operator in ROWS:
                raise ValueError(f"{operator} has two rows")
            if class_of(operator) is None:
                raise ValueError(f"{operator} has a row and no class: say in graph/operators.py which it is")
            kind = describe.__module__.rsplit(".", 1)[-1]
            ROWS[operator] = Row(operator, kind, means, needs, describe, complex)
        return describe

    return register


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
