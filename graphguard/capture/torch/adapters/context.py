"""torch's context_parallel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as rings

from graphguard.capture.torch.adapters.holders import Holders
from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

_ops = torch.ops.aten
_KERNEL, _CPU_KERNEL = _ops._scaled_dot_product_flash_attention.default, _ops._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = _ops._scaled_dot_product_flash_attention_for_cpu_backward


def adjust_context_parallel(recorder: Recorder, holders: Holders) -> None:
    """Its rings go around kernels of GPUs, for which attention without a device is not sent to them. The kernel of the CPU
    returns the same two tensors: the attention to a block, and the log-sum-exp of its scores."""
    plain, forward, backward = (
        F.scaled_dot_product_attention, rings._templated_ring_attention, rings._templated_ring_attention_backward,
    )  # fmt: skip

    @functools.wraps(plain)
    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
    ) -> Any:
        if not isinstance(query, DTensor) or _KERNEL not in DTensor._op_dispatcher._custom_op_handlers:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if attn_mask is not None or query.shape[1] != key.shape[1]:
            told = "the rings of context_parallel are captured without attn_mask, and with as many heads of keys as of queries"
            raise recorder.failed(CaptureError(f"{told}; use is_causal, and repeat keys and values"))
        return _KERNEL(query, key, value, dropout_p, is_causal, scale=options.get("scale"))[0]

    def kernel(query: Any, key: Any, value: Any, is_causal: bool, dropout_p: float, scale: float | None) -> tuple[Any, ...]:
        recorder.assume(
            "the attention kernels of context_parallel compute what the CPU's does: the attention and its log-sum-exp"
        )
        state = torch.zeros((), dtype=torch.int64)  # of random numbers: there is no dropout
        return *_CPU_KERNEL(query, key, value, dropout_p, is_causal, scale=scale), None, None, 0, 0, state, state, None

    def kernel_backward(
        grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, dropout_p: float,
        scale: float | None, **unused: Any,
    ) -> Any:  # fmt: skip
        return _CPU_BACKWARD(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale=scale)

    holders.replace(plain, attend)
    rings._templated_ring_attention = lambda group, dim, op, **given: forward(group, dim, kernel, **given)
    rings._templated_ring_attention_backward = lambda group, dim, op, **given: backward(group, dim, kernel_backward, **given)
