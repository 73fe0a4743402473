"""The order of sets whose elements are hashed by strings or by addresses: another one in every process of a real run.

The hash seed of a process cannot be changed once it runs. So the slot by which CPython iterates over a set is replaced, and
gives the elements in the reverse order to every other capture. What it needs of CPython is checked before it is used."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_SLOT = 216  # bytes from the start of a type to `tp_iter`, on 64-bit builds with the usual objects
_SETS = (set, frozenset)
_PLAIN = (int, float, bool, complex, torch.device)  # their hashes are the same in every process
_Iterate = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
_PROBE = frozenset({"a", "b", "c"})
_OF_OBJECTS: Any = object.__hash__
_address = id  # a capture replaces it by one that is noted
_kept: list[object] = []  # what a slot points to must live as long as the process


def follow_orders(reverse: bool, note: Callable[[], object]) -> bool:
    """From now on `note` is called where a set is iterated over whose order may differ between processes; the order is turned
    round if `reverse`. False if this interpreter does not allow it."""
    if not _fits():
        return False
    slots = [ctypes.c_void_p.from_address(id(kind) + _SLOT) for kind in _SETS]
    plain = _Iterate(slots[0].value)  # type: ignore[arg-type]

    def iterate(elements: Any) -> Iterator[Any]:
        found = plain(elements)
        if len(elements) < 2 or not _differs(elements, plain):
            return found  # type: ignore[no-any-return]
        if elements is not _PROBE:
            note()
        order = list(found)
        if all(type(element).__hash__ is _OF_OBJECTS for element in order):
            order.sort(key=_address)  # two captures have other addresses, but mostly in the same order
        return reversed(order) if reverse else iter(order)

    replacement = _Iterate(iterate)
    _kept.append(replacement)
    for slot in slots:
        slot.value = ctypes.cast(replacement, ctypes.c_void_p).value
    _replace_shortcuts()
    return list(_PROBE) == (list(plain(_PROBE))[::-1] if reverse else list(plain(_PROBE)))


def _fits() -> bool:
    """Whether types are laid out as `_SLOT` says: both kinds of sets have one function there, and others have other ones."""
    if sys.implementation.name != "cpython" or object.__basicsize__ != 16 or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    with_iter, without = type("A", (), {"__iter__": lambda self: iter(())}), type("B", (), {})
    held = [ctypes.c_void_p.from_address(id(kind) + _SLOT).value for kind in (*_SETS, with_iter, without, list)]
    return held[0] == held[1] and held[3] is None and len({None, *held[1:]}) == 4


def _differs(elements: Any, plain: Any) -> bool:
    return any(not _is_plain(element) for element in plain(elements))


def _is_plain(element: Any) -> bool:
    if type(element) in _PLAIN:
        return True
    if isinstance(element, tuple) and type(element).__hash__ is tuple.__hash__:
        return all(map(_is_plain, element))
    fields = getattr(type(element), "__dataclass_fields__", None)
    return fields is not None and all(_is_plain(getattr(element, name, None)) for name in fields)


def _replace_shortcuts() -> None:
    """`set.pop` and `dict.fromkeys` look into a set without iterating over it."""
    pop, fromkeys = set.pop, dict.__dict__["fromkeys"]

    def pop_first(self: set[Any]) -> Any:
        for element in self:
            self.discard(element)
            return element
        return pop(self)

    def from_keys(cls: Any, keys: Any, value: Any = None) -> Any:
        return fromkeys.__get__(None, cls)(list(keys) if isinstance(keys, _SETS) else keys, value)

    for kind, name, function in ((set, "pop", pop_first), (dict, "fromkeys", classmethod(from_keys))):
        gc.get_referents(kind.__dict__)[0][name] = function
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
