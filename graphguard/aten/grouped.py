"""Products in groups (`torch._grouped_mm`) by their definition. torch's kernels take bfloat16 alone, or rows of 16 bytes."""

from __future__ import annotations

import math
from typing import Any

import torch

GROUPED = "aten._grouped_mm.default"
_ENDS = 2  # the place of `offs` among the arguments


def ends_of(args: Any, kwargs: Any) -> Any:
    """The argument that says where each group ends; None if there is none."""
    return kwargs.get("offs", args[_ENDS] if len(args) > _ENDS else None)


def shape_of(a: torch.Tensor, b: torch.Tensor, groups: int) -> tuple[int, ...]:
    """Of rows in groups times a matrix for each; of two matrices, a product for each group of the summed dim."""
    return (a.shape[0], b.shape[-1]) if b.dim() == 3 else (groups, a.shape[0], b.shape[-1])


def is_defined(a: torch.Tensor, b: torch.Tensor, offs: Any, bias: Any = None, out_dtype: Any = None) -> bool:
    """Whether the definition covers a call."""
    plain = isinstance(offs, torch.Tensor) and offs.dim() == 1 and bias is None and out_dtype in (None, a.dtype)
    return plain and a.dim() == 2 and b.dim() in (2, 3) and a.shape[1] == b.shape[-2]


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows beyond the last group are not written."""
    ends = offs.tolist()
    spans = list(zip([0, *ends], ends, strict=False))
    if b.dim() == 2:
        return torch.stack([a[:, low:high] @ b[low:high] for low, high in spans])
    rows = [a[low:high] @ b[number] for number, (low, high) in enumerate(spans)]
    return torch.cat([*rows, a.new_full((a.shape[0] - ends[-1], b.shape[2]), math.nan)])
