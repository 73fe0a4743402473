"""Communication as nodes of the `dist` namespace: from c10d's operators and from the functional collectives.

Every node carries `group`, the ranks in group order; roots and peers are ranks of the world. What a node reads are its
arguments; what it fills are its outputs. Work that runs in the background has an id, which the `dist.wait` node names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from graphguard.aten.operators import Operator
from graphguard.capture.torch.escapes.device import is_meta
from graphguard.errors import CaptureError
from graphguard.graph.collectives import COLLECTIVES, MESSAGES, NEW_GROUP, REDUCTIONS, WAIT, Collective, Count
from graphguard.graph.findings import Finding
from graphguard.graph.ir import Arg

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

Tensors = Sequence[torch.Tensor]


# ---------------------------------------------------------------------- groups and reduce operations
class Group(tuple[int, ...]):
    """The ranks of a process group, in group order. Groups over the same ranks are told apart by their channel, the
    order of their creation: their collectives do not wait for each other."""

    channel: int

    @property
    def attributes(self) -> dict[str, Arg]:
        return {"group": tuple(self), **({"channel": self.channel} if self.channel else {})}

    def member(self, number: int) -> int:
        """The rank of the job that has a number in the group."""
        if not 0 <= number < len(self):
            raise ValueError(f"the group of ranks {list(self)} has no rank {number} to send to or receive from")
        return self[number]


def group_of(given: Any) -> Group:
    """A group, given by its name, as a ProcessGroup, or in the boxed form that operators receive."""
    if _Lookup.of_many_ranks is not None:
        return _Lookup.of_many_ranks(given)  # type: ignore[no-any-return]
    if isinstance(given, str):
        given = dist.distributed_c10d._resolve_process_group(given)
    elif isinstance(given, torch.ScriptObject):
        given = ProcessGroup.unbox(given)
    group = Group(dist.get_process_group_ranks(given))
    group.channel = _channel(tuple(group), given.group_name)
    return group


class _Lookup:
    """Of this process: who knows the groups where it stands for many ranks."""

    of_many_ranks: Callable[[Any], Any] | None = None


def look_groups_up_with(lookup: Callable[[Any], Any]) -> None:
    _Lookup.of_many_ranks = staticmethod(lookup)


_names: dict[tuple[int, ...], list[str]] = {}  # of the groups over the same ranks, those that are destroyed too


def _channel(ranks: tuple[int, ...], name: str) -> int:
    """Which of the groups over the same ranks it is, in the order in which they were made."""
    names = _names.setdefault(ranks, [])
    if name not in names:
        names.append(name)
    return names.index(name)


def know_groups() -> None:
    """Count the groups that there are when the program begins, and no others: the world, and those of its mesh."""
    _names.clear()
    if _Lookup.of_many_ranks is not None:
        return
    for group, name in dist.distributed_c10d._world.pg_names.items():
        _channel(tuple(dist.get_process_group_ranks(group)), name)


def make_group(recorder: Recorder, ranks: Sequence[int], name: str) -> None:
    """A rank makes a group. Its members meet; a rank that is not in it counts it, and goes on."""
    group, work = Group(ranks), new_work(recorder)
    recorder.locate()
    _require_program(recorder, "makes a group of ranks")
    recorder.emit(NEW_GROUP, (), {"group": tuple(group), "name": name, "work": work}, ())
    if recorder.by_class:
        return  # which of the ranks wait, `RankClass` knows
    if recorder.graph.rank in group:
        _channel(tuple(group), name)
        wait(recorder, work)


def _require_program(recorder: Recorder, does: str) -> None:
    if not recorder.is_program:
        raise recorder.failed(CaptureError(
            f"the input relation {does}; it says which part of the inputs a rank has, so communicate in the program itself"
        ))  # fmt: skip


def reduce_arguments(reduce_op: Any) -> dict[str, Arg]:
    if isinstance(reduce_op, str):
        return {"reduce": reduce_op.lower()}
    name = REDUCTIONS[reduce_op.op()]
    if name != "premul_sum":
        return {"reduce": name}
    return {"reduce": name, "factor": _premultiplier()}


def _premultiplier() -> float:
    """The factor of a premultiplied sum. The operator receives it in a form that cannot be read, so it is taken from
    the options that the calling function of torch.distributed holds: the nearest frame that has one decides."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        for local in list(frame.f_locals.values()):
            reduce_op = getattr(local, "reduceOp", local)
            if isinstance(reduce_op, dist.ReduceOp) and reduce_op == dist.ReduceOp.PREMUL_SUM:
                state = reduce_op.__getstate__()
                factor = state[1] if isinstance(state, tuple) else None
                if isinstance(factor, (int, float)):
                    return float(factor)
                raise CaptureError("the factor of a PREMUL_SUM must be a Python number; a tensor as the factor is not modelled")
        frame = frame.f_back
    raise CaptureError("the factor of a PREMUL_SUM is known only for `dist.*` calls")


