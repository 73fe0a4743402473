"""Which value each tensor holds, through views and in-place writes: functionalisation, done while recording.

A tensor is a window (offset, sizes, strides, dtype) of a storage, so a window's contents are found by the storage and the
window, never by the identity of a Python object: `detach`, `.data`, tensors that autograd unpacks, and `p.data = ...`
all come out right. The first tensor seen of a storage is its root; each other window knows the view step that leads to
it. A write replaces the value of one window and puts it back up the chain to the root; the other windows are then stale,
and are looked at again through their step when they are next read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from graphguard.aten.operators import DTYPE_NAMES
from graphguard.capture.views import Call, ViewStep, part_steps, view_step
from graphguard.errors import CaptureError
from graphguard.ir import Arg, Value

if TYPE_CHECKING:
    from graphguard.capture.races import Window

Geometry = tuple[int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]
META = torch.device("meta")


class Storage:
    """Shared memory. `keepalive` holds it, so that its address is not given to another storage while we record."""

    __slots__ = ("cells", "in_flight", "keepalive", "root", "twin", "version")

    def __init__(self, keepalive: torch.UntypedStorage):
        self.keepalive, self.version = keepalive, 0
        self.cells: dict[Geometry, Cell] = {}
        self.root: Cell
        self.twin: torch.UntypedStorage | None = None
        self.in_flight: list[Window] = []


class Cell:
    """One window of a storage, and the value that it held at `version`."""

    __slots__ = ("dtype", "geometry", "key", "parent", "shape", "step", "storage", "value", "version")

    def __init__(self, storage: Storage, geometry: Geometry, value: Value, parent: Cell | None, step: ViewStep | None):
        self.storage, self.geometry, self.value, self.parent, self.step = storage, geometry, value, parent, step
        self.version, self.shape, self.dtype = storage.version, value.shape, value.dtype
        self.key = geometry[1:4]


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return (
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


class AliasTable:
    """All storages seen. `emit(call, operands)` appends a node and gives its value; `adopt(tensor)` gives the value of a
    tensor that no recorded operation made: a constant, or an error."""

    def __init__(
        self,
        emit: Callable[[Call, tuple[Value, ...], torch.Size, torch.dtype], Value],
        adopt: Callable[[torch.Tensor], Value],
    ):
        self._emit, self._adopt = emit, adopt
        self._storages: dict[int, Storage] = {}

    def storage_of(self, tensor: torch.Tensor) -> Storage | None:
        return self._storages.get(tensor.untyped_storage()._cdata)

    def cell(self, tensor: torch.Tensor) -> Cell:
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return self._first_sight(tensor)
        geometry = geometry_of(tensor)
        cell = storage.cells.get(geometry)
        return cell if cell is not None else self._unseen_window(storage, geometry)

    def without_data(self, cell: Cell) -> torch.Tensor:
        """A meta tensor over the same window: what a tensor with data is replaced by when an operator runs."""
        offset, shape, strides, dtype, conjugate, negative = cell.geometry
        storage = cell.storage
        if storage.twin is None:
            storage.twin = torch.UntypedStorage(storage.keepalive.nbytes(), device=META)
            self._storages[storage.twin._cdata] = storage
        twin = torch.empty(0, dtype=dtype, device=META).set_(storage.twin, offset, shape, strides)
        twin = torch._conj(twin) if conjugate else twin
        return torch._neg_view(twin) if negative else twin

    def read(self, cell: Cell) -> Value:
        """The value that a window holds now."""
        if cell.version != cell.storage.version:
            if cell.parent is not None and cell.step is not None:
                base = self.read(cell.parent)
                cell.value = self._emit(cell.step.look, (base,), *cell.geometry[1:4:2])
            cell.version = cell.storage.version
        return cell.value

    def bind(self, tensor: torch.Tensor, value: Value) -> Cell:
        """A tensor over fresh memory holds this value."""
        untyped = tensor.untyped_storage()
        storage = self._storages[untyped._cdata] = Storage(untyped)
        geometry = geometry_of(tensor)
        cell = storage.root = storage.cells[geometry] = Cell(storage, geometry, value, None, None)
        return cell

    def bind_views(self, op: str, base: Cell, outputs: list[torch.Tensor], args: tuple[Arg, ...]) -> None:
        """Tensors that a view operator made of `base`. Each known window costs nothing; a new one is looked at once."""
        if op == "aten.as_strided.default":
            self.cell(outputs[0])
            return
        known = base.storage.cells
        geometries = [geometry_of(output) for output in outputs]
        if all(geometry in known for geometry in geometries):
            return
        shapes = [tuple(output.shape) for output in outputs]
        if len(outputs) == 1 and op not in ("aten.unbind.int", "aten.split.Tensor", "aten.split_with_sizes.default"):
            steps = [view_step(op, base, shapes[0], args)]
        else:
            steps = part_steps(op, base, shapes, args)
        value = self.read(base)
        for output, geometry, step in zip(outputs, geometries, steps, strict=True):
            if geometry not in known:
                part = self._emit(step.look, (value,), output.shape, output.dtype)
                known[geometry] = Cell(base.storage, geometry, part, base, step)

    def write(self, cell: Cell, value: Value) -> None:
        """The window now holds `value`; so do the windows around it."""
        bases = []
        above: Cell = cell
        while above.parent is not None and above.step is not None:
            if above.step.put_back is None:
                raise CaptureError(f"a write through {above.step.look.op} is not modelled; write to a copy (`.clone()`)")
            bases.append(self.read(above.parent) if above.step.needs_base else None)
            above = above.parent
        cell.storage.version += 1
        version = cell.storage.version
        cell.value, cell.version = value, version
        for base in bases:
            assert cell.parent is not None and cell.step is not None and cell.step.put_back is not None
            parent = cell.parent
            operands = (cell.value,) if base is None else (base, cell.value)
            parent.value = self._emit(cell.step.put_back, operands, *parent.geometry[1:4:2])
            parent.version = version
            cell = parent

    def _first_sight(self, tensor: torch.Tensor) -> Cell:
        """A tensor from outside the recording. Its root spans the whole storage, as other windows may come later."""
        untyped = tensor.untyped_storage()
        if tensor.is_contiguous() and tensor.nbytes == untyped.nbytes():
            return self.bind(tensor, self._adopt(tensor))
        item = tensor.element_size()
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        whole.set_(untyped, 0, (untyped.nbytes() // item,), (1,))
        self.bind(whole, self._adopt(whole))
        return self.cell(tensor)

    def _unseen_window(self, storage: Storage, geometry: Geometry) -> Cell:
        """A window that no recorded view operator made: cut it out of the storage by its strides."""
        offset, shape, strides, dtype, conjugate, negative = geometry
        base = self._flat_root(storage)
        if dtype != base.geometry[3] or conjugate or negative:
            raise CaptureError(
                f"memory of dtype {DTYPE_NAMES[base.geometry[3]]} is seen as {DTYPE_NAMES[dtype]} without a view operator; "
                "convert it with `.to(dtype)`"
            )
        args = (tuple(shape), strides, offset)
        step = ViewStep(Call("aten.as_strided.default", args), Call("aten.as_strided_scatter.default", args), needs_base=True)
        value = self._emit(step.look, (self.read(base),), shape, dtype)
        cell = storage.cells[geometry] = Cell(storage, geometry, value, base, step)
        return cell

    def _flat_root(self, storage: Storage) -> Cell:
        """The root as one row-major array: strides of a window are counted in memory order, which a graph does not have."""
        root = storage.root
        offset, shape, strides, dtype, *_ = root.geometry
        order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
        dense = 1
        for d in reversed(order):
            if shape[d] != 1 and strides[d] != dense:
                raise CaptureError("a strided window of memory that is not densely laid out is not modelled; use `.clone()`")
            dense *= shape[d]
        if offset != 0:
            raise CaptureError("a strided window of memory that starts before its first tensor is not modelled")
        if order == list(range(len(shape))):
            return root
        physical = torch.Size(shape[d] for d in order)
        geometry = (0, physical, tuple(strides[d] for d in order), dtype, False, False)
        if geometry not in storage.cells:
            inverse = tuple(order.index(d) for d in range(len(order)))
            step = ViewStep(Call("aten.permute.default", (tuple(order),)), Call("aten.permute.default", (inverse,)))
            value = self._emit(step.look, (self.read(root),), physical, dtype)
            storage.cells[geometry] = Cell(storage, geometry, value, root, step)
        return storage.cells[geometry]
