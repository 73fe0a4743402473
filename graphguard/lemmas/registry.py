"""The table of lemmas. A row says what an operator computes, in operations that the engine describes exactly.

In-place, `out=` and `_foreach_` variants need no rows: they are derived from the plain operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from graphguard.engine.ops import Ops
from graphguard.engine.table import Table
from graphguard.engine.term import Undescribed, Value
from graphguard.ir import Node
from graphguard.ir import Value as Tensor

Describe = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    operator: str  # `aten.mm.default`
    kind: str  # the family
    definition: str  # one line for people
    conditions: str  # what has to hold, else the operator is opaque
    describe: Describe


_ROWS: dict[str, Row] = {}


def row(*operators: str, means: str, needs: str = "") -> Callable[[Describe], Describe]:
    """Register what operators mean. The function gets a Call and the operator's arguments, tensors as descriptions."""

    def register(describe: Describe) -> Describe:
        for operator in operators:
            if operator in _ROWS:
                raise ValueError(f"{operator} has two rows")
            kind = describe.__module__.rsplit(".", 1)[-1]
            _ROWS[operator] = Row(operator, kind, means, needs, describe)
        return describe

    return register


@cache
def _load() -> None:
    from graphguard.lemmas import (  # noqa: F401 - importing a family registers its rows
        attention,
        contraction,
        creation,
        index,
        loss,
        norm,
        pointwise,
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
        return self.node.outputs[0].shape

    def dtype(self, position: int) -> str:
        """The dtype of a tensor argument; of a number, the dtype that it has in torch."""
        arg = self.node.args[position]
        return arg.dtype if isinstance(arg, Tensor) else type(arg).__name__

    def is_whole(self, position: int) -> bool:
        """Whether an argument holds whole numbers."""
        return self.dtype(position).startswith(("int", "uint", "bool"))

    def value(self, operand: Any) -> Value:
        """A tensor argument, or a number as a tensor."""
        return operand if isinstance(operand, Value) else self.full((), operand)


def lookup(operator: str) -> Row | None:
    """The row of an operator, or of the plain operator that it is a variant of."""
    _load()
    found = _ROWS.get(operator) or _ROWS.get(plain_name(operator))
    if found is None and operator.endswith((".out", "_out")):
        base = operator.rsplit(".", 1)[0]
        found = next((_ROWS[name] for name in (f"{base}.default", f"{base}.Tensor") if name in _ROWS), None)
    return found


def plain_name(operator: str) -> str:
    """`aten.add_.Tensor` is `aten.add.Tensor`, `aten.add.out` is `aten.add.Tensor` or the like."""
    namespace, name, *overload = operator.split(".")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return ".".join([namespace, name, *overload])


def describe(table: Table, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The descriptions of a node's outputs; None if no row knows the operator."""
    if node.op.startswith("aten._foreach_"):
        return _foreach(table, node, args, kwargs)
    found = lookup(node.op)
    if found is None:
        return None
    kwargs.pop("out", None)  # only its memory counts
    result = found.describe(Call(table, node), *args, **kwargs)
    return result if isinstance(result, tuple) else (result,)


def _foreach(table: Table, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """`_foreach_add(xs, ys)` is add(x, y) for each pair."""
    namespace, name, overload = node.op.split(".")
    name = name.removeprefix("_foreach_").removesuffix("_")
    overload = {"List": "Tensor", "ScalarList": "Scalar", "Scalar": "Scalar", "Tensor": "Tensor"}.get(overload, "default")
    for candidate in (overload, "Tensor", "Scalar", "default", "Tensor_Scalar"):
        found = _ROWS.get(f"{namespace}.{name}.{candidate}")
        if found is not None:
            break
    else:
        return None
    lists = [arg for arg in args if isinstance(arg, (tuple, list))]
    if not lists or len({len(each) for each in lists}) != 1:
        raise Undescribed("a list operator with lists of different lengths")
    results = []
    for number in range(len(lists[0])):
        each = [arg[number] if isinstance(arg, (tuple, list)) else arg for arg in args]
        plain = Node(
            found.operator,
            tuple(arg[number] if isinstance(arg, tuple) else arg for arg in node.args),
            node.kwargs,
            (node.outputs[number],),
            node.source,
            node.backward,
        )
        result = found.describe(Call(table, plain), *each, **kwargs)
        results.append(result[0] if isinstance(result, tuple) else result)
    return tuple(results)
