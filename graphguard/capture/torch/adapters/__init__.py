"""What must be adjusted in torch and in libraries to run them without devices and without data: a file per part or library.

Adjustments are made in the process of one rank, which ends with the capture. Each states what it assumes; the statement
becomes part of the graph when the adjusted code runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.fsdp
import torch.distributed.optim  # imported before anything is replaced: it compiles code that names torch.tensor

from graphguard.capture.torch.adapters import (
    around,
    context,
    data,
    ddp,
    deepspeed,
    devices,
    dtensor,
    fsdp,
    groups,
    megatron,
    pipelining,
)
from graphguard.capture.torch.adapters.holders import OBJECT_COLLECTIVES, Holders
from graphguard.capture.torch.adapters.versions import check_version, warn_of_versions
from graphguard.capture.torch.escapes.detours import close_detours
from graphguard.capture.torch.escapes.device import present_devices
from graphguard.capture.torch.escapes.memory import close_memory
from graphguard.capture.torch.escapes.numbers import leave_numbers_unread
from graphguard.capture.torch.escapes.processes import watch_processes
from graphguard.capture.torch.escapes.text import guard_text
from graphguard.capture.torch.world.waits import watch_waits

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder
    from graphguard.capture.torch.world.objects import ObjectExchange

__all__ = ["Holders", "adjust", "warn_of_versions"]


def adjust(recorder: Recorder, holders: Holders, objects: ObjectExchange | None = None) -> None:
    """Prepare this process for recording one program; `objects` is given for a rank."""
    check_version(recorder, "torch")
    data.keep_literal_data(recorder, holders)
    close_memory(recorder, holders)
    close_detours(recorder)
    present_devices(recorder)
    guard_text(recorder)
    leave_numbers_unread(recorder)
    watch_processes(recorder, holders)
    data.initialise_without_data(recorder, holders)
    devices.pretend_devices()
    devices.give_addresses(recorder)
    torch.compiler.set_stance("force_eager")  # compiled functions run as they were written
    devices.note_autocast(recorder)
    devices.locate_custom_functions(recorder)
    megatron.adjust_megatron(recorder)
    deepspeed.adjust_deepspeed(recorder)
    if objects is not None:
        _adjust_for_ranks(recorder, holders, objects)


def _adjust_for_ranks(recorder: Recorder, holders: Holders, objects: ObjectExchange) -> None:
    watch_waits(recorder)
    groups.make_groups_of_one_backend(recorder, holders)
    groups.keep_the_world(recorder, holders)
    around.refuse_ways_around(recorder)
    objects.recorder = recorder
    for name in OBJECT_COLLECTIVES:
        holders.replace(getattr(dist, name), getattr(objects, name))
    holders.replace(c10d._warn_not_in_group, groups.outside_group(recorder))
    groups.lay_meshes_on_the_cpu(recorder, holders)
    dtensor.distribute_without_data(holders)
    dtensor.take_roots_of_sizes()
    ddp.adjust_ddp(recorder, objects)
    fsdp.adjust_fsdp(recorder)
    context.adjust_context_parallel(recorder, holders)
    pipelining.adjust_pipelining(recorder, objects)
