"""Classes of ranks together: which operations of which classes are one communication, and what is wrong if they do not fit.

As `matching` does it of single ranks, a class at a time. Ranks of a class that are not stopped by the same things (the stages
of a pipeline that do the same) are parted when that is seen, and all are played again: what is found holds of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphguard.errors import InternalError
from graphguard.graph.alike import classes_of, joined
from graphguard.graph.class_faults import left_over, stuck
from graphguard.graph.class_play import Play
from graphguard.graph.ir import Graph, Mesh
from graphguard.graph.matching import Joint, Mismatch
from graphguard.graph.rank_class import RankClass
from graphguard.graph.turns import Parting
from graphguard.graph.world import World


def join_classes(classes: Sequence[RankClass], mesh: Mesh) -> World:
    """Match the communication of all classes. They may come back in more parts than they were."""
    parts = sorted(classes, key=_first)
    findings = [finding for each in parts for finding in each.graph.findings]
    while True:
        try:
            play = Play(parts, mesh)
            play.run()
            findings += [stuck(play)] if play.waiting() else list(left_over(play))
            return World(mesh, parts, {} if findings else play.calls(), findings)
        except Mismatch as stop:
            return World(mesh, parts, {}, [*findings, stop.finding])
        except Parting as parting:
            parts = _parted(parts, parting)


def world_of(joint: Joint, relations: Sequence[Graph], apart: bool = False) -> World:
    """Matched ranks as classes; or each rank as one of its own. What fits together rank by rank does so by classes."""
    mesh = joint.graphs[0].mesh or Mesh.of({"world": len(joint.graphs)})
    return _fitting(join_classes(classes_of(joint.graphs, relations, apart), mesh))


def rejoined(world: World) -> World:
    """Matched classes, those in one that are alike now: what told them apart may only have built a module, and be dropped."""
    fewer = joined(world.classes, exactly=True)
    return world if len(fewer) == len(world.classes) else _fitting(join_classes(fewer, world.mesh))


def _fitting(world: World) -> World:
    if world.findings:
        raise InternalError(f"ranks that fit together do not as classes: {world.findings[0].message}; please report it")
    return world


def _first(held: RankClass) -> int:
    return int(held.ranks[0])


def _parted(classes: list[RankClass], parting: Parting) -> list[RankClass]:
    whole, parts = classes[parting.number], parting.parts
    kinds = np.unique(parts)
    if len(kinds) < 2:
        raise InternalError("a class of ranks was to be parted into itself; please report it")
    made = [whole.part(np.flatnonzero(parts == kind)) for kind in kinds]
    return sorted([*classes[: parting.number], *classes[parting.number + 1 :], *made], key=_first)