# ---------------------------------------------------------------------- recording
def communicate(
    recorder: Recorder,
    op: str,
    group: Group,
    reads: Any,
    fills: Tensors,
    **attributes: Arg,
) -> int:
    """Append one communication node and say what its buffers hold from now on. Returns the id of its work."""
    return communicate_as(recorder, new_work(recorder), op, group, reads, fills, attributes)


def new_work(recorder: Recorder) -> int:
    """A fresh work id; inside a coalesced block, the block's own."""
    if recorder.coalesced is not None:
        return recorder.coalesced
    recorder.next_work += 1
    return recorder.next_work


def communicate_as(
    recorder: Recorder,
    work: int,
    op: str,
    group: Group,
    reads: Any,
    fills: Tensors,
    attributes: dict[str, Arg],
    *,
    copied: bool = False,
) -> int:
    """As `communicate`, under a given work id. What is filled may be fresh memory that holds nothing yet. `copied` says
    that the operator sends a contiguous copy of what it reads, which may then be changed at once."""
    if recorder.graph.rank is None:
        return _alone(recorder, work, op, group, reads, fills, **attributes)
    _require_program(recorder, f"communicates ({op})")
    aliases = recorder.aliases
    read_tensors = [reads] if isinstance(reads, torch.Tensor) else list(reads)
    read_cells = [aliases.cell(tensor) for tensor in read_tensors]
    fill_cells = [aliases.cell(tensor) if aliases.storage_of(tensor) else None for tensor in fills]
    operands = tuple([aliases.read(cell) for cell in read_cells])
    outputs = tuple([recorder.new_value(t.shape, t.dtype) for t in fills])
    args: tuple[Arg, ...] = operands if isinstance(reads, torch.Tensor) else ((operands,) if operands else ())
    source = recorder.here()
    recorder.races.read(read_cells, source)
    recorder.races.write([cell for cell in fill_cells if cell], source)
    sent = [] if copied else read_tensors
    if not COLLECTIVES[op].contiguous:
        attributes = attributes | _strides([*sent, *fills])
    recorder.emit(op, args, {**attributes, **group.attributes, "work": work}, outputs)
    _check_layout(recorder, op, sent, fills)
    filled = []
    for tensor, cell, output in zip(fills, fill_cells, outputs, strict=True):
        if cell is None:
            cell = aliases.bind(tensor, output)
        else:
            aliases.write(cell, output, in_flight=True)
        filled.append(cell)
    recorder.races.start(work, op, [] if copied else read_cells, filled, source)
    recorder.results.setdefault(work, []).extend(fills)
    return work


def _alone(recorder: Recorder, work: int, op: str, group: Group, reads: Any, fills: Tensors, **attributes: Arg) -> int:
    """The sequential program, in a group of its own making (megatron-core needs one): it sends to itself, which is a copy."""
    if len(group) != 1 or op in MESSAGES:
        raise CaptureError(f"the sequential program communicates with other ranks ({op}); it runs on one device")
    read_tensors = [reads] if isinstance(reads, torch.Tensor) else list(reads)
    for tensor, filled in zip(read_tensors, fills, strict=True):
        with recorder.resumed():
            sent = tensor * attributes["factor"] if "factor" in attributes else tensor
            if recorder.aliases.storage_of(filled) is None:
                recorder.aliases.bind(filled, recorder.value(sent.reshape(filled.shape)))
            elif sent is not filled:
                filled.copy_(sent.reshape(filled.shape))
    recorder.results.setdefault(work, []).extend(fills)
    return work


def wait(recorder: Recorder, work: int) -> None:
    if recorder.graph.rank is not None:
        recorder.races.wait(work)
        recorder.emit(WAIT, (), {"work": work}, ())


def _strides(tensors: Tensors) -> dict[str, Arg]:
    """How strided buffers lie in memory: elementwise communication needs it to be alike on all ranks."""
    strided = tuple(tuple(t.stride()) for t in tensors if not t.is_contiguous())
    return {"strides": strided} if strided else {}


