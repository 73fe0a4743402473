"""Records a program whose whole numbers may be others on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from graphguard.aten.kernels import Kernels, Lookup
from graphguard.aten.operators import Operator
from graphguard.capture.torch.lanes.groups import Teams
from graphguard.capture.torch.lanes.number import has_lanes, numbers_of, one_for_all, settled, varies
from graphguard.capture.torch.lanes.parts import PartSources
from graphguard.capture.torch.lanes.run import Numbers, current
from graphguard.capture.torch.record.aliasing import AliasTable, Cell, Geometry, Storage
from graphguard.capture.torch.record.invocation import Invocation
from graphguard.capture.torch.record.recorder import Recorder
from graphguard.capture.torch.record.shapes import META
from graphguard.capture.torch.record.views import ViewStep, select_step, slice_step
from graphguard.graph.ir import Graph
from graphguard.graph.operators import VARYING, name_of
from graphguard.graph.rank_class import PerRank

_SLICE, _SELECT = "aten.slice.Tensor", "aten.select.int"
_RANGES = {"aten.arange.default": 0, "aten.arange.start": 1, "aten.arange.start_step": 1}  # with the place of the end


class LaneAliases(AliasTable):
    """Windows at a place that varies have a memory of their own, which stands for a part of another."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._offsets: dict[int, tuple[torch.UntypedStorage, Numbers]] = {}  # by that memory, which is kept

    def geometry_of(self, tensor: torch.Tensor) -> Geometry:  # type: ignore[override]
        geometry = AliasTable.geometry_of(tensor)
        known = self._offsets.get(tensor.untyped_storage()._cdata)
        return geometry if known is None else (PerRank(known[1] + geometry[0]), *geometry[1:])  # type: ignore[return-value]

    def window(
        self, tensor: torch.Tensor, shape: list[int], strides: list[int], start: Numbers, step: ViewStep
    ) -> torch.Tensor:
        """A view of a tensor that begins so many elements behind it, in each lane."""
        base = self.cell(tensor)
        held = base.geometry[0]
        offset = np.asarray(held.numbers if isinstance(held, PerRank) else held) + start
        made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=META)
        memory = made.untyped_storage()
        self._offsets[memory._cdata] = memory, current().over_lanes(offset)
        self._storages[memory._cdata] = base.storage
        geometry = self.geometry_of(made)
        if geometry not in base.storage.cells:
            value = self._emit(step.look, (self._around(base, geometry),), made.shape, made.dtype)
            base.storage.cells[geometry] = Cell(base.storage, geometry, value, base, step)
        return made

    def _unseen_window(self, storage: Storage, geometry: Geometry) -> Cell:
        if isinstance(geometry[0], PerRank):
            geometry = (current().forced(geometry[0].numbers, "a strided window"), *geometry[1:])
            if geometry in storage.cells:
                return storage.cells[geometry]
        return super()._unseen_window(storage, geometry)


class LaneKernels(Kernels):
    """Constants are computed for lanes that have the same."""

    def argument(self, arg: Any, lookup: Lookup) -> Any:
        if isinstance(arg, PerRank):
            return current().forced(arg.numbers, "the value of a constant")
        return super().argument(arg, lookup)


