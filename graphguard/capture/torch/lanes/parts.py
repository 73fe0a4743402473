"""Parts of a tensor, and elements of it, that are taken by a number which varies: `x.chunk(8)[rank]`, `x[rank]`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from graphguard.capture.torch.lanes.number import numbers_of, settled, varies, varying
from graphguard.capture.torch.lanes.run import Numbers, current
from graphguard.capture.torch.sources import SourceTracker
from graphguard.graph.ir import Source


class Parts(tuple[torch.Tensor, ...]):
    """Parts along a dim. The one at a number that varies is a window of the whole."""

    whole: torch.Tensor
    dim: int
    drops: bool  # whether a part has the dim no more
    has_gradient: bool
    source: Source | None  # where the parts were made, which is the line of each of them

    @staticmethod
    def of(parts: Any, whole: torch.Tensor, dim: int, drops: bool = False) -> Parts:
        made = Parts(parts)
        in_backward = torch._C._current_autograd_node() is not None
        made.whole, made.dim, made.drops, made.source = whole, dim, drops, PartSources.running.nearest(in_backward)
        made.has_gradient = torch.is_grad_enabled() and whole.requires_grad
        return made

    def __getitem__(self, index: Any) -> Any:
        if type(index) is slice and varies(index.start) and index.stop is None and type(index.step) is int:
            start = numbers_of(index.start)  # every so many-th from there on
            count = current().forced(-((start - len(self)) // index.step), "the number of parts")
            return tuple(self[varying(start + place * index.step)] for place in range(count))
        if not varies(index):
            return super().__getitem__(settled(index))
        places = _inside(numbers_of(index), len(self))
        if self.has_gradient:  # whose gradients are put together in the order of the parts
            return super().__getitem__(current().forced(places, "a part with a gradient"))
        with _at(self.source):
            if self.drops:
                return self.whole.select(self.dim, varying(places))
            sizes = np.array([part.shape[self.dim] for part in self])
            starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
            size = current().forced(sizes[places], "the size of a part")
            return self.whole.narrow(self.dim, varying(starts[places]), size)


class PartSources(SourceTracker):
    """Which line an operation comes from; a part that is taken comes from where all of them were made."""

    taken_at: ClassVar[Source | None] = None  # of this process
    running: ClassVar[PartSources]  # the last one of this process

    def __init__(self) -> None:
        super().__init__()
        PartSources.running = self

    def nearest(self, stop_at_engine: bool = False) -> Source | None:
        return PartSources.taken_at or super().nearest(stop_at_engine)


@contextlib.contextmanager
def _at(source: Source | None) -> Iterator[None]:
    PartSources.taken_at = source
    try:
        yield
    finally:
        PartSources.taken_at = None


class NumberList(list[Any]):
    """Whole numbers, of which each lane may take another."""

    def __getitem__(self, index: Any) -> Any:
        if not varies(index):
            return super().__getitem__(settled(index))
        return varying(np.array(list(self), dtype=np.int64)[_inside(numbers_of(index), len(self))])


def _inside(index: Numbers, count: int) -> Numbers:
    """Places in a list, counted from its start."""
    index = index + count * (index < 0)
    if current().forced((index < 0) | (index >= count), "an index that is outside"):
        raise IndexError("list index out of range")
    return np.clip(index, 0, count - 1)  # of lanes that have left


def take_parts_by_numbers() -> None:
    """Patches torch for the rest of this process."""
    for name, position, drops in (("chunk", 1, False), ("split", 1, False), ("tensor_split", 1, False), ("unbind", 0, True)):
        for owner in (torch, torch.Tensor):
            setattr(owner, name, _in_parts(getattr(owner, name), position, drops))
    bare_get, bare_set = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def getitem(tensor: torch.Tensor, index: Any) -> Any:
        if not _has_number(index):
            return bare_get(tensor, index)
        tensor, index = _selected(tensor, index)
        return tensor if index == () else bare_get(tensor, index)

    def setitem(tensor: torch.Tensor, index: Any, value: Any) -> None:
        if _has_number(index):
            tensor, index = _selected(tensor, index)
            index = ... if index == () else index
        bare_set(tensor, index, value)

    torch.Tensor.__getitem__, torch.Tensor.__setitem__ = getitem, setitem


def _in_parts(bare: Callable[..., Any], position: int, drops: bool) -> Callable[..., Any]:
    def function(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = bare(tensor, *args, **kwargs)
        dim = kwargs.get("dim", args[position] if len(args) > position else 0)
        plain = type(parts) in (tuple, list) and type(dim) is int and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        return Parts.of(parts, tensor, dim % tensor.dim(), drops) if plain else parts

    return function


def _has_number(index: Any) -> bool:
    return type(index) is torch.SymInt or (type(index) is tuple and any(type(item) is torch.SymInt for item in index))


def _selected(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """The tensor with the numbers that vary taken, and what is left of the index."""
    items = [settled(item) for item in (index if type(index) is tuple else (index,))]
    if not any(varies(item) for item in items):
        return tensor, tuple(items) if type(index) is tuple else items[0]
    used = sum(item is not None and item is not Ellipsis for item in items)
    dim, places = 0, []
    for place, item in enumerate(items):
        if varies(item):
            places.append((place, dim))
        dim += tensor.dim() - used if item is Ellipsis else item is not None
    for place, dim in reversed(places):
        tensor = torch.select(tensor, dim, items.pop(place))
    return tensor, tuple(items)
