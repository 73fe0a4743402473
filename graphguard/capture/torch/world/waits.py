"""When a program waits for work that it started: by the work's handle, by its future, or at the end of a coalesced block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup, Work

from graphguard.capture.torch.world.collectives import new_work, wait, work_handle
from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder


class _WorkFuture(torch.futures.Future):  # type: ignore[type-arg,unused-ignore]
    """The future of a work: whoever looks at it waits first. Callbacks run at once, the earliest that they may."""

    def __init__(self, tensors: list[torch.Tensor], before: Callable[[], object]):
        super().__init__()
        super().set_result(tensors)
        self._before = before


def _after_waiting(name: str) -> Callable[..., Any]:
    def method(self: _WorkFuture, *args: Any) -> Any:
        self._before()
        return getattr(super(_WorkFuture, self), name)(*args)

    return method


for _name in ("wait", "value", "then", "add_done_callback"):
    setattr(_WorkFuture, _name, _after_waiting(_name))


def watch_waits(recorder: Recorder) -> None:
    """Record when the program waits for work. Patches torch for the rest of this process, which is one rank's own."""

    def waited(handle: Any, *args: object, **kwargs: object) -> bool:
        recorder.locate()
        if handle.seq_id != recorder.coalesced:  # nothing has started before the end of its block
            wait(recorder, handle.seq_id)
        return True

    def is_completed(handle: Any) -> bool:
        recorder.assume("work that the program asks about (`is_completed`) has completed by then")
        return waited(handle)

    def result(handle: Any) -> list[torch.Tensor]:
        return recorder.results[handle.seq_id]

    def get_future(handle: Any) -> _WorkFuture:
        return _WorkFuture(result(handle), lambda: waited(handle))

    def start_coalescing(group: ProcessGroup, device: object) -> None:
        if recorder.coalesced is not None:
            recorder.locate()
            raise recorder.failed(CaptureError("a coalesced block of communication inside another one is not modelled"))
        recorder.coalesced = new_work(recorder)

    def end_coalescing(group: ProcessGroup, device: object) -> FakeWork:
        work, recorder.coalesced = recorder.coalesced, None
        assert work is not None
        return work_handle(work)

    replacements = {
        **dict.fromkeys(("wait", "synchronize", "block_current_stream"), waited),
        "is_completed": is_completed,
        "result": result,
        "get_future": get_future,
    }
    for owner in (Work, FakeWork):
        for name, method in replacements.items():
            setattr(owner, name, method)
    for name, function in (("_start_coalescing", start_coalescing), ("_end_coalescing", end_coalescing)):
        setattr(ProcessGroup, name, function)
