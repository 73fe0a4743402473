"""deepspeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _disable_current_modes

from graphguard.capture.torch.adapters.versions import check_version
from graphguard.capture.torch.escapes.imports import when_imported
from graphguard.capture.torch.escapes.text import only_prints

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

_USERS = ("deepspeed.runtime.utils", "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3",
          "deepspeed.runtime.zero.partition_parameters", "deepspeed.runtime.zero.partitioned_param_coordinator")  # fmt: skip


def adjust_deepspeed(recorder: Recorder) -> None:
    """deepspeed compiles a library to send over shared memory, broadcasts the bytes of parameters, and reads values: whether
    the norm of the gradients is a number, and whether the ranks agree."""

    def send_nothing(comm: Any) -> None:
        check_version(recorder, "deepspeed")
        comm.build_shm_op = lambda: None
        broadcast = comm.TorchBackend.broadcast

        def broadcast_numbers(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                numbers = recorder.aliases.numbers_behind(tensor)
            return broadcast(self, numbers, *args, **kwargs)

        comm.TorchBackend.broadcast = broadcast_numbers

    def is_a_number(norm: Any) -> bool:
        recorder.assume("deepspeed skips no step: the norm of the gradients is a number")
        return False

    def are_the_same(numbers: list[int]) -> None:
        recorder.assume("deepspeed's ranks fetch and partition their parameters in one order, which they would compare")

    def read_no_values(module: Any) -> None:
        if hasattr(module, "print_rank_0"):
            only_prints(module.print_rank_0)
        for name, replacement in (("is_invalid_grad_norm", is_a_number), ("assert_ints_same_as_other_ranks", are_the_same)):
            if hasattr(module, name):
                setattr(module, name, replacement)

    when_imported("deepspeed.comm.torch", send_nothing)
    for name in _USERS:
        when_imported(name, read_no_values)
