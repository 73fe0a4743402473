"""torch's DistributedDataParallel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from graphguard.capture.torch.world.collectives import group_of, meet
from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder


def adjust_ddp(recorder: Recorder) -> None:
    """DDP's own gradient reduction is C++ that needs real devices; its hook for Python gets the same buckets."""

    def broadcast_each(group: Any, tensors: list[torch.Tensor], buffer_size: int, src: int = 0) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, group=group, group_src=src)

    def mean_of_gradients(group, bucket):  # type: ignore[no-untyped-def] # DDP inspects annotations of its hooks
        gradients = bucket.buffer()
        gradients.div_(group.size())
        dist.all_reduce(gradients, group=group)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(gradients)
        return future

    register, prepare = DistributedDataParallel.register_comm_hook, DistributedDataParallel._pre_forward

    def register_own(self: Any, state: object, hook: Any) -> None:
        @functools.wraps(hook)
        def finished(state, bucket):  # type: ignore[no-untyped-def]
            future = hook(state, bucket)
            if not future.done():
                raise CaptureError("a communication hook of DDP returned a future that nothing completes before backward ends")
            future.wait()  # DDP does, in C++, where the wait would not be seen
            return future

        self._has_hook = True
        register(self, state, finished)

    def prepare_with_hook(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not getattr(self, "_has_hook", False):
            recorder.assume("DDP averages each gradient bucket over its group with one all_reduce, as its default does")
            register_own(self, self.process_group, mean_of_gradients)
        return prepare(self, *inputs, **kwargs)

    def keep_buckets(reducer: Any) -> bool:
        recorder.assume("DDP keeps the gradient buckets that it starts with: regrouping them changes no gradient")
        return False

    def compare_shapes(group: Any, tensors: list[torch.Tensor], *args: Any) -> None:
        """DDP sends the shapes of its parameters around, and raises where they differ."""
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        meet(recorder, group_of(group), f"DDP with parameters of shapes {shapes}")

    construct = DistributedDataParallel.__init__

    def construct_anywhere(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> None:
        construct(self, module, None, None, *args, **kw)

    DistributedDataParallel.__init__ = construct_anywhere  # the devices that it is given do not exist
    dist.Reducer._rebuild_buckets = keep_buckets  # the ranks agree on new buckets by values that they read
    dist.Logger.set_runtime_stats_and_log = lambda self: None  # it warns that it has no clock for these devices
    dist._broadcast_coalesced = broadcast_each
    dist._verify_params_across_processes = compare_shapes
    DistributedDataParallel.register_comm_hook = register_own
    DistributedDataParallel._pre_forward = prepare_with_hook
