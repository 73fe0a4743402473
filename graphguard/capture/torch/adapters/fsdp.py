"""torch's fully_shard (FSDP2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder


def adjust_fsdp(recorder: Recorder) -> None:
    """fully_shard refuses parameters without data."""

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
