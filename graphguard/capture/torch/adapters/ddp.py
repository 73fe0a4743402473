"""torch's DistributedDataParallel."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from graphguard.capture.torch.world.collectives import group_of, meet, new_work, work_handle
from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder
    from graphguard.capture.torch.world.objects import ObjectExchange


_REDUCE = "c10d.allreduce_.default"


def _share_use(recorder: Recorder, objects: ObjectExchange) -> None:
    """With `find_unused_parameters` the ranks add up, with a tensor whose values they read, who uses which parameter: do it
    with objects."""
    reduce, construct = recorder.handlers[_REDUCE], DistributedDataParallel.__init__
    counted: set[int] = set()  # how many parameters models have

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if self.find_unused_parameters:
            counted.add(sum(1 for parameter in self.module.parameters() if parameter.requires_grad))

    def reduce_or_share(recorder: Recorder, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (tensor, *_), boxed = args[:2]
        if tensor.dtype != torch.int32 or tensor.numel() not in counted or _is_called_in_python():
            return reduce(recorder, info, args, kwargs)
        group = ProcessGroup.unbox(boxed)
        used: list[list[int]] = [[]] * group.size()
        objects.all_gather_object(used, recorder.constant_tensor(tensor).tolist(), group)
        with recorder.resumed():
            tensor.copy_(torch.tensor(used).sum(0))
        return args[0], work_handle(new_work(recorder)).boxed()

    recorder.handlers = {**recorder.handlers, _REDUCE: reduce_or_share}
    DistributedDataParallel.__init__ = constructed


def _is_called_in_python() -> bool:
    """Whether `dist.all_reduce` is called, rather than the process group by C++."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == c10d.__file__:
            return True
        frame = frame.f_back
    return False


def adjust_ddp(recorder: Recorder, objects: ObjectExchange) -> None:
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
    _share_use(recorder, objects)
