"""A whole number that may be another one on each rank, as a torch.SymInt.

There is no single number behind it. Code that needs one (a branch, `range`, a key, a size, a C function) has to ask the node,
which answers if all lanes agree, and splits the run if they do not.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx.experimental._constant_symnode import ConstantIntNode

from graphguard.capture.torch.lanes.run import Numbers, current

_LARGEST = 1 << 62
_TORCH = str(Path(torch.__file__).parent)


def varying(numbers: Numbers) -> Any:
    """An int where all lanes agree, else a SymInt."""
    run = current()
    return run.of_witness(numbers) if run.agree(numbers) else torch.SymInt(LaneNode(numbers))


def numbers_of(value: Any) -> Numbers:
    """The number of every lane, or the one number of all."""
    return _numbers(value.node) if type(value) is torch.SymInt else np.asarray(value, dtype=np.int64)


def varies(value: Any) -> bool:
    return type(value) is torch.SymInt and not current().agree(_numbers(value.node))


def settled(value: Any) -> Any:
    """A number on which all lanes agree by now is an int again."""
    return varying(_numbers(value.node)) if type(value) is torch.SymInt else value


def one_for_all(value: Any, what: str) -> Any:
    """A plain argument: lanes that have another one leave the run."""
    if type(value) is torch.SymBool:
        return bool(value)
    if type(value) is torch.SymInt:
        return current().forced(_numbers(value.node), what)
    if type(value) in (list, tuple):
        return type(value)(one_for_all(item, what) for item in value)
    return value


def has_lanes(args: Any) -> bool:
    return any(type(a) in (torch.SymInt, torch.SymBool) or (type(a) in (list, tuple) and has_lanes(a)) for a in args)


# ---------------------------------------------------------------------- what a SymInt asks
def _numbers(node: Any) -> Numbers:
    if isinstance(node, (LaneNode, LaneBool)):
        return node.numbers
    return np.asarray(node if isinstance(node, int) else node.maybe_as_int(), dtype=np.int64)


def _node(numbers: Numbers) -> Any:
    run = current()
    return ConstantIntNode(run.of_witness(numbers)) if run.agree(numbers) else LaneNode(numbers)


def _require_room(*sizes: float) -> None:
    if max(sizes, default=0.0) > _LARGEST:
        raise OverflowError("a number that varies with the rank is beyond 62 bits")


def _arithmetic(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: LaneNode, other: Any) -> Any:
        made = function(self.numbers, _numbers(other))
        _require_room(float(np.abs(made).max()))
        return _node(made)

    return method


def _product(a: Numbers, b: Numbers) -> Numbers:
    _require_room(float(np.abs(a).max()) * float(np.abs(b).max()))
    return a * b


def _quotient(function: Callable[[Any, Any], Any]) -> Callable[[Numbers, Numbers], Numbers]:
    def divide(a: Numbers, b: Numbers) -> Numbers:
        run = current()
        if not np.all(b) and run.forced(run.over_lanes(b == 0), "a division by zero"):
            raise ZeroDivisionError("integer division or modulo by zero")
        return function(a, np.where(b == 0, 1, b))  # type: ignore[no-any-return] # of lanes that have left

    return divide


def _comparison(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: LaneNode, other: Any) -> Any:
        return LaneBool(np.asarray(function(self.numbers, _numbers(other))))

    return method


class _Lanes:
    """What numbers and truth values of lanes have in common. No method gives one of them unless all lanes agree on it."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Numbers):
        self.numbers = numbers

    def _no(self) -> bool:
        return False

    def _nothing(self) -> None:
        return None

    def _yes(self) -> bool:
        return True

    is_float = is_nested_int = is_constant = _no
    is_symbolic = _yes
    singleton_int = maybe_as_int = maybe_as_bool = _nothing

    def clone(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def wrap_int(self, number: int) -> LaneNode:
        return LaneNode(np.asarray(number, dtype=np.int64))

    def wrap_bool(self, value: bool) -> LaneBool:
        return LaneBool(np.asarray(value))


class LaneNode(_Lanes):
    __slots__ = ()

    is_int, is_bool = _Lanes._yes, _Lanes._no

    def int_(self) -> int:
        return current().forced(self.numbers, "an int")

    def guard_int(self, file: str, line: int) -> int:
        return current().forced(self.numbers, "an int of a C function")

    def expect_size(self, file: str, line: int) -> bool:
        return bool(current().forced(self.numbers >= 0, "a size"))

    def _graph_repr(self) -> str:
        return f"{current().forced(self.numbers, 'a text')}"

    _str = str = _graph_repr

    add, sub, mul = _arithmetic(np.add), _arithmetic(np.subtract), _arithmetic(_product)
    floordiv = int_floordiv = _arithmetic(_quotient(np.floor_divide))
    mod = python_mod = _arithmetic(_quotient(np.mod))
    sym_min, sym_max = _arithmetic(np.minimum), _arithmetic(np.maximum)
    bitwise_and, bitwise_or, bitwise_xor = map(_arithmetic, (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
    eq, ne, lt, le, gt, ge = map(_comparison, (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal))

    def neg(self) -> Any:
        return _node(-self.numbers)

    def abs(self) -> Any:
        return _node(np.abs(self.numbers))

    def sym_sum(self, others: Any) -> Any:
        return _node(sum((_numbers(other) for other in others), np.asarray(0)))


class LaneBool(_Lanes):
    __slots__ = ()

    is_int, is_bool = _Lanes._no, _Lanes._yes

    def bool_(self) -> bool:
        return bool(current().forced(self.numbers, "a condition"))

    def guard_bool(self, file: str, line: int) -> bool:
        return self.bool_()

    expect_true = guard_or_false = guard_or_true = guard_size_oblivious = guard_bool

    def statically_known_true(self, file: str = "", line: int = 0) -> bool:
        """Asked for shortcuts only, which are taken where they hold in every lane."""
        return bool(self.numbers if self.numbers.ndim == 0 else self.numbers[current().active].all())

    def sym_ite(self, then: Any, otherwise: Any) -> Any:
        return _node(np.where(self.numbers, _numbers(then), _numbers(otherwise)))

    def _graph_repr(self) -> str:
        return f"{self.bool_()}"

    _str = str = _graph_repr

    def sym_not(self) -> LaneBool:
        return LaneBool(~self.numbers)

    def and_(self, other: Any) -> LaneBool:
        return LaneBool(np.asarray(self.numbers & other.numbers))

    def or_(self, other: Any) -> LaneBool:
        return LaneBool(np.asarray(self.numbers | other.numbers))

    sym_and, sym_or = and_, or_


# ---------------------------------------------------------------------- where torch.SymInt is not as an int is
def behave_as_ints() -> None:
    """Make numbers of lanes do all that ints do in Python. Patches torch for the rest of this process."""
    for name, method in _METHODS.items():
        setattr(torch.SymInt, name, method(getattr(torch.SymInt, name, None)))
    for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        for name in (f"__{op}__", f"__r{op}__"):
            _with_floats(name, op in ("truediv", "pow"))
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        _compared(f"__{op}__")


def _is_of_lanes(value: Any) -> bool:
    return type(value) is torch.SymInt and isinstance(value.node, LaneNode)


def _plain(value: Any, what: str) -> Any:
    return current().forced(value.node.numbers, what) if _is_of_lanes(value) else value


def _once_plain(function: Callable[..., Any], what: str) -> Callable[[Any], Any]:
    """A method that asks the number itself, if it is one of lanes; else torch's own."""

    def of(bare: Any) -> Any:
        def method(self: Any, *args: Any) -> Any:
            return function(_plain(self, what), *args) if _is_of_lanes(self) else bare(self, *args)

        return method

    return of


def _attribute(bare: Any) -> Any:
    def method(self: Any, name: str) -> Any:
        if name != "node" and not name.startswith("__") and hasattr(int, name) and _is_of_lanes(self):
            return getattr(_plain(self, f"int.{name}"), name)
        raise AttributeError(f"'SymInt' object has no attribute {name!r}")

    return method


def _with_class(bare: Any) -> Any:
    """`isinstance` asks for it, and gets what it gets of a rank that is one. torch itself knows such numbers."""

    def method(self: Any, name: str) -> Any:
        if name == "__class__" and _is_of_lanes(self) and not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            return int
        return bare(self, name)

    return method


_METHODS: dict[str, Callable[[Any], Any]] = {
    "__hash__": _once_plain(hash, "a key"),
    "__repr__": _once_plain(repr, "a text"),
    "__str__": _once_plain(str, "a text"),
    "__format__": _once_plain(format, "a text"),
    "__reduce_ex__": _once_plain(lambda number, protocol: (int, (number,)), "a pickled int"),
    "__deepcopy__": lambda bare: lambda self, memo: self,
    "__divmod__": lambda bare: lambda self, other: (self // other, self % other),
    "__rdivmod__": lambda bare: lambda self, other: (other // self, other % self),
    "__getattr__": _attribute,
    "__getattribute__": _with_class,
}


def _with_floats(name: str, always: bool) -> None:
    """Floats do not vary: what would make one asks for the number."""
    bare = getattr(torch.SymInt, name, None)
    if bare is None:
        return
    reverse = name.startswith("__r")
    function = getattr(operator, name.strip("_").removeprefix("r") if reverse else name.strip("_"))

    def method(self: Any, other: Any, *rest: Any) -> Any:
        if _is_of_lanes(self) and (always or isinstance(other, (float, torch.SymFloat))):
            pair = _plain(self, "a float"), _plain(other, "a float")
            return function(*reversed(pair)) if reverse else function(*pair)
        return bare(self, other, *rest)

    setattr(torch.SymInt, name, method)


def _compared(name: str) -> None:
    bare = getattr(torch.SymInt, name)

    def method(self: Any, other: Any) -> Any:
        if _is_of_lanes(self) and isinstance(other, (float, torch.SymFloat)):
            return getattr(_plain(self, "a float"), name)(other)
        result = bare(self, other)
        if type(result) is torch.SymBool and isinstance(result.node, LaneBool) and current().agree(result.node.numbers):
            return bool(current().of_witness(result.node.numbers))
        return result

    setattr(torch.SymInt, name, method)
