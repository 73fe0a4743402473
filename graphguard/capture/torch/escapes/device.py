"""On which device a tensor says it is. While it is captured it has no data and is on torch's meta device; to the program it is
on the CPU, or on the device that the program put it on, so that the program goes the way that it goes when it runs.

Torch itself is told the truth: it must know which of its kernels can run."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.utils import _device as default_device
from torch.utils._python_dispatch import _disable_current_modes

import graphguard
from graphguard.capture.torch.escapes.statements import call_of

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

is_meta: Callable[[torch.Tensor], bool] = torch.Tensor.is_meta.__get__  # replaced below
_device: Callable[[torch.Tensor], torch.device] = torch.Tensor.device.__get__
_storage_device: Callable[[torch.UntypedStorage], torch.device] = torch.UntypedStorage.device.__get__
CPU, META = torch.device("cpu"), torch.device("meta")
_TOLD_THE_TRUTH = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(graphguard.__file__) + os.sep)
# Files of torch that pass on the device that a program named: modules, and `with torch.device(...)`.
_PASS_ON = (os.path.join(os.path.dirname(torch.nn.__file__), "modules") + os.sep, default_device.__file__)
_ANSWERS: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda device: device,
    "is_meta": lambda device: device.type == "meta",
    "is_cpu": lambda device: device.type == "cpu",
    "is_cuda": lambda device: device.type == "cuda",
}


def storage_is_meta(storage: torch.UntypedStorage) -> bool:
    return bool(_storage_device(storage).type == "meta")


def given_device(device: torch.device | None) -> torch.device | None:
    """The device that the program named for a new tensor; None for the CPU, and where it named none. Torch names the meta
    device too, as it is told the truth."""
    if device is None or device.type == "cpu":
        return None
    if device.type != "meta":
        return with_index(device)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TOLD_THE_TRUTH[1]):
        frame = frame.f_back
    file = frame.f_code.co_filename
    if file.startswith(_TOLD_THE_TRUTH):
        return META if file.startswith(_PASS_ON) else None
    return META if _may_name_a_device(frame) else None


def _may_name_a_device(frame: FrameType) -> bool:
    """Whether a call of the program may say where its result is to be. Torch's own code below it makes tensors, too, where its
    operands are: attention makes a mask."""
    call = call_of(frame)
    if call is None or any(word.arg in ("device", None) for word in call.keywords):
        return True
    return not isinstance(call.func, ast.Attribute) or call.func.attr == "to"


def with_index(device: torch.device) -> torch.device:
    """The device that "cuda" stands for: torch would ask the driver, which is not there, for the current one."""
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def present_devices(recorder: Recorder) -> None:
    """Patches torch for the rest of this process."""

    def presented(tensor: torch.Tensor) -> torch.device:
        device = _device(tensor)
        if device.type != "meta":
            return device
        while is_functorch_wrapped_tensor(tensor):  # under vmap, which has no storage of its own
            tensor = get_unwrapped(tensor)
        return _of_storage(recorder, tensor.untyped_storage())

    def asked_by_torch() -> bool:
        frame = sys._getframe(2)
        if frame.f_code.co_filename.startswith(_TOLD_THE_TRUTH):
            return True
        recorder.note_device(frame)
        return False

    for name, answer in _ANSWERS.items():
        _present(torch.Tensor, name, presented, answer, asked_by_torch)
    for name in ("device", "is_cuda"):
        _present(torch.UntypedStorage, name, lambda s: _of_storage(recorder, s), _ANSWERS[name], asked_by_torch)
    _present_methods(presented, asked_by_torch)
    _move_only_where_needed(presented)


def _of_storage(recorder: Recorder, storage: torch.UntypedStorage) -> torch.device:
    if not storage_is_meta(storage):
        return _storage_device(storage)
    known = recorder.aliases.storage_at(storage)
    return CPU if known is None or known.device is None else known.device


def _present(kind: type, name: str, presented: Any, answer: Any, asked_by_torch: Callable[[], bool]) -> None:
    truth = getattr(kind, name).__get__

    def get(self: Any) -> Any:
        if asked_by_torch():
            return truth(self)
        return answer(presented(self))

    setattr(kind, name, property(get))


def _present_methods(presented: Callable[[torch.Tensor], torch.device], asked_by_torch: Callable[[], bool]) -> None:
    number, kind = torch.Tensor.get_device, torch.Tensor.type

    def get_device(self: torch.Tensor) -> int:
        if asked_by_torch():
            return int(number(self))
        index = presented(self).index
        return -1 if index is None else index

    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_meta(self) or asked_by_torch():
            return kind(self, *args, **kwargs)
        with _disable_current_modes():
            name = kind(torch.empty(0, dtype=self.dtype))
        device = presented(self).type
        return name if device == "cpu" else name.replace("torch.", f"torch.{device}.")

    torch.Tensor.get_device, torch.Tensor.type = get_device, type_of


def _move_only_where_needed(presented: Callable[[torch.Tensor], torch.device]) -> None:
    """A tensor that is already on the device is returned as it is: it is no copy, and writes to it are seen."""
    to = torch.Tensor.to

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            other = args[0]
            args, kwargs = (presented(other), other.dtype, *args[1:]), dict(kwargs)
        where = args[0] if args else kwargs.get("device")
        if not isinstance(where, (str, int, torch.device)) or isinstance(where, bool):
            return to(self, *args, **kwargs)
        device = with_index(torch.device(where))
        rest = {**kwargs, **dict(zip(("dtype", "non_blocking", "copy"), args[1:], strict=False))}
        rest.pop("device", None)
        if device != presented(self):
            return to(self, device=device, **rest)
        rest = {name: given for name, given in rest.items() if given is not None and name != "non_blocking"}
        return to(self, **rest) if rest else self

    torch.Tensor.to = moved
    torch.Tensor.cpu = lambda self, memory_format=None: moved(self, CPU, **_given(memory_format=memory_format))
    torch.Tensor.cuda = lambda self, device=None, non_blocking=False, memory_format=None: moved(
        self, torch.device("cuda", 0) if device is None else device, **_given(memory_format=memory_format)
    )
    torch.Tensor.type_as = lambda self, other: moved(self, other)


def _given(**kwargs: Any) -> dict[str, Any]:
    return {name: given for name, given in kwargs.items() if given is not None}
