"""Numbers that a program reads to show them. `loss.item()` gives one that is read only when something needs to know it: what is
printed or logged needs nothing, and a sum of such numbers is another one."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphguard.capture.torch.escapes.text import is_only_shown
from graphguard.capture.torch.record.constants import NotConstant
from graphguard.graph.ir import Value

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SHOWN = "..."
_KEPT = ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod")  # arithmetic that leaves open what the numbers are
_ASKED = ("lt", "le", "gt", "ge", "eq", "ne")


class Unread:
    """A number that the program asked for, and that is not known yet. It passes for a float until it is needed."""

    def __init__(self, read: Callable[[], float]):
        self._read = read

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # `isinstance(x, float)` is true of what `item` returns
        return float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_number, args), **{key: _number(value) for key, value in (kwargs or {}).items()})

    def __float__(self) -> float:
        return self._read()

    def __int__(self) -> int:
        return int(self._read())

    def __bool__(self) -> bool:
        return bool(self._read())

    def __hash__(self) -> int:
        return hash(self._read())

    def __format__(self, spec: str) -> str:
        return _SHOWN if is_only_shown(sys._getframe(1)) else format(self._read(), spec)

    def __repr__(self) -> str:
        return _SHOWN if is_only_shown(sys._getframe(1)) else repr(self._read())

    def __neg__(self) -> Unread:
        return Unread(lambda: -self._read())

    def __abs__(self) -> Unread:
        return Unread(lambda: abs(self._read()))

    def __round__(self, digits: int | None = None) -> Any:
        return Unread(lambda: round(self._read(), digits)) if digits is not None else round(self._read())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)


def _number(given: Any) -> Any:
    if type(given) is Unread:
        return float(given)
    return type(given)(map(_number, given)) if type(given) in (list, tuple) else given


def _kept(compute: Callable[[Any, Any], Any], turned: bool) -> Callable[[Unread, Any], Any]:
    def result(self: Unread, other: Any) -> Any:
        if type(other) not in (int, float, bool, Unread):  # a tensor would have it in its values
            return compute(other, float(self)) if turned else compute(float(self), other)
        if turned:
            return Unread(lambda: compute(_number(other), float(self)))
        return Unread(lambda: compute(float(self), _number(other)))

    return result


def _asked(compare: Callable[[Any, Any], Any]) -> Callable[[Unread, Any], Any]:
    return lambda self, other: compare(float(self), _number(other))


for _name in _KEPT:
    setattr(Unread, f"__{_name}__", _kept(getattr(operator, _name), turned=False))
    setattr(Unread, f"__r{_name}__", _kept(getattr(operator, _name), turned=True))
for _name in _ASKED:
    setattr(Unread, f"__{_name}__", _asked(getattr(operator, _name)))


def leave_numbers_unread(recorder: Recorder) -> None:
    """Patches torch for the rest of this process."""
    read = torch.Tensor.item

    def item(self: torch.Tensor) -> Any:
        known = type(self) in _PLAIN and recorder.aliases.storage_of(self) is not None
        if not known or not self.is_floating_point() or self.numel() != 1:
            return read(self)
        recorder.locate()
        with _disable_current_modes():
            value = recorder.value(self)  # the program may write into the tensor before the number is needed
        if _is_known(recorder, value):
            return read(self)
        recorder.assume(f"nothing depends on the type of the number that the program reads at {recorder.here()}")
        return Unread(lambda: recorder.read(value).item())

    torch.Tensor.item = item


def _is_known(recorder: Recorder, value: Value) -> bool:
    with _disable_current_modes():
        try:
            recorder.constants.tensor(value)
        except NotConstant:
            return False
        return True
