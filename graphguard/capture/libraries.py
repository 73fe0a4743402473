"""What must be adjusted in torch and in libraries to run them without devices and without data. All of it, in one place.

Adjustments are made in the process of one rank, which ends with the capture. Each states what it assumes; the statement
becomes part of the graph when the adjusted code runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.fsdp
import torch.distributed.optim  # imported before anything is replaced: it compiles code that names torch.tensor
import torch.distributed.pipelining.schedules as schedules
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from graphguard.capture.collectives import watch_waits
from graphguard.findings import Finding

if TYPE_CHECKING:
    from graphguard.capture.objects import ObjectExchange
    from graphguard.capture.recorder import Recorder

TESTED = {"torch": "2.13.0", "megatron.core": "0.16.1"}
_META = torch.device("meta")
_OBJECT_COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
                       "send_object_list", "recv_object_list")  # fmt: skip


def adjust(recorder: Recorder, holders: Holders, objects: ObjectExchange | None = None) -> None:
    """Prepare this process for recording one program; `objects` is given for a rank."""
    _check_version(recorder, "torch", torch.__version__.split("+")[0])
    _keep_literal_data(recorder, holders)
    _read_values_from_the_graph(recorder)
    _pretend_devices()
    _locate_custom_functions(recorder)
    if objects is None:
        return
    watch_waits(recorder)
    for name in _OBJECT_COLLECTIVES:
        holders.replace(getattr(dist, name), getattr(objects, name))
    holders.replace(c10d._warn_not_in_group, _outside_group(recorder))
    _lay_meshes_on_the_cpu(recorder, holders)
    _adjust_ddp(recorder)
    _adjust_fsdp(recorder)
    _adjust_pipelining(recorder, objects)
    if "megatron.core" in sys.modules:
        _adjust_megatron(recorder, holders)


class Holders:
    """Which modules hold the functions that may be replaced, under which names. Found once, before the ranks are forked:
    a program may have imported a function under any name."""

    def __init__(self) -> None:
        originals = [torch.tensor, torch.as_tensor, init_device_mesh, c10d._warn_not_in_group]
        originals += [getattr(dist, name) for name in _OBJECT_COLLECTIVES]
        megatron = sys.modules.get("megatron.core.tensor_parallel.random")
        if megatron is not None:
            originals.append(megatron.get_cuda_rng_tracker)
        wanted = {id(original) for original in originals}
        self._found: dict[int, list[tuple[dict[str, Any], str]]] = {key: [] for key in wanted}
        for title, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", None)
            if isinstance(names, dict) and not title.startswith("graphguard."):
                for name, item in list(names.items()):
                    if id(item) in wanted:
                        self._found[id(item)].append((names, name))

    def replace(self, original: Any, replacement: Any) -> None:
        for names, name in self._found[id(original)]:
            names[name] = replacement


def _check_version(recorder: Recorder, library: str, version: str) -> None:
    if version != TESTED[library]:
        recorder.assume(f"{library} {version} behaves as {TESTED[library]}, with which its adjustments were tested")


# ---------------------------------------------------------------------- data and devices
def _keep_literal_data(recorder: Recorder, holders: Holders) -> None:
    """`torch.tensor(data, device=x.device)` would drop the data, as x is on the meta device."""
    for function, builtin in ((torch.tensor, "aten::tensor"), (torch.as_tensor, "aten::as_tensor")):

        @functools.wraps(function)
        def keeping(data: Any, *args: Any, _function: Any = function, device: Any = None, **kwargs: Any) -> Any:
            if isinstance(data, torch.Tensor):
                return _function(data, *args, device=device, **kwargs)
            return _function(data, *args, **kwargs)

        torch.jit._builtins._register_builtin(keeping, builtin)  # code compiled from now on finds it as before
        holders.replace(function, keeping)

    def new_tensor(self: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, **kwargs)

    torch.Tensor.new_tensor = new_tensor


def _read_values_from_the_graph(recorder: Recorder) -> None:
    """`.tolist()` and `.numpy()` read memory behind the recorder's back: answer them from constants."""

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.is_meta and recorder.aliases.storage_of(self) is None:
                return method(self, *args, **kwargs)
            with _disable_current_modes():
                return method(recorder.constant_tensor(self), *args, **kwargs)

        return wrapper

    for name in ("tolist", "numpy", "__array__"):
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))


def _pretend_devices() -> None:
    """Programs name their GPUs: let them. The recorder puts every tensor on the meta device."""
    torch.cuda._lazy_init = lambda: None
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0


