"""Both programs of a check, with what they read and write at constant positions spelled out."""

from __future__ import annotations

from collections.abc import Sequence

from graphguard.errors import InternalError, ReplayError
from graphguard.graph.ir import Graph
from graphguard.graph.matching import Joint, join
from graphguard.oracle.draws import Ranges, Regime, drawn, draws_of
from graphguard.oracle.replay import Tensors
from graphguard.oracle.trial import local_inputs
from graphguard.routes.lowering import lowered_constants
from graphguard.routes.sample import same_on, same_ranks_on


def with_constant_positions(
    sequential: Graph, joint: Joint, relations: Sequence[Graph], ranges: Ranges
) -> tuple[Graph, Joint] | None:
    """The programs as a proof takes them more easily; None if they have no constant positions. They are executed on a sample:
    where the two forms could not be compared, there is no other form."""
    alone, ranks = lowered_constants(sequential), [lowered_constants(graph) for graph in joint.graphs]
    if alone is None and not any(ranks):
        return None
    made = join([new or old for new, old in zip(ranks, joint.graphs, strict=True)])
    inputs = drawn(draws_of(sequential, ranges, Regime(1.0), {}), 0)
    try:
        same = _same(sequential, alone or sequential, joint, made, inputs, local_inputs(relations, inputs))
    except ReplayError:
        return None
    if made.findings or not same:
        raise InternalError("a program in which constant positions are spelled out is another one; please report it")
    return alone or sequential, made


def _same(raw: Graph, alone: Graph, joint: Joint, made: Joint, inputs: Tensors, locals: Sequence[Tensors]) -> bool:
    return same_on(raw, alone, inputs) and same_ranks_on(joint, made, locals)
