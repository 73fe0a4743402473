"""torch.distributed: process groups and meshes of ranks that are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphguard.capture.torch.adapters.around import OWN_WORLD
from graphguard.capture.torch.adapters.holders import Holders
from graphguard.capture.torch.world.collectives import group_of, know_groups, make_group, meet
from graphguard.errors import CaptureError
from graphguard.graph.findings import Finding

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder


def make_groups_of_one_backend(recorder: Recorder, holders: Holders) -> None:
    """Nothing is sent, whichever backend a group is for; what one backend alone offers is there for all. That a group is made
    is recorded where torch has given it its name: the ranks find each other by it."""
    know_groups()
    make, make_named = c10d._new_group_with_tag, c10d._new_process_group_helper

    def make_fake(
        ranks: Any = None, timeout: Any = None, backend: Any = None, backend_options: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return make(ranks, timeout, None, None, *args, **kwargs)

    def make_recorded(size: Any, rank: Any, ranks: Any, backend: Any, store: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if not ranks:
            raise recorder.failed(CaptureError(OWN_WORLD))
        made = make_named(size, rank, ranks, backend, store, name, *args, **kwargs)
        if made[0] is c10d.GroupMember.NON_GROUP_MEMBER or made[0].group_name == name:  # else there was one of this tag
            make_group(recorder, ranks, name)
        return made

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        if c10d._rank_not_in_group(group):
            c10d._warn_not_in_group("monitored_barrier")
            return
        meet(recorder, group_of(group or dist.group.WORLD), "monitored_barrier")

    c10d._new_group_with_tag = make_fake
    c10d._new_process_group_helper = make_recorded
    holders.replace(dist.monitored_barrier, monitored_barrier)


def keep_the_world(recorder: Recorder, holders: Holders) -> None:
    """A script that starts and ends torch.distributed itself, once, has the ranks of the mesh for its world."""
    end, started = dist.destroy_process_group, False

    def given(backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
              *_: Any, **__: Any) -> None:  # fmt: skip
        nonlocal started
        if started or recorder.ended is not None:
            raise recorder.failed(CaptureError(OWN_WORLD))
        started = True
        for name, said, have in (("world_size", world_size, dist.get_world_size()), ("rank", rank, dist.get_rank())):
            if said not in (-1, have):
                raise recorder.failed(
                    CaptureError(
                        f"the program starts torch.distributed with {name}={said}, and the mesh has {name}={have} here"
                    )
                )
        recorder.assume("the program starts and ends torch.distributed itself: its ranks are those of the mesh")

    def kept(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            recorder.ended = len(recorder.graph.nodes)
        else:
            end(group)

    holders.replace(dist.init_process_group, given)
    holders.replace(dist.destroy_process_group, kept)


def outside_group(recorder: Recorder) -> Callable[[str], None]:
    def found(op_name: str) -> None:
        recorder.locate()
        source, rank = recorder.here(), dist.get_rank()
        message = f"rank {rank} calls {op_name} at {source} on a group that it is not in, so that nothing happens there"
        recorder.graph.findings.append(Finding("outside-group", message, (rank,), (source,) if source else ()))

    return found


def lay_meshes_on_the_cpu(recorder: Recorder, holders: Holders) -> None:
    """A mesh of GPUs has the same ranks and groups as one of CPUs. Its integer arithmetic is not part of the program."""
    construct = DeviceMesh.__init__

    def init_device_mesh_on_cpu(device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return init_device_mesh("cpu", *args, **kwargs)

    def construct_on_cpu(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        construct(self, "cpu", *args, **kwargs)

    holders.replace(init_device_mesh, init_device_mesh_on_cpu)
    DeviceMesh.__init__ = construct_on_cpu
