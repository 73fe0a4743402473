"""Which modules hold the functions that adapters replace."""

from __future__ import annotations

import _thread
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _collective_utils
from torch.nn import init

from graphguard.capture.torch.escapes.ambient import ORIGINALS

OBJECT_COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
                      "send_object_list", "recv_object_list")  # fmt: skip


class Holders:
    """Functions that may be replaced, with the names under which modules hold them. Found once, before the ranks are forked:
    a program may have imported a function under any name."""

    def __init__(self) -> None:
        originals = [dist.monitored_barrier, torch.tensor, torch.as_tensor, init_device_mesh, c10d._warn_not_in_group]
        originals += [init.trunc_normal_, init.orthogonal_, init.sparse_, init.dirac_]
        originals.append(torch.nn.functional.scaled_dot_product_attention)
        originals += [_collective_utils.mesh_scatter, _collective_utils.mesh_broadcast]
        originals += [getattr(dist, name) for name in OBJECT_COLLECTIVES]
        originals += [c10d.get_process_group_ranks, c10d.get_global_rank, c10d.get_group_rank]
        originals += [c10d.init_process_group, c10d.destroy_process_group]
        originals += [c10d.new_group, c10d.new_subgroups, c10d.new_subgroups_by_enumeration]
        originals.append(torch._C._to_dlpack)
        megatron: Any = sys.modules.get("megatron.core.parallel_state")
        originals += [] if megatron is None else [megatron.initialize_model_parallel]
        originals += [*ORIGINALS, _thread.start_new_thread]
        wanted = {id(original) for original in originals}
        self._found: dict[int, list[tuple[dict[str, Any], str]]] = {key: [] for key in wanted}
        for title, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", None)
            if isinstance(names, dict) and not title.startswith("graphguard."):
                for name, item in list(names.items()):
                    if id(item) in wanted:
                        self._found[id(item)].append((names, name))

    def __contains__(self, original: Any) -> bool:
        """Whether it was there when the holders were looked for: what a program imports later was not."""
        return id(original) in self._found

    def replace(self, original: Any, replacement: Any) -> None:
        for names, name in self._found[id(original)]:
            names[name] = replacement