def _check_layout(recorder: Recorder, op: str, reads: Tensors, fills: Tensors) -> None:
    """Backends take a buffer for the memory that follows its first element: it must be in row-major order, or, for
    elementwise communication, at least without gaps."""
    contiguous = COLLECTIVES[op].contiguous
    fits = torch.Tensor.is_contiguous if contiguous else _has_no_gaps
    checked = contiguous or ("reads", "fills")
    for tensor in [*(reads if "reads" in checked else ()), *(fills if "fills" in checked else ())]:
        if not fits(tensor):
            source = recorder.here()
            message = (
                f"{op} at {source} works on a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}, "
                "which is not contiguous; make it so with `.contiguous()`"
            )
            rank = recorder.graph.rank
            finding = Finding("strided-buffer", message, () if rank is None else (rank,), (source,) if source else ())
            if finding not in recorder.graph.findings:
                recorder.graph.findings.append(finding)
            return


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    """Whether the tensor is some permutation of contiguous memory."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and tensor.numel():
            if stride != expected:
                return False
            expected *= size
    return True


# ---------------------------------------------------------------------- c10d
def work_handle(work: int) -> FakeWork:
    """What the program gets in hand; `watch_waits` reads the id back."""
    handle = FakeWork()
    handle.seq_id = work
    return handle


def _given(info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in info.func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _c10d(op: str, reads: str = "", fills: str = "", coalesced: bool = False) -> Callable[..., Any]:
    """An operator of c10d, and the names of its arguments that are read and filled. A coalesced one is a node per tensor, all
    under one work id."""
    row = COLLECTIVES[op]

    def handler(recorder: Recorder, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _given(info, args, kwargs)
        group = group_of(given["process_group"])
        if coalesced:
            filled = zip(*given[fills], strict=True) if row.fills.is_list else given[fills]
            calls = list(zip(given[reads], filled, strict=True))
        else:
            calls = [(_buffers(row.reads, given.get(reads)), _buffers(row.fills, given.get(fills)))]
        work, attributes = new_work(recorder), _attributes(row, group, given)
        for read, filled in calls:
            filled = [filled] if isinstance(filled, torch.Tensor) else filled
            communicate_as(recorder, work, op, group, read, filled, attributes)
        boxed = work_handle(work).boxed()
        return (args[0], boxed) if len(info.func._schema.returns) > 1 else boxed

    return handler


def _buffers(count: Count, given: Any) -> Any:
    """A tensor, or a list of one per rank. Most operators take either in a list, which once had one per local device."""
    if count is Count.NONE:
        return []
    if isinstance(given, torch.Tensor) or (count.is_list and (not given or isinstance(given[0], torch.Tensor))):
        return given
    if len(given) != 1:
        raise CaptureError("communication of several tensors per rank in one call is not modelled; call it once per tensor")
    return given[0]


def _attributes(row: Collective, group: Group, given: dict[str, Any]) -> dict[str, Arg]:
    """What a collective needs, from the arguments of torch's operator."""
    found: dict[str, Arg] = {}
    for name in row.needs:
        match name:
            case "reduce":
                found |= reduce_arguments(given["reduce_op"])
            case "root":
                found[name] = group.member(given["root_rank"] if "root_rank" in given else given["src"])
            case "peer":
                found[name] = group.member(given["dst"] if "dst" in given else given["src"])
            case "output_splits" | "input_splits":
                side = name.removesuffix("_splits")
                found[name] = _splits(given[f"{side}_split_sizes"], given.get(side), group)
            case _:
                found[name] = given[name]
    return found


