"""The Llama of the benchmarks with one fault in it, in a layer that is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphguard.bench.llama import Llama, own_rows

IN_A_LAYER = ("missing sum", "wrong scale", "wrong group", "missing gradient sum")
FAULTS = (*IN_A_LAYER, "wrong offset")


@dataclass(frozen=True)
class WrongLlama(Llama):
    """at: the layer of the fault; the offset is that of the embedding, which is in none."""

    fault: str = FAULTS[0]
    at: int = 0

    def _embedded(self, tokens: Tensor, weight: Tensor) -> Tensor:
        off = 1 if self.fault == "wrong offset" else 0
        return own_rows(tokens, weight, dist.get_rank() * weight.size(0) + off)

    def _leave(self, x: Tensor, layer: int | None = None) -> Tensor:
        if layer != self.at:
            return super()._leave(x, layer)
        match self.fault:
            case "missing sum":
                return x.chunk(dist.get_world_size())[dist.get_rank()] if self.splits_sequence else x
            case "wrong scale":
                return super()._leave(x, layer) / dist.get_world_size()
            case "wrong group":
                half: Tensor = _SumOfHalf.apply(x)
                return half.chunk(dist.get_world_size())[dist.get_rank()] if self.splits_sequence else half
        return super()._leave(x, layer)

    def _enter(self, x: Tensor, layer: int | None = None) -> Tensor:
        is_left_out = self.fault == "missing gradient sum" and layer == self.at and not self.splits_sequence
        return x if is_left_out else super()._enter(x, layer)

    def _is_summed(self, name: str) -> bool:
        is_left_out = self.fault == "missing gradient sum" and name == f"attention_norm{self.at}"
        return super()._is_summed(name) and not is_left_out


class _SumOfHalf(torch.autograd.Function):
    """A sum over the ranks of one half, where it is one over all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ranks = list(range(dist.get_world_size()))
        halves = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
        groups = [dist.new_group(half) for half in halves]
        whole = x.clone()
        dist.all_reduce(whole, group=groups[dist.get_rank() // len(halves[0])])
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
