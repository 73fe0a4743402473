"""Where a gradient is cut: a tensor that inputs decide is detached or exchanged, what comes of it is differentiated, and
nothing of the backward pass is done for that line.

Plain collectives have no gradient, or pass it on as it is, and a detached copy is a parameter of its own. Both are often
meant, so this is a weak clue by itself; it is none at all where no gradient is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphguard.graph.ir import Graph, Source, Value
from graphguard.graph.lines import OwnLines
from graphguard.graph.operators import name_of
from graphguard.locate.clue import Clue

EXCHANGED, DETACHED = "its gradient is not exchanged", "its gradient is cut"


def clues_of_cuts(graph: Graph, own_lines: OwnLines) -> Iterator[Clue]:
    """Of one rank's program, or of a class of ranks."""
    differentiated = {node.source.place for node in graph.nodes if node.backward and node.source is not None}
    leading = _leading_to(graph, differentiated)
    moved: set[Value] = {value for value in graph.inputs.values() if value.dtype.startswith(("float", "bfloat"))}
    told: set[tuple[str, int]] = set()
    for node in graph.nodes:
        if node.backward or not any(value in moved for value in node.operands()):
            continue
        moved.update(value for value in node.outputs if value.dtype.startswith(("float", "bfloat")))
        cuts = node.communicates or name_of(node.op) == "detach"
        if not cuts or node.source is None or node.source.place in differentiated or node.source.place in told:
            continue
        if any(value in leading for value in node.outputs):
            told.add(node.source.place)
            line: Source | None = own_lines.of(node.source)
            if line is not None:
                yield Clue(line, EXCHANGED if node.communicates else DETACHED, backward=True)


def _leading_to(graph: Graph, lines: set[tuple[str, int]]) -> set[Value]:
    """Tensors of the forward direction from which those of some lines are made."""
    found: set[Value] = set()
    for node in reversed(graph.nodes):
        here = node.source is not None and node.source.place in lines
        if not node.backward and (here or any(value in found for value in node.outputs)):
            found.update(node.operands())
    return found
