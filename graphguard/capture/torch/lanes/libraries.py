"""What torch's own libraries do with ranks in Python, for many ranks at once."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from graphguard.capture.torch.lanes.groups import Teams
from graphguard.capture.torch.lanes.number import settled, varies
from graphguard.capture.torch.lanes.parts import NumberList, Parts
from graphguard.capture.torch.lanes.recorder import LaneRecorder
from graphguard.capture.torch.world.collectives import communicate, work_handle


def send_to_peers(recorder: LaneRecorder, teams: Teams) -> None:
    """Messages to and from a rank that varies: torch's own methods take one number."""

    def record(op: str, group: Any, tensors: Any, peer: Any, tag: int) -> Any:
        recorder.locate()
        team = teams.group_of(group)
        reads, fills = (tensors[0], []) if op == "dist.send" else ([], [tensors[0]])
        return work_handle(communicate(recorder, op, team, reads, fills, peer=team.member(peer), tag=tag))  # type: ignore[arg-type]

    bare_send, bare_recv = ProcessGroup.send, ProcessGroup.recv

    def send(group: Any, tensors: Any, dst: Any, tag: int) -> Any:
        return record("dist.send", group, tensors, dst, tag) if varies(dst) else bare_send(group, tensors, settled(dst), tag)

    def recv(group: Any, tensors: Any, src: Any, tag: int) -> Any:
        return record("dist.recv", group, tensors, src, tag) if varies(src) else bare_recv(group, tensors, settled(src), tag)

    ProcessGroup.send, ProcessGroup.recv = send, recv  # type: ignore[method-assign, assignment]


def adjust_dtensor() -> None:
    """Lists of shards and of their paddings are read at a place that varies."""
    from torch.distributed.tensor import Shard

    bare_split, bare_select = Shard._split_tensor_helper, Shard._select_split_tensor

    def split(tensor: torch.Tensor, num_chunks: int, with_padding: bool, contiguous: bool, dim: int) -> Any:
        shards, padding = bare_split(tensor, num_chunks, with_padding, contiguous, dim)
        return shards, NumberList(padding)

    def select(
        self: Any, tensor: torch.Tensor, num_chunks: int, index: Any, *, with_padding: bool = True, contiguous: bool = True,
        clone: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        options = {"with_padding": with_padding, "contiguous": contiguous, "clone": clone}
        if not varies(index) or (with_padding and tensor.size(self.dim) % num_chunks):
            return bare_select(self, tensor, num_chunks, int(index), **options)
        part = Parts.of(Shard._custom_chunk(tensor, num_chunks, dim=self.dim), tensor, self.dim)[index]
        return part.clone() if clone else part.contiguous() if contiguous else part

    Shard._split_tensor_helper, Shard._select_split_tensor = staticmethod(split), select


def adjust_fsdp() -> None:
    """fully_shard takes its own of the parts of each parameter, which some of its modules know by name."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_param

    bare = _fsdp_common._chunk_with_empty

    def chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> Any:
        with torch.no_grad():  # it makes parameters of them, or asks for their sizes
            return Parts.of(bare(tensor, num_chunks, dim), tensor, dim)

    for module in (_fsdp_collectives, _fsdp_common, _fsdp_param):
        if getattr(module, "_chunk_with_empty", None) is bare:
            module._chunk_with_empty = chunk
