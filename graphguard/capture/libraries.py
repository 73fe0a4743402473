"""What must be adjusted in torch and in libraries to run them without devices and without data. All of it, in one place.

Adjustments are made in the process of one rank, which ends with the capture. Each states what it assumes; the statement
becomes part of the graph when the adjusted code runs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.fsdp
import torch.distributed.optim  # imported before anything is replaced: it compiles code that names torch.tensor
import torch.distributed.pipelining.schedules as schedules
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _collective_utils
from torch.nn import init
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from graphguard.capture.detours import close_detours
from graphguard.capture.imports import when_imported
from graphguard.capture.waits import watch_waits
from graphguard.errors import CaptureError
from graphguard.findings import Finding

if TYPE_CHECKING:
    from graphguard.capture.objects import ObjectExchange
    from graphguard.capture.recorder import Recorder

TESTED = {"torch": "2.13.0", "megatron-core": "0.16.1"}
_META = torch.device("meta")
_OBJECT_COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
                       "send_object_list", "recv_object_list")  # fmt: skip


def adjust(recorder: Recorder, holders: Holders, objects: ObjectExchange | None = None) -> None:
    """Prepare this process for recording one program; `objects` is given for a rank."""
    _check_version(recorder, "torch", torch.__version__.split("+")[0])
    _keep_literal_data(recorder, holders)
    _read_values_from_the_graph(recorder)
    close_detours(recorder)
    _initialise_without_data(recorder, holders)
    _pretend_devices()
    _give_addresses()
    torch.compiler.set_stance("force_eager")  # compiled functions run as they were written
    _note_autocast(recorder)
    _locate_custom_functions(recorder)
    _adjust_megatron(recorder)
    if objects is None:
        return
    watch_waits(recorder)
    _make_groups_of_one_backend(holders)
    objects.recorder = recorder
    for name in _OBJECT_COLLECTIVES:
        holders.replace(getattr(dist, name), getattr(objects, name))
    holders.replace(c10d._warn_not_in_group, _outside_group(recorder))
    _lay_meshes_on_the_cpu(recorder, holders)
    _distribute_without_data(holders)
    _adjust_ddp(recorder)
    _adjust_fsdp(recorder)
    _adjust_pipelining(recorder, objects)


class Holders:
    """Which modules hold the functions that may be replaced, under which names. Found once, before the ranks are forked:
    a program may have imported a function under any name."""

    def __init__(self) -> None:
        originals = [dist.monitored_barrier, torch.tensor, torch.as_tensor, init_device_mesh, c10d._warn_not_in_group]
        originals += [init.trunc_normal_, init.orthogonal_, init.sparse_, init.dirac_]
        originals += [_collective_utils.mesh_scatter, _collective_utils.mesh_broadcast]
        originals += [getattr(dist, name) for name in _OBJECT_COLLECTIVES]
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


def _initialise_without_data(recorder: Recorder, holders: Holders) -> None:
    """Some initialisers leave tensors without data as they are."""

    def drawing(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            function(tensor, *args, **kwargs)
            if tensor.is_meta:
                recorder.assume(f"{function.__name__} draws any random numbers: their distribution is not recorded")
                with torch.no_grad():
                    tensor.normal_(generator=kwargs.get("generator"))
            return tensor

        return drawn

    @functools.wraps(init.dirac_)
    def dirac_(tensor: torch.Tensor, groups: int = 1, _function: Any = init.dirac_) -> torch.Tensor:
        with _disable_current_modes():
            data = _function(torch.empty(tensor.shape, dtype=tensor.dtype), groups)
        with torch.no_grad():
            return tensor.copy_(data)

    holders.replace(init.dirac_, dirac_)
    for function in (init.trunc_normal_, init.orthogonal_, init.sparse_):
        holders.replace(function, drawing(function))


def _read_values_from_the_graph(recorder: Recorder) -> None:
    """`.tolist()` and `.numpy()` read memory behind the recorder's back: answer them from constants."""

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.is_meta and recorder.aliases.storage_of(self) is None:
                return method(self, *args, **kwargs)
            with _disable_current_modes():
                result = method(recorder.constant_tensor(self), *args, **kwargs)
            if isinstance(result, np.ndarray):
                result.flags.writeable = False  # it does not share the tensor's memory, as the program may count on
            return result

        return wrapper

    for name in ("tolist", "numpy", "__array__"):
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))

    def unmodelled(self: torch.Tensor, *args: Any) -> None:
        recorder.locate()
        raise recorder.failed(CaptureError("apply_ and map_ run Python on every element, which is not modelled; use operators"))

    for name in ("apply_", "map_", "map2_"):  # without data they would do nothing, and say nothing
        setattr(torch.Tensor, name, unmodelled)


