"""Repairs that are proved: a change with which both programs verify, as code."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from graphguard.engine.proof import Proof
from graphguard.graph.ir import Mesh
from graphguard.graph.matching import Joint
from graphguard.locate.amend import Amend, amended

_MOST, _SECONDS = 3, 5.0  # changes that are proved, and how long that may take in all


def proved_repair(amends: Sequence[Amend], joint: Joint, mesh: Mesh, prove: Callable[[Joint], Proof]) -> str | None:
    """The first change with which all outputs are proved, without a condition."""
    begun = time.perf_counter()
    for amend in amends[:_MOST]:
        changed = amended(joint, amend, mesh)
        if changed is None or time.perf_counter() - begun > _SECONDS:
            continue
        proof = prove(changed)
        if proof.proved and not proof.conditions:
            return amend.told(mesh)
    return None
