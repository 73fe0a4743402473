"""Memory that is read and written past torch: arrays of numpy over it, storages, addresses, dlpack.

What a program writes with torch is recorded, not made, so that such memory never changes; and what is written around torch is
not recorded. So an array that the program is given is a copy, which stands for the tensor's memory as long as neither side
writes: a write by torch while the array lives, or by numpy at any time, is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphguard.capture.torch.escapes.device import storage_is_meta
from graphguard.errors import CaptureError
from graphguard.graph.ir import Symbol

if TYPE_CHECKING:
    from graphguard.capture.torch.adapters.holders import Holders
    from graphguard.capture.torch.record.aliasing import Storage
    from graphguard.capture.torch.record.recorder import Recorder
    from graphguard.graph.ir import Source

_numpy, address_of = torch.Tensor.numpy, torch.Tensor.data_ptr  # the methods are replaced while capturing
_nbytes, _resize = torch.UntypedStorage.nbytes, torch.UntypedStorage.resize_
_ADVICE = "give the program a copy (`torch.tensor(array)`, `.numpy().copy()`), or write with torch alone"
# How a storage is read or written without an operator; what only moves or names it is not among them.
_RAW = ("__getitem__", "__setitem__", "tolist", "copy_", "fill_", "clone", "byteswap", "_byteswap", "cpu", "cuda", "to", "_to",
        "share_memory_", "_share_fd_cpu_", "_share_filename_cpu_", "_write_file", "_set_from_file",
        "_swap_data_ptr_")  # fmt: skip


class Shared:
    """Memory of a tensor that something other than torch may hold. `holder` is dead when nothing does any more."""

    __slots__ = ("_bytes", "_holder", "_memory", "_source")

    def __init__(self, memory: torch.Tensor, holder: Any, source: Source | None):
        with _disable_current_modes():
            flat = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
            self._memory = memoryview(_numpy(flat))
        self._bytes = bytes(self._memory)
        self._holder = (lambda: memory) if holder is None else weakref.ref(holder)
        self._source = source

    def require_unchanged(self) -> None:
        """To be asked whenever the tensor is read: a change that is undone later is a change."""
        if self._memory != self._bytes:
            raise self._refused("is changed through numpy or another tensor that torch does not know to share it")

    def require_alone(self) -> None:
        """To be asked whenever torch writes to the tensor."""
        if self._holder() is not None:
            raise self._refused("is written by torch, which the array that shares it would show")

    def _refused(self, what: str) -> CaptureError:
        shared = f" (shared at {self._source})" if self._source else ""
        return CaptureError(f"memory that a tensor shares with numpy or a buffer{shared} {what}; {_ADVICE}")


def shared_from_outside(tensor: torch.Tensor) -> list[Shared] | None:
    """For a tensor from outside: torch says of memory that is not its own, or that it has given away, that it has one size."""
    storage = tensor.untyped_storage()
    if storage.resizable() and not storage.is_shared():
        return None
    return [Shared(tensor, None, None)]


def close_memory(recorder: Recorder, holders: Holders) -> None:
    """Answer what can be answered from constants, and refuse the rest. Patches torch for the rest of this process."""
    _read_from_the_graph(recorder)
    _refuse_raw_storages(recorder)
    _follow_freed_memory(recorder)
    _refuse_exchange(recorder, holders)


def _refused(recorder: Recorder, message: str) -> CaptureError:
    recorder.locate()
    return recorder.failed(CaptureError(message))


def _read_from_the_graph(recorder: Recorder) -> None:
    """`.tolist()` and `.numpy()` read memory behind the recorder's back: answer them from constants."""

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                constant = recorder.constant_tensor(self).clone()
                constant.requires_grad_(self.requires_grad and constant.is_floating_point())  # numpy refuses such tensors
                result = method(constant, *args, **kwargs)
                if isinstance(result, np.ndarray):
                    storage = recorder.aliases.cell(self).storage
                    storage.shared = [*(storage.shared or ()), Shared(constant, result, recorder.here())]
            return result

        return wrapper

    for name in ("tolist", "numpy", "__array__"):
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))

    def unmodelled(self: torch.Tensor, *args: Any) -> None:
        raise _refused(recorder, "apply_ and map_ run Python on every element, which is not modelled; use operators")

    for name in ("apply_", "map_", "map2_"):  # without data they would do nothing, and say nothing
        setattr(torch.Tensor, name, unmodelled)


def _refuse_raw_storages(recorder: Recorder) -> None:
    def guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _belongs_to_program(recorder, self) or any(
                isinstance(arg, torch.UntypedStorage) and _belongs_to_program(recorder, arg) for arg in args
            ):
                raise _refused(recorder, f"the program reads or writes the storage of a tensor (`{name}`), which is not "
                               "modelled; work on the tensor itself")  # fmt: skip
            return method(self, *args, **kwargs)

        return wrapper

    for name in _RAW:
        setattr(torch.UntypedStorage, name, guarded(name, getattr(torch.UntypedStorage, name)))


def _belongs_to_program(recorder: Recorder, storage: torch.UntypedStorage) -> bool:
    return storage_is_meta(storage) or recorder.aliases.storage_at(storage) is not None


def _follow_freed_memory(recorder: Recorder) -> None:
    """Libraries free the memory of a tensor and take it again: what it held is gone."""

    def resized(self: torch.UntypedStorage, size: int) -> Any:
        known = recorder.aliases.storage_at(self)
        if known is None or known.twin is not None:
            raise _refused(recorder, "the program changes the size of memory from outside (`resize_` of a storage), which is "
                           "not modelled; give it a copy")  # fmt: skip
        before = _nbytes(self)
        if size not in (0, before, known.size):
            raise _refused(recorder, f"the program changes the size of a tensor's memory from {known.size} to {size} bytes, "
                           "which is not modelled; make a new tensor")  # fmt: skip
        if size == 0 and before != 0:
            _forget(recorder, known)
        return _resize(self, size)

    torch.UntypedStorage.resize_ = resized


def _forget(recorder: Recorder, storage: Storage) -> None:
    recorder.locate()
    root = storage.root
    unwritten = recorder.new_value(root.shape, root.geometry[3])
    recorder.emit("aten.empty.memory_format", (tuple(root.shape),), {"dtype": Symbol("dtype", root.dtype)}, (unwritten,))
    recorder.aliases.write(root, unwritten)


def _refuse_exchange(recorder: Recorder, holders: Holders) -> None:
    def exchanged(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _refused(recorder, "the program hands a tensor's memory to another library (dlpack), where it would not be seen; "
                       "leave that out, or work with torch")  # fmt: skip

    torch.Tensor.__dlpack__ = exchanged
    holders.replace(torch._C._to_dlpack, exchanged)


def no_data(tensor: torch.Tensor) -> CaptureError:
    return CaptureError(
        f"the program reads a tensor of shape {tuple(tensor.shape)} that is neither an input nor has data; "
        "pass it as an input, or create it inside the program"
    )