class LaneRecorder(Recorder):
    by_class = True
    _aliases, _kernels = LaneAliases, LaneKernels
    aliases: LaneAliases

    def __init__(self, graph: Graph, teams: Teams, **options: Any):
        super().__init__(graph, **options)
        self._teams = teams
        self.sources = PartSources()

    def number(self, number: Any) -> Any:
        number = settled(number)
        return PerRank(numbers_of(number)) if varies(number) else number

    def form_of(self, mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._teams.mesh_ranks(mesh)

    def _dispatch(self, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not has_lanes(args) and not (kwargs and has_lanes(kwargs.values())):
            return super()._dispatch(info, args, kwargs)
        if info.name in self.handlers or info.composite:
            return super()._dispatch(info, args, kwargs)  # ours, or taken apart by torch: both see the numbers again
        args = tuple(settled(arg) for arg in args)
        if info.name == _SLICE:
            return self._slice(info, *args)
        if info.name == _SELECT:
            return self._select(info, *args)
        if info.name in _RANGES:
            self._require_one_length(info, args)
        return self._with_vectors(info, args, kwargs)

    def _with_vectors(self, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments that the form of the result does not depend on may vary; for the others lanes have to agree."""
        free = VARYING.get(name_of(info.name), ()) if not info.is_view else ()
        vectors = {place: PerRank(numbers_of(arg)) for place, arg in enumerate(args) if place in free and varies(arg)}
        plain = tuple(
            current().of_witness(vectors[place].numbers)
            if place in vectors
            else one_for_all(arg, f"an argument of {info.name}")
            for place, arg in enumerate(args)
        )
        kwargs = {name: one_for_all(arg, f"{name} of {info.name}") for name, arg in kwargs.items()}
        if not vectors:
            return super()._dispatch(info, plain, kwargs)
        call = Invocation(info, plain, kwargs, self.aliases)
        call.encoded = tuple(vectors.get(place, arg) for place, arg in enumerate(call.encoded))  # type: ignore[misc]
        return self.record(call)

    def _require_one_length(self, info: Operator, args: tuple[Any, ...]) -> None:
        end = _RANGES[info.name]
        start, stop = numbers_of(args[0]) if end else np.asarray(0), numbers_of(args[end])
        step = numbers_of(one_for_all(args[2], "the step of arange")) if len(args) > 2 else np.asarray(1)
        current().forced(current().over_lanes(-((start - stop) // step)), "the length of arange")

    # ------------------------------------------------------------------ windows
    def _select(self, info: Operator, tensor: torch.Tensor, dim: Any, index: Any) -> torch.Tensor:
        run, dim = current(), one_for_all(dim, "a dim") % tensor.dim()
        size, index = tensor.shape[dim], numbers_of(index)
        index = index + size * (index < 0)
        if run.agree(index) or run.forced((index < 0) | (index >= size), "an index that is outside"):
            return super()._dispatch(info, (tensor, dim, run.of_witness(index)), {})
        shape, strides = list(tensor.shape), list(tensor.stride())
        stride = strides.pop(dim)
        shape.pop(dim)
        return self.aliases.window(tensor, shape, strides, index * stride, select_step(dim, PerRank(index)))  # type: ignore[arg-type]

    def _slice(
        self, info: Operator, tensor: torch.Tensor, dim: Any = 0, start: Any = None, stop: Any = None, step: Any = 1
    ) -> torch.Tensor:
        run, dim, step = current(), one_for_all(dim, "a dim") % tensor.dim(), one_for_all(step, "the step of a slice")
        size = tensor.shape[dim]
        first = _end(start, 0, size)
        last = np.maximum(_end(stop, size, size), first)
        count = run.forced(run.over_lanes(-((first - last) // step)), "the length of a slice")
        first, last = run.over_lanes(first), run.over_lanes(last)
        if run.agree(first):
            return super()._dispatch(info, (tensor, dim, run.of_witness(first), run.of_witness(last), step), {})
        low, high = PerRank(first), run.of_witness(last) if run.agree(last) else PerRank(last)
        shape, strides = list(tensor.shape), list(tensor.stride())
        start = first * strides[dim]
        shape[dim], strides[dim] = count, strides[dim] * step
        return self.aliases.window(tensor, shape, strides, start, slice_step(dim, low, high, step))  # type: ignore[arg-type]


def _end(given: Any, otherwise: int, size: int) -> Numbers:
    """One end of a slice, as Python counts them."""
    numbers = np.asarray(otherwise) if given is None else numbers_of(given)
    return np.clip(numbers + size * (numbers < 0), 0, size)  # type: ignore[no-any-return]