def _locate_custom_functions(recorder: Recorder) -> None:
    """A function that only passes its input on makes no operation, by which its backward could be located."""
    apply = torch.autograd.Function.__dict__["apply"].__func__

    def located(cls: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.sources.expect_node()
        return apply(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(located)


def _lay_meshes_on_the_cpu(recorder: Recorder, holders: Holders) -> None:
    """A mesh of GPUs has the same ranks and groups as one of CPUs. Its integer arithmetic is not part of the program."""
    construct = DeviceMesh.__init__

    def init_device_mesh_on_cpu(device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return init_device_mesh("cpu", *args, **kwargs)

    def construct_on_cpu(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        construct(self, "cpu", *args, **kwargs)

    holders.replace(init_device_mesh, init_device_mesh_on_cpu)
    DeviceMesh.__init__ = construct_on_cpu


def _outside_group(recorder: Recorder) -> Callable[[str], None]:
    def found(op_name: str) -> None:
        recorder.locate()
        source, rank = recorder.here(), dist.get_rank()
        message = f"rank {rank} calls {op_name} at {source} on a group that it is not in, so that nothing happens there"
        recorder.graph.findings.append(Finding("outside-group", message, (rank,), (source,) if source else ()))

    return found


# ---------------------------------------------------------------------- DistributedDataParallel
def _adjust_ddp(recorder: Recorder) -> None:
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
        self._has_hook = True
        register(self, state, hook)

    def prepare_with_hook(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not getattr(self, "_has_hook", False):
            recorder.assume("DDP averages each gradient bucket over its group with one all_reduce, as its default does")
            register_own(self, self.process_group, mean_of_gradients)
        return prepare(self, *inputs, **kwargs)

    dist._broadcast_coalesced = broadcast_each
    dist._verify_params_across_processes = lambda *args: None  # the broadcasts of the parameters are compared instead
    DistributedDataParallel.register_comm_hook = register_own
    DistributedDataParallel._pre_forward = prepare_with_hook


# ---------------------------------------------------------------------- FSDP2
def _adjust_fsdp(recorder: Recorder) -> None:
    """fully_shard refuses parameters without data, and asks for the streams of a device that is not there."""
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_init,
        _fsdp_param,
        _fsdp_param_group,
        _fsdp_state,
        _fully_shard,
    )

    def cpu_streams(device_type: str = "cuda") -> Any:
        recorder.assume("fully_shard runs its communication in program order, as on one stream")
        return torch.cpu

    for module in (_fsdp_collectives, _fsdp_init, _fsdp_param, _fsdp_param_group, _fsdp_state, _fully_shard):
        if hasattr(module, "_get_device_handle"):
            module._get_device_handle = cpu_streams
        if hasattr(module, "_get_device_from_mesh"):
            module._get_device_from_mesh = lambda mesh: _META
    _fsdp_param_group.FSDPParamGroup._validate_no_meta_params = lambda self: None


# ---------------------------------------------------------------------- pipelining
def _adjust_pipelining(recorder: Recorder, objects: ObjectExchange) -> None:
    """The stages vote, with tensors whose values they read, whether shapes are known beforehand: vote with objects."""
    from torch.distributed.pipelining.stage import InferenceMode

    warm_up = schedules._PipelineSchedule._warmup_p2p

    def vote(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        if not all(isinstance(stage, schedules.PipelineStage) for stage in stages):
            warm_up(self, stages, has_backward, p2p_done)
            return
        recorder.assume("the warm-up messages of pipeline schedules carry no data of the program")
        static = not any(InferenceMode.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
        votes: list[bool] = [False] * stages[0].group_size
        objects.all_gather_object(votes, static, stages[0].group)
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC if all(votes) else InferenceMode.DYNAMIC

    schedules._PipelineSchedule._warmup_p2p = vote


# ---------------------------------------------------------------------- megatron-core
def _adjust_megatron(recorder: Recorder, holders: Holders) -> None:
    """megatron-core keeps random states per GPU, and asks torch for the current GPU as the device of new tensors."""
    import contextlib

    import megatron.core
    from megatron.core.tensor_parallel import random

    _check_version(recorder, "megatron.core", megatron.core.__version__)
    statement = "megatron-core draws random numbers (dropout, initialisation) from one stream per rank"

    class OneStream:
        """Stands for the tracker of random states."""

        def is_initialized(self) -> bool:
            return True

        def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
            recorder.assume(statement)
            return contextlib.nullcontext()

        def get_states(self) -> dict[str, object]:
            return {}

        def set_states(self, states: object) -> None: ...

        def add(self, name: str, seed: int) -> None: ...

        def reset(self) -> None: ...

    holders.replace(random.get_cuda_rng_tracker, lambda *args, **kwargs: OneStream())
    torch.cuda.current_device = lambda: _META
