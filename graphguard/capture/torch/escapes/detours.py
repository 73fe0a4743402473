"""What programs do with tensors past the dispatcher, where the recorder would not see it: by pickling, by deep copies, with
lists as indices, and by tracers of torch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.eager_transforms as transforms

from graphguard.capture.torch.escapes.device import is_meta
from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def close_detours(recorder: Recorder) -> None:
    """Record what can be recorded, and refuse the rest. Patches torch for the rest of this process."""
    _refuse_pickling(recorder)
    _follow_deep_copies(recorder)
    _keep_lists_of_indices()
    _refuse_linearize(recorder)


def _refused(recorder: Recorder, message: str) -> CaptureError:
    recorder.locate()
    return recorder.failed(CaptureError(message))


def _refuse_pickling(recorder: Recorder) -> None:
    """A pickle would hold the shape of a tensor, or its data before the program changed them."""
    reduce = torch.Tensor.__reduce_ex__

    def reduced(self: torch.Tensor, protocol: Any) -> Any:
        if type(self) in _PLAIN and (is_meta(self) or recorder.aliases.storage_of(self) is not None):
            raise _refused(recorder, "the program pickles a tensor (torch.save, copy.copy), which has no data while it is "
                           "captured; leave that out, or copy it with `.clone()`")  # fmt: skip
        return reduce(self, protocol)

    torch.Tensor.__reduce_ex__ = reduced


def _follow_deep_copies(recorder: Recorder) -> None:
    """Deep copies of tensors that share memory share memory too, which torch forgets for tensors without data."""
    deepcopy = torch.Tensor.__deepcopy__

    def copied(self: torch.Tensor, memo: dict[Any, Any]) -> Any:
        known = type(self) is torch.Tensor and recorder.aliases.storage_of(self)
        if not known or not self.is_leaf or id(self) in memo:
            return deepcopy(self, memo)
        if memo.setdefault(("memory", id(known)), self) is not self:
            raise _refused(recorder, "a deep copy of two tensors that share memory is not modelled; copy each with `.clone()`")
        if is_meta(self) or self.grad is not None or self.__dict__:
            return deepcopy(self, memo)
        memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    torch.Tensor.__deepcopy__ = copied


def _refuse_linearize(recorder: Recorder) -> None:
    """It traces the function with memory that was never written, of which parts end up in what it returns."""

    def tracer(function: Any) -> Any:
        raise _refused(recorder, "torch.func.linearize is not modelled; use torch.func.jvp")

    transforms.lazy_dynamo_disallow = tracer  # nothing else of that module calls it


def _keep_lists_of_indices() -> None:
    """Torch would make a list that stands for an index a tensor on the device of the tensor that it indexes: without data."""
    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def get_kept(self: torch.Tensor, index: Any) -> Any:
        return get(self, _kept(index) if type(self) in _PLAIN else index)

    def put_kept(self: torch.Tensor, index: Any, value: Any) -> None:
        put(self, _kept(index) if type(self) in _PLAIN else index, value)

    torch.Tensor.__getitem__, torch.Tensor.__setitem__ = get_kept, put_kept


def _kept(index: Any) -> Any:
    if type(index) is list and all(isinstance(item, int) for item in index):  # of others torch makes a tuple
        return _tensor(index)
    if type(index) is tuple:
        return tuple([_tensor(item) if type(item) is list and _all_numbers(item) else item for item in index])
    return index


def _all_numbers(items: list[Any]) -> bool:
    return all(_all_numbers(item) if type(item) is list else isinstance(item, int) for item in items)


def _tensor(items: list[Any]) -> torch.Tensor:
    return torch.tensor(items) if items else torch.empty(0, dtype=torch.int64)
