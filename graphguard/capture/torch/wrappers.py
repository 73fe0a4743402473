"""What a module's parameters are called without the wrappers around it, and what marks on them say of their layout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from graphguard.graph.ir import MARKED, Layout
from graphguard.graph.placement import Shard, StridedShard

# torch's, megatron-core's and deepspeed's; they hold `.module`
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "Float16Module", "DeepSpeedEngine"}
_INNER = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # how other wrappers call what they wrap


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """All parameters, tied ones under each of their names."""
    wrapped = _wrapped(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield _without_wrappers(name, wrapped), parameter


def named_modules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules inside, and itself, each under its first name; a wrapper has the name of what it wraps."""
    wrapped = _wrapped(module)
    for name, part in module.named_modules():
        yield _without_wrappers(name, wrapped), part


def _wrapped(module: torch.nn.Module) -> set[str]:
    """Where wrappers keep what they wrap."""
    return {f"{path}.module".lstrip(".") for path, part in module.named_modules() if type(part).__name__ in _WRAPPERS}


def _without_wrappers(name: str, wrapped: set[str]) -> str:
    parts = name.split(".")
    paths = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return ".".join(part for part, path in zip(parts, paths, strict=True) if path not in wrapped and part not in _INNER)


def gradients_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """By the parameters' first names."""
    first: dict[int, str] = {}
    return {
        name: parameter.grad for name, parameter in named_parameters(module) if first.setdefault(id(parameter), name) == name
    }


def layout_by_marks(parameter: Any) -> Layout | None:
    """What Megatron's marks say: the rank has every n-th of n * stride pieces along a dim."""
    dim = getattr(parameter, "partition_dim", -1)
    if not getattr(parameter, "tensor_model_parallel", False) or not isinstance(dim, int) or dim < 0:
        return None
    stride, group = getattr(parameter, "partition_stride", 1), _group(parameter)
    shape = [*parameter.shape[:dim], parameter.shape[dim] * max(1, len(group)), *parameter.shape[dim + 1 :]]
    placement = Shard(dim) if stride == 1 else StridedShard(dim, stride)
    return Layout(tuple(shape), (len(group),), group, (repr(placement),), MARKED)


def _group(parameter: Any) -> tuple[int, ...]:
    """The ranks that share the parameter, as far as megatron-core knows them."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return ()
    expert = not getattr(parameter, "allreduce", True)  # megatron-core's mark of an expert's parameter
    group = (state.get_expert_tensor_parallel_group if expert else state.get_tensor_model_parallel_group)(False)
    return () if group is None else tuple(dist.get_process_group_ranks(group))