def _splits(sizes: Any, tensor: Any, group: Group) -> tuple[int, ...]:
    """Rows per rank. Left out, they are equal; a remainder stays visible to the matching of ranks, which reports it."""
    if sizes or tensor is None:
        return tuple(int(size) for size in sizes)
    rows = tensor.shape[0] if tensor.dim() else 1
    return (rows // len(group),) * len(group)


def _receive_any(recorder: Recorder, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise CaptureError("a receive from any source may match different sends in different runs; name the source rank")


def _monitored_barrier(recorder: Recorder, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    meet(recorder, group_of(args[1]), "monitored_barrier")


def meet(recorder: Recorder, group: Group, what: str, **attributes: Arg) -> None:
    """A barrier by another name: messages that carry nothing of the program, for which the ranks wait all the same."""
    recorder.locate()
    wait(recorder, communicate(recorder, "dist.barrier", group, [], [], objects=what, **attributes))


# ---------------------------------------------------------------------- functional collectives
_COPYING = {"dist.all_reduce", "dist.broadcast"}  # they clone their input and work on the clone in place


def _functional(op: str, outputs: Callable[..., Tensors], in_place: bool = False) -> Callable[..., Any]:
    """A collective that returns its result; the result must be waited for with `wait_tensor`."""

    def handler(recorder: Recorder, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _given(info, args, kwargs)
        group = group_of(given["group_name"])
        inputs = given["inputs"] if "inputs" in given else [given["input"]]
        inputs = [_dense(recorder, tensor) for tensor in inputs]
        attributes = _attributes(COLLECTIVES[op], group, given)
        results = [given["out"]] if "out" in given else inputs if in_place else outputs(inputs, group, given)
        work = new_work(recorder)
        for tensor, result in zip(inputs, results, strict=True):
            copied = not in_place and (op in _COPYING or not tensor.is_contiguous())
            communicate_as(recorder, work, op, group, tensor, [result], attributes, copied=copied)
        return list(results) if "inputs" in given else results[0]

    return handler


def _dense(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    if is_meta(tensor):
        return tensor
    return recorder.aliases.without_data(recorder.aliases.cell(tensor))


def _like(inputs: Tensors, group: Group, given: dict[str, Any]) -> Tensors:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]


def _gathered(inputs: Tensors, group: Group, given: dict[str, Any]) -> Tensors:
    return [tensor.new_empty((tensor.shape[0] * len(group), *tensor.shape[1:])) for tensor in inputs]


def _scattered(inputs: Tensors, group: Group, given: dict[str, Any]) -> Tensors:
    return [tensor.new_empty((tensor.shape[0] // len(group), *tensor.shape[1:])) for tensor in inputs]


def _exchanged(inputs: Tensors, group: Group, given: dict[str, Any]) -> Tensors:
    return [tensor.new_empty((sum(given["output_split_sizes"]), *tensor.shape[1:])) for tensor in inputs]


def _wait_tensor(recorder: Recorder, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor: torch.Tensor = args[0]
    storage = recorder.aliases.storage_of(tensor)
    for work in sorted({window.work for window in storage.in_flight if window.fills} if storage else ()):
        wait(recorder, work)
    return tensor


def _wrap(recorder: Recorder, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return AsyncCollectiveTensor(args[0])  # the same memory, marked as not waited for


def _shard_dim_all_to_all(recorder: Recorder, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """DTensor's change of the sharded dim: cut along one dim, exchange, join along another."""
    tensor, gather_dim, shard_dim, group_name = args
    group = group_of(group_name)
    with recorder.resumed():
        pieces = [piece.contiguous() for piece in tensor.chunk(len(group), shard_dim)]
        received = [torch.empty_like(piece) for piece in pieces]
    wait(recorder, communicate(recorder, "dist.all_to_all", group, pieces, received))
    with recorder.resumed():
        return torch.cat(received, gather_dim)


# ---------------------------------------------------------------------- operators that are recorded as other torch code
def _as_fallback(name: str) -> Callable[..., Any]:
    """A product that overlaps with communication (asynchronous tensor parallelism), as torch defines it where it cannot."""

    def function(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed import _symmetric_memory

        return getattr(_symmetric_memory, f"_{name}_fallback")(*args, **kwargs)

    return inlined(function, returns=True)


def _copy_in(
    inputs: list[torch.Tensor], output: torch.Tensor, splits: list[int], numel: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    own = output.narrow(0, numel * rank, numel)
    torch._foreach_copy_(torch.split(own, splits), inputs)
    return own, output


def _chunk_cat(tensors: list[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor) -> None:
    """torch._chunk_cat with operators that are known by themselves: one row per chunk, of which the last may be padded."""
    if dim != 0:
        torch._chunk_cat(tensors, dim, num_chunks, out=out)
        return
    rows = []
    for tensor in tensors:
        missing = -tensor.size(0) % num_chunks
        if missing:
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        rows.append(tensor.reshape(num_chunks, -1))
    out.copy_(torch.cat(rows, 1))


def inlined(function: Callable[..., Any], returns: bool = False) -> Callable[..., Any]:
    """An operator that is registered around plain torch code: record that code instead."""

    def handler(recorder: Recorder, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with recorder.resumed():
            result = function(*args, **kwargs)
        return result if returns else None

    return handler


HANDLERS: dict[str, Callable[..., Any]] = {
    "c10d.allreduce_.default": _c10d("dist.all_reduce", "tensors", "tensors"),
    "c10d.allreduce_coalesced_.default": _c10d("dist.all_reduce", "tensors", "tensors", coalesced=True),
    "c10d.allgather_.default": _c10d("dist.all_gather", "input_tensors", "output_tensors"),
    "c10d.allgather_coalesced_.default": _c10d("dist.all_gather", "input_list", "output_lists", coalesced=True),
    "c10d._allgather_base_.default": _c10d("dist.all_gather_into_tensor", "input_tensor", "output_tensor"),
    "c10d.allgather_into_tensor_coalesced_.default": _c10d("dist.all_gather_into_tensor", "inputs", "outputs", coalesced=True),
    "c10d.reduce_scatter_.default": _c10d("dist.reduce_scatter", "input_tensors", "output_tensors"),
    "c10d._reduce_scatter_base_.default": _c10d("dist.reduce_scatter_tensor", "input_tensor", "output_tensor"),
    "c10d.reduce_scatter_tensor_coalesced_.default": _c10d("dist.reduce_scatter_tensor", "inputs", "outputs", coalesced=True),
    "c10d.alltoall_.default": _c10d("dist.all_to_all", "input_tensors", "output_tensors"),
    "c10d.alltoall_base_.default": _c10d("dist.all_to_all_single", "input", "output"),
    "c10d.broadcast_.default": _c10d("dist.broadcast", "tensors", "tensors"),
    "c10d.reduce_.default": _c10d("dist.reduce", "tensors", "tensors"),
    "c10d.gather_.default": _c10d("dist.gather", "input_tensors", "output_tensors"),
    "c10d.scatter_.default": _c10d("dist.scatter", "input_tensors", "output_tensors"),
    "c10d.send.default": _c10d("dist.send", reads="tensors"),
    "c10d.recv_.default": _c10d("dist.recv", fills="tensors"),
    "c10d.recv_any_source_.default": _receive_any,
    "c10d.barrier.default": _c10d("dist.barrier"),
    "c10d.monitored_barrier_.default": _monitored_barrier,
    "_c10d_functional.all_reduce.default": _functional("dist.all_reduce", _like),
    "_c10d_functional.all_reduce_.default": _functional("dist.all_reduce", _like, in_place=True),
    "_c10d_functional.all_reduce_coalesced.default": _functional("dist.all_reduce", _like),
    "_c10d_functional.all_reduce_coalesced_.default": _functional("dist.all_reduce", _like, in_place=True),
    "_c10d_functional.all_gather_into_tensor.default": _functional("dist.all_gather_into_tensor", _gathered),
    "_c10d_functional.all_gather_into_tensor_out.default": _functional("dist.all_gather_into_tensor", _gathered),
    "_c10d_functional.all_gather_into_tensor_coalesced.default": _functional("dist.all_gather_into_tensor", _gathered),
    "_c10d_functional.reduce_scatter_tensor.default": _functional("dist.reduce_scatter_tensor", _scattered),
    "_c10d_functional.reduce_scatter_tensor_out.default": _functional("dist.reduce_scatter_tensor", _scattered),
    "_c10d_functional.reduce_scatter_tensor_coalesced.default": _functional("dist.reduce_scatter_tensor", _scattered),
    "_c10d_functional.all_to_all_single.default": _functional("dist.all_to_all_single", _exchanged),
    "_c10d_functional.broadcast.default": _functional("dist.broadcast", _like),
    "_c10d_functional.broadcast_.default": _functional("dist.broadcast", _like, in_place=True),
    "_c10d_functional.wait_tensor.default": _wait_tensor,
    "_c10d_functional._wrap_tensor_autograd.default": _wrap,
    "_dtensor.shard_dim_alltoall.default": _shard_dim_all_to_all,
    "symm_mem.fused_all_gather_matmul.default": _as_fallback("fused_all_gather_matmul"),
    "symm_mem.fused_matmul_reduce_scatter.default": _as_fallback("fused_matmul_reduce_scatter"),
    "fsdp.all_gather_copy_in.default": inlined(_copy_in, returns=True),
    "fsdp.split_with_sizes_copy.default": inlined(torch.split_with_sizes_copy),
    "fsdp.chunk_cat.default": inlined(_chunk_cat),
    "fsdp.copy_.default": inlined(torch.Tensor.copy_),
}
