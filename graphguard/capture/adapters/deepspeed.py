"""deepspeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphguard.capture.adapters.versions import check_version
from graphguard.capture.imports import when_imported

if TYPE_CHECKING:
    from graphguard.capture.recorder import Recorder

_USERS = ("deepspeed.runtime.utils", "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3")


def adjust_deepspeed(recorder: Recorder) -> None:
    """deepspeed compiles a library to send over shared memory, and reads whether the norm of the gradients is a number."""

    def send_nothing(comm: Any) -> None:
        check_version(recorder, "deepspeed")
        comm.build_shm_op = lambda: None

    def is_a_number(norm: Any) -> bool:
        recorder.assume("deepspeed skips no step: the norm of the gradients is a number")
        return False

    def take_every_step(module: Any) -> None:
        if hasattr(module, "is_invalid_grad_norm"):
            module.is_invalid_grad_norm = is_a_number

    when_imported("deepspeed.comm.torch", send_nothing)
    for name in _USERS:
        when_imported(name, take_every_step)
