"""Repairs that are proved: a change with which both programs verify, as code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphguard.engine.proof import Proof
from graphguard.graph.ir import Mesh
from graphguard.graph.limits import Stops
from graphguard.graph.matching import Joint
from graphguard.locate.amend import Amend, amended


def proved_repair(
    amends: Sequence[Amend], joint: Joint, mesh: Mesh, prove: Callable[[Joint], Proof], stops: Stops
) -> str | None:
    """The first change with which all outputs are proved, without a condition."""
    if amends and stops.over("repair_operations", sum(len(graph.nodes) for graph in joint.graphs)):
        return None
    for number, amend in enumerate(amends, 1):
        if stops.over("repair_proofs", number):
            return None
        changed = amended(joint, amend, mesh)
        proof = None if changed is None else prove(changed)
        if proof is not None and proof.proved and not proof.conditions:
            return amend.told(mesh)
    return None