def _give_addresses() -> None:
    """Without data every address is 0: programs that look for shared memory would find it everywhere."""
    addresses: dict[int, int] = {}
    kept: list[torch.UntypedStorage] = []
    of_storage, of_tensor = torch.UntypedStorage.data_ptr, torch.Tensor.data_ptr

    def storage_address(self: torch.UntypedStorage) -> int:
        if self.device != _META or self.nbytes() == 0:
            return of_storage(self)  # type: ignore[no-any-return]
        if self._cdata not in addresses:
            kept.append(self)
            addresses[self._cdata] = len(kept) << 44
        return addresses[self._cdata]

    def address(self: torch.Tensor) -> int:
        if not self.is_meta or self.numel() == 0:
            return of_tensor(self)  # type: ignore[no-any-return]
        return storage_address(self.untyped_storage()) + int(self.storage_offset() * self.element_size())

    torch.UntypedStorage.data_ptr, torch.Tensor.data_ptr = storage_address, address


def _note_autocast(recorder: Recorder) -> None:
    """Tensors without data are on no device that autocast knows of: it changes none of their dtypes."""
    enter = torch.autocast.__enter__

    def noted(self: Any) -> Any:
        recorder.assume("torch.autocast changes the precision of operations, not their meaning: its casts are not recorded")
        return enter(self)

    torch.autocast.__enter__ = noted


def _with_index(given: Any) -> Any:
    """The device that "cuda" stands for: torch would ask the driver, which is not there, for the current one."""
    return torch.device("cuda", 0) if isinstance(given, (str, torch.device)) and str(given) == "cuda" else given


def _pretend_devices() -> None:
    """Programs name their GPUs: let them. The recorder puts every tensor on the meta device."""
    torch.cuda._lazy_init = lambda: None
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
    torch.Tensor.pin_memory = lambda self, device=None: self.clone()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to("cuda:0")
    torch.nn.Module.cuda = lambda self, device=None: self.to("cuda:0")
    to = torch.Tensor.to
    torch.Tensor.to = lambda self, *args, **kwargs: to(
        self, *map(_with_index, args), **{name: _with_index(arg) for name, arg in kwargs.items()}
    )
    foreach = torch.utils._foreach_utils._get_foreach_kernels_supported_devices
    torch.utils._foreach_utils._get_foreach_kernels_supported_devices = lambda: [*foreach(), "meta"]
    optimizer: Any = sys.modules["torch.optim.optimizer"]  # torch.optim hides it
    fused = optimizer._get_fused_kernels_supported_devices
    optimizer._get_fused_kernels_supported_devices = lambda: [*fused(), "meta"]
    torch.distributions.Distribution.set_default_validate_args(False)  # it reads values; programs are taken to be valid


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


