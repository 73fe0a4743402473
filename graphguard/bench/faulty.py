"""The models of the benchmarks with one fault each, in the middle of what they are put in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphguard.bench.models.decoder import Parameters
from graphguard.bench.models.megatron import Groups, Held, Megatron

FAULTS = ("the gradient of a norm is not summed", "a layer's result is halved")


@dataclass(frozen=True)
class Faulty(Megatron):
    fault: str = FAULTS[0]

    @property
    def at(self) -> int:
        return self.sizes.layers // 2

    def _synchronised(self, grad: Any, held: Held, groups: Groups) -> Tensor:
        if self.fault == FAULTS[0] and held.layer == self.at and held.meets_own_tokens:
            held = held._replace(tp=self.held()["embedding"].tp)  # as if each rank had a part of its own
        return super()._synchronised(grad, held, groups)

    def run_layer(self, x: Tensor, p: Parameters, layer: int, turn: Any, groups: Groups) -> Tensor:
        y = super().run_layer(x, p, layer, turn, groups)
        return y * 0.5 if self.fault == FAULTS[1] and layer == self.at else y
