"""What is captured: two programs, and the input relation between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Replicate

from graphguard.capture.torch.program import Program
from graphguard.capture.torch.relation.inputs import Input, check_placements
from graphguard.errors import UsageError
from graphguard.graph.ir import Mesh

LocalInputs = Callable[[dict[str, torch.Tensor], dict[str, int]], Mapping[str, Any]]


@dataclass(frozen=True)
class Subject:
    """Two programs and the input relation between them."""

    sequential: Program
    distributed: Program
    mesh: Mesh
    inputs: Mapping[str, Input]
    local_inputs: LocalInputs | None = None
    opaque: frozenset[str] | None = None  # operators with a lemma, which are not looked into; None: those of the process

    def check(self) -> None:
        for name, spec in self.inputs.items():
            if not isinstance(spec, Input):
                raise UsageError(f"input {name!r} is {type(spec).__name__}; write gg.Input(shape, placement)")
            if self.local_inputs is not None and (spec.local or not isinstance(spec.placement, Replicate)):
                raise UsageError(f"input {name!r} has a placement beside local_inputs=, which already says what ranks get")
            check_placements(name, spec, self.mesh)
        self.sequential.check(list(self.inputs))
        self.distributed.check(list(self.inputs) if self.local_inputs is None else None)