def _make_groups_of_one_backend(holders: Holders) -> None:
    """Nothing is sent, whichever backend a group is for; what one backend alone offers is there for all."""
    make = c10d._new_group_with_tag

    def make_fake(
        ranks: Any = None, timeout: Any = None, backend: Any = None, backend_options: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return make(ranks, timeout, None, None, *args, **kwargs)

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        dist.barrier(group)

    c10d._new_group_with_tag = make_fake
    holders.replace(dist.monitored_barrier, monitored_barrier)


def _outside_group(recorder: Recorder) -> Callable[[str], None]:
    def found(op_name: str) -> None:
        recorder.locate()
        source, rank = recorder.here(), dist.get_rank()
        message = f"rank {rank} calls {op_name} at {source} on a group that it is not in, so that nothing happens there"
        recorder.graph.findings.append(Finding("outside-group", message, (rank,), (source,) if source else ()))

    return found


def _distribute_without_data(holders: Holders) -> None:
    """DTensor does not send tensors that have no data: its two functions again, without the question."""

    def mesh_scatter(
        output: torch.Tensor, scatter_list: Any, mesh: DeviceMesh, mesh_dim: int = 0, async_op: bool = False, *,
        group_src: int = 0,
    ) -> Any:  # fmt: skip
        group = mesh.get_group(mesh_dim)
        pieces = scatter_list if dist.get_rank(group) == group_src else None
        return dist.scatter(output, pieces, group=group, async_op=async_op, group_src=group_src)

    def mesh_broadcast(
        tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int = 0, async_op: bool = False, *, group_src: int = 0
    ) -> Any:
        return dist.broadcast(tensor, group=mesh.get_group(mesh_dim), async_op=async_op, group_src=group_src)

    holders.replace(_collective_utils.mesh_scatter, mesh_scatter)
    holders.replace(_collective_utils.mesh_broadcast, mesh_broadcast)


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

    construct = DistributedDataParallel.__init__

    def construct_anywhere(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> None:
        construct(self, module, None, None, *args, **kw)

    DistributedDataParallel.__init__ = construct_anywhere  # the devices that it is given do not exist
    dist.Reducer._rebuild_buckets = keep_buckets  # the ranks agree on new buckets by values that they read
    dist._broadcast_coalesced = broadcast_each
    dist._verify_params_across_processes = lambda *args: None  # the broadcasts of the parameters are compared instead
    DistributedDataParallel.register_comm_hook = register_own
    DistributedDataParallel._pre_forward = prepare_with_hook


# ---------------------------------------------------------------------- FSDP2
def _adjust_fsdp(recorder: Recorder) -> None:
    """fully_shard refuses parameters without data."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def accept_any(self: Any) -> None:
        recorder.assume("fully_shard runs its communication in program order, as on one stream")

    def follow_replaced_parameter(self: Any) -> None:
        reset(self)
        local, held = self.sharded_param._local_tensor, self._sharded_param_data
        if local.untyped_storage()._cdata == held.untyped_storage()._cdata:
            return
        if local.size() != self.padded_sharded_param_size:
            dim, length = self.fsdp_placement.dim, local.size(self.fsdp_placement.dim) if local.numel() else 0
            padded = local.new_zeros(self.padded_sharded_param_size)
            padded.narrow(dim, 0, length).copy_(local)
            self._sharded_param_data, self.sharded_param._local_tensor = padded.view(-1), padded.narrow(dim, 0, length)
        else:
            self._sharded_param_data = local.view(-1)
        self._sharding_spec = self.sharded_param._spec

    reset = FSDPParam.reset_sharded_param
    FSDPParam.reset_sharded_param = follow_replaced_parameter  # as in torch, where it does nothing without data
    FSDPParamGroup._validate_no_meta_params = accept_any
    FSDPParamGroup._validate_cpu_offload_params = accept_any


# ---------------------------------------------------------------------- pipelining
def _adjust_pipelining(recorder: Recorder, objects: ObjectExchange) -> None:
    """The stages vote, with tensors whose values they read, whether shapes are known beforehand: vote with objects."""
    from torch.distributed.pipelining import _backward as backward
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

    group_parameters = backward.get_param_groups

    def group_in_order(inputs: list[Any], parameters: list[Any], reverse_edges: Any) -> list[dict[str, Any]]:
        """Its groups are sets of autograd nodes, whose order changes from run to run."""
        place = {parameter: index for index, parameter in enumerate(parameters)}
        groups = group_parameters(inputs, parameters, reverse_edges)
        for group in groups:
            group["params"] = sorted(group["params"], key=place.__getitem__)
            group["intermediates"] = sorted(group["intermediates"], key=lambda node: node._sequence_nr())
        return sorted(groups, key=lambda group: place[group["params"][0]])

    schedules._PipelineSchedule._warmup_p2p = vote
    backward.get_param_groups = group_in_order


# ---------------------------------------------------------------------- megatron-core
def _adjust_megatron(recorder: Recorder) -> None:
    """megatron-core keeps random states per GPU, and asks torch for the current GPU as the device of new tensors."""

    def adjust_random(random: Any) -> None:
        _check_version(recorder, "megatron-core", importlib.metadata.version("megatron-core"))
        random.CudaRNGStatesTracker.add = lambda self, name, seed: self.set_states({**self.states_, name: seed})
        random.CudaRNGStatesTracker.fork = fork
        random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *args, **kwargs: None
        torch.cuda.current_device = lambda: _META

    def fork(self: Any, name: str = "") -> contextlib.AbstractContextManager[None]:
        recorder.assume("megatron-core draws random numbers (dropout, initialisation) from one stream per rank")
        return contextlib.nullcontext()

    def adjust_norm(torch_norm: Any) -> None:
        construct = torch_norm.WrappedTorchNorm.__new__

        def norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
            alone = copy.copy(config)
            alone.sequence_parallel = False  # refused, as only the fused norms mark their parameters
            module: torch.nn.Module = construct(cls, alone, *args, **kwargs)
            if config.sequence_parallel:
                recorder.assume("megatron-core's norms under sequence parallelism are torch's, their parameters marked as such")
                for parameter in module.parameters():
                    parameter.sequence_parallel = True
            return module

        torch_norm.WrappedTorchNorm.__new__ = norm

    when_imported("megatron.core.tensor_parallel.random", adjust_random)
    when_imported("megatron.core.transformer.torch_norm", adjust_norm)
