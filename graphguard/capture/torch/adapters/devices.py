"""torch: devices that are not there, and tensors that are on none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder


def pretend_devices() -> None:
    """Programs name their GPUs: let them. The recorder puts every tensor on the meta device."""
    torch.cuda._lazy_init = lambda: None
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
    torch.Tensor.pin_memory = lambda self, device=None: self.clone()
    torch.nn.Module.cuda = lambda self, device=None: self.to("cuda:0")
    foreach = torch.utils._foreach_utils._get_foreach_kernels_supported_devices
    torch.utils._foreach_utils._get_foreach_kernels_supported_devices = lambda: [*foreach(), "meta"]
    optimizer: Any = sys.modules["torch.optim.optimizer"]  # torch.optim hides it
    fused = optimizer._get_fused_kernels_supported_devices
    optimizer._get_fused_kernels_supported_devices = lambda: [*fused(), "meta"]
    torch.distributions.Distribution.set_default_validate_args(False)  # it reads values; programs are taken to be valid


def give_addresses(recorder: Recorder) -> None:
    """Without data every address is 0: programs that look for shared memory would find it everywhere. What is written with
    torch is not there either for tensors with data, so that none has its own address: to read there ends the process."""
    addresses: dict[int, int] = {}
    kept: list[torch.UntypedStorage] = []
    of_storage, of_tensor = torch.UntypedStorage.data_ptr, torch.Tensor.data_ptr

    def storage_address(self: torch.UntypedStorage) -> int:
        if recorder.bodies:
            raise CaptureError("it asks for an address")  # to hand it to code that is not Python
        if self.nbytes() == 0:
            return of_storage(self)  # type: ignore[no-any-return]
        if self._cdata not in addresses:
            kept.append(self)
            addresses[self._cdata] = len(kept) << 44
        return addresses[self._cdata]

    def address(self: torch.Tensor) -> int:
        if self.numel() == 0:
            return of_tensor(self)  # type: ignore[no-any-return]
        return storage_address(self.untyped_storage()) + int(self.storage_offset() * self.element_size())

    torch.UntypedStorage.data_ptr, torch.Tensor.data_ptr = storage_address, address


def note_autocast(recorder: Recorder) -> None:
    """Tensors without data are on no device that autocast knows of: it changes none of their dtypes."""
    enter = torch.autocast.__enter__

    def noted(self: Any) -> Any:
        recorder.assume("torch.autocast changes the precision of operations, not their meaning: its casts are not recorded")
        entered = enter(self)
        if self.device == "cpu":  # constants have data there, and would be cast alone
            torch.set_autocast_dtype("cpu", torch.float32)
        return entered

    torch.autocast.__enter__ = noted


def locate_custom_functions(recorder: Recorder) -> None:
    """A function that only passes its input on makes no operation, by which its backward could be located."""
    apply = torch.autograd.Function.__dict__["apply"].__func__

    def located(cls: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.sources.expect_node()
        return apply(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(located)
