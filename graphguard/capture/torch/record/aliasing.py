"""Which value each tensor holds, through views and in-place writes: functionalisation, done while recording.

A tensor is a window (offset, sizes, strides, dtype) of a storage, so a window's contents are found by the storage and the
window, never by the identity of a Python object: `detach`, `.data`, tensors that autograd unpacks, and `p.data = ...`
all come out right. The first tensor seen of a storage is its root; each other window knows the view step that leads to
it. A write replaces the value of one window and puts it back up the chain to the root; the other windows are then stale,
and are looked at again through their step when they are next read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from graphguard.aten.operators import DTYPE_NAMES
from graphguard.capture.torch.escapes.device import is_meta
from graphguard.capture.torch.escapes.memory import Shared, no_data, shared_from_outside
from graphguard.capture.torch.record.views import PARTS, ViewCall, ViewStep, part_steps, reshape, slice_step, view_step
from graphguard.capture.torch.world.races import windows_overlap
from graphguard.errors import CaptureError
from graphguard.graph.ir import Arg, Value

if TYPE_CHECKING:
    from graphguard.capture.torch.world.races import Window

Geometry = tuple[int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]
META = torch.device("meta")


class Storage:
    """Shared memory. `keepalive` holds it, so that its address is not given to another storage while we record."""

    __slots__ = ("cells", "device", "in_flight", "keepalive", "patches", "root", "shared", "size", "twin", "version")

    def __init__(self, keepalive: torch.UntypedStorage):
        self.keepalive, self.version, self.size = keepalive, 0, keepalive.nbytes()
        self.device: torch.device | None = None  # that the program put it on; None for the CPU
        self.shared: list[Shared] | None = None  # what else may hold this memory, if it may
        self.cells: dict[Geometry, Cell] = {}
        self.root: Cell
        self.twin: torch.UntypedStorage | None = None
        self.in_flight: list[Window] = []
        # From a value with a part put in while communication runs, to the value before and the window of that part.
        self.patches: dict[Value, tuple[Value, Geometry]] = {}


class Cell:
    """One window of a storage, and the value that it held at `version`."""

    __slots__ = ("dtype", "geometry", "key", "parent", "shape", "step", "storage", "value", "version")

    def __init__(self, storage: Storage, geometry: Geometry, value: Value, parent: Cell | None, step: ViewStep | None):
        self.storage, self.geometry, self.value, self.parent, self.step = storage, geometry, value, parent, step
        self.version, self.shape, self.dtype = storage.version, value.shape, value.dtype
        self.key = geometry[1:4]


class AliasTable:
    """All storages seen. `emit(call, operands)` appends a node and gives its value; `adopt(tensor)` gives the value of a
    tensor that no recorded operation made: a constant, or an error."""

    def __init__(
        self,
        emit: Callable[[ViewCall, tuple[Value, ...], torch.Size, torch.dtype], Value],
        adopt: Callable[[torch.Tensor], Value],
    ):
        self._emit, self._adopt = emit, adopt
        self._storages: dict[int, Storage] = {}

    @staticmethod
    def geometry_of(tensor: torch.Tensor) -> Geometry:
        """The window of its storage that a tensor shows."""
        return (
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def storage_of(self, tensor: torch.Tensor) -> Storage | None:
        return self._storages.get(tensor.untyped_storage()._cdata)

    def storage_at(self, memory: torch.UntypedStorage) -> Storage | None:
        return self._storages.get(memory._cdata)

    def cell(self, tensor: torch.Tensor) -> Cell:
        try:
            storage = self._storages.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # a sparse tensor has no storage
            layout = str(tensor.layout).removeprefix("torch.")
            raise CaptureError(f"tensors of layout {layout} are not modelled; use a dense tensor (`.to_dense()`)") from None
        if storage is None:
            return self._first_sight(tensor)
        geometry = self.geometry_of(tensor)
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
        if cell.storage.shared is not None:
            for shared in cell.storage.shared:
                shared.require_unchanged()
        if cell.version != cell.storage.version:
            if cell.parent is not None and cell.step is not None:
                base = self._around(cell.parent, cell.geometry)
                cell.value = self._emit(cell.step.look, (base,), *cell.geometry[1:4:2])
            cell.version = cell.storage.version
        return cell.value

    def _around(self, cell: Cell, window: Geometry) -> Value:
        """A value of the cell that is right inside the window. A part of a buffer must not seem to wait for communication
        that fills another part: the ranks may need it to get there."""
        patches = cell.storage.patches
        if not patches:
            return self.read(cell)
        if cell.parent is None or cell.step is None or (cell.version == cell.storage.version and cell.value in patches):
            value = cell.value
            while (patch := patches.get(value)) is not None and not windows_overlap(window, patch[1]):
                value = patch[0]
            return value
        base = self._around(cell.parent, window)
        if base is cell.parent.value:
            return self.read(cell)
        return self._emit(cell.step.look, (base,), *cell.geometry[1:4:2])

    def numbers_behind(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor shows the bytes of (`view(torch.uint8)`), if it does: to send all bytes is to send the numbers."""
        cell = self.cell(tensor)
        if cell.parent is None or cell.step is None or cell.step.look.op != "aten.view.dtype":
            return tensor
        offset, shape, strides, dtype, *_ = cell.parent.geometry
        memory = tensor.untyped_storage()
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, shape, strides)

    def bind(self, tensor: torch.Tensor, value: Value) -> Cell:
        """A tensor over fresh memory holds this value."""
        untyped = tensor.untyped_storage()
        storage = self._storages[untyped._cdata] = Storage(untyped)
        geometry = self.geometry_of(tensor)
        cell = storage.root = storage.cells[geometry] = Cell(storage, geometry, value, None, None)
        return cell

    def bind_views(self, op: str, base: Cell, outputs: list[torch.Tensor], args: tuple[Arg, ...]) -> None:
        """Tensors that a view operator made of `base`. Each known window costs nothing; a new one is looked at once."""
        if op == "aten.as_strided.default":
            self.cell(outputs[0])
            return
        known = base.storage.cells
        geometries = [self.geometry_of(output) for output in outputs]
        if all(geometry in known for geometry in geometries):
            return
        shapes = [tuple(output.shape) for output in outputs]
        steps = part_steps(op, base, shapes, args) if op in PARTS else [view_step(op, base, shapes[0], args)]
        for output, geometry, step in zip(outputs, geometries, steps, strict=True):
            if geometry not in known:
                part = self._emit(step.look, (self._around(base, geometry),), output.shape, output.dtype)
                known[geometry] = Cell(base.storage, geometry, part, base, step)

    def write(self, cell: Cell, value: Value, in_flight: bool = False) -> None:
        """The window now holds `value`; so do the windows around it. `in_flight` says that it will, once communication
        has filled it."""
        if cell.storage.shared is not None:
            for shared in cell.storage.shared:
                shared.require_alone()
        bases = []
        above, written, storage = cell, cell.geometry, cell.storage
        keeps = in_flight or bool(storage.in_flight)
        while above.parent is not None and above.step is not None:
            if above.step.put_back is None:
                raise CaptureError(f"a write through {above.step.look.op} is not modelled; write to a copy (`.clone()`)")
            bases.append(self.read(above.parent) if above.step.needs_base else None)
            above = above.parent
        version, storage.version = storage.version + 1, storage.version + 1
        cell.value, cell.version = value, version
        for base in bases:
            assert cell.parent is not None and cell.step is not None and cell.step.put_back is not None
            parent = cell.parent
            operands = (cell.value,) if base is None else (base, cell.value)
            before = parent.value if parent.version == version - 1 else None
            parent.value = self._emit(cell.step.put_back, operands, *parent.geometry[1:4:2])
            parent.version = version
            if keeps and before is not None:
                storage.patches[parent.value] = before, written
            cell = parent

    def _first_sight(self, tensor: torch.Tensor) -> Cell:
        """A tensor from outside the recording. Its root spans the whole storage, as other windows may come later."""
        untyped = tensor.untyped_storage()
        if is_meta(tensor):
            raise no_data(tensor)
        shared = shared_from_outside(tensor)  # before its data are looked at, which shares them
        if tensor.is_contiguous() and tensor.nbytes == untyped.nbytes() and not (tensor.is_conj() or tensor.is_neg()):
            cell = self.bind(tensor, self._adopt(tensor))
            cell.storage.shared = shared
            return cell
        item = tensor.element_size()
        whole = torch.empty(0, dtype=tensor.dtype)
        whole.set_(untyped, 0, (untyped.nbytes() // item,), (1,))
        self.bind(whole, self._adopt(whole)).storage.shared = shared
        return self.cell(tensor)

    def _unseen_window(self, storage: Storage, geometry: Geometry) -> Cell:
        """A window that no recorded view operator made: cut it out of the storage by its strides."""
        offset, shape, strides, dtype, conjugate, negative = geometry
        if conjugate or negative:
            return self._lazily_changed(storage, geometry)
        base = self._flat_root(storage)
        if dtype != base.geometry[3]:
            raise CaptureError(
                f"memory of dtype {DTYPE_NAMES[base.geometry[3]]} is seen as {DTYPE_NAMES[dtype]} without a view operator; "
                "convert it with `.to(dtype)`"
            )
        order = _dense_order(shape, strides)
        if order is not None and offset + math.prod(shape) <= math.prod(base.shape):
            return self._dense_window(base, geometry, order)
        args = (tuple(shape), strides, offset)
        step = ViewStep(
            ViewCall("aten.as_strided.default", args), ViewCall("aten.as_strided_scatter.default", args), needs_base=True
        )
        value = self._emit(step.look, (self._around(base, geometry),), shape, dtype)
        cell = storage.cells[geometry] = Cell(storage, geometry, value, base, step)
        return cell

    def _dense_window(self, base: Cell, geometry: Geometry, order: list[int]) -> Cell:
        """A window without gaps, as libraries lay many tensors out in one buffer: a run of the memory, seen as a tensor."""
        offset, shape, _, dtype, *_ = geometry
        count, total = math.prod(shape), math.prod(base.shape)
        whole = (0, torch.Size((total,)), (1,), dtype, False, False)
        run = (offset, torch.Size((count,)), (1,), dtype, False, False)
        cell = self._seen(base, whole, ViewStep(reshape((total,)), reshape(base.shape)))
        cell = self._seen(cell, run, slice_step(0, offset, offset + count))
        if order == list(range(len(shape))):
            return self._seen(cell, geometry, ViewStep(reshape(tuple(shape)), reshape((count,))))
        physical = torch.Size(shape[d] for d in order)
        dense = tuple(math.prod(physical[d + 1 :]) for d in range(len(physical)))
        laid = (offset, physical, dense, dtype, False, False)
        cell = self._seen(cell, laid, ViewStep(reshape(tuple(physical)), reshape((count,))))
        inverse = tuple(order.index(d) for d in range(len(order)))
        return self._seen(
            cell,
            geometry,
            ViewStep(ViewCall("aten.permute.default", (inverse,)), ViewCall("aten.permute.default", (tuple(order),))),
        )

    def _seen(self, base: Cell, geometry: Geometry, step: ViewStep) -> Cell:
        """The cell of a window, looked at from this one if it is new."""
        known = base.storage.cells
        if geometry not in known:
            part = self._emit(step.look, (self._around(base, geometry),), *geometry[1:4:2])
            known[geometry] = Cell(base.storage, geometry, part, base, step)
        return known[geometry]

    def _lazily_changed(self, storage: Storage, geometry: Geometry) -> Cell:
        """A window whose elements count as conjugated or negated: a view of the plain one."""
        op, plain = ("aten._conj.default", (*geometry[:4], False, geometry[5])) if geometry[4] else (
            "aten._neg_view.default", (*geometry[:4], False, False))  # fmt: skip
        base = storage.cells.get(plain) or self._unseen_window(storage, plain)
        value = self._emit(ViewCall(op, ()), (self.read(base),), geometry[1], geometry[3])
        cell = storage.cells[geometry] = Cell(storage, geometry, value, base, ViewStep(ViewCall(op, ()), ViewCall(op, ())))
        return cell

    def _flat_root(self, storage: Storage) -> Cell:
        """The root as one row-major array: strides of a window are counted in memory order, which a graph does not have."""
        root = storage.root
        offset, shape, strides, dtype, *_ = root.geometry
        if 0 in shape:
            return root
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
            step = ViewStep(ViewCall("aten.permute.default", (tuple(order),)), ViewCall("aten.permute.default", (inverse,)))
            value = self._emit(step.look, (self.read(root),), physical, dtype)
            storage.cells[geometry] = Cell(storage, geometry, value, root, step)
        return storage.cells[geometry]


def _dense_order(shape: torch.Size, strides: tuple[int, ...]) -> list[int] | None:
    """The dims of a window from the outermost in memory to the innermost, if it has no gaps."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    dense = 1
    for d in reversed(order):
        if shape[d] != 1 and strides[d] != dense:
            return None
        dense *= shape[d]
    return order if dense > 0 else None
