"""The conditions of a proof: what the ranks' operations need, and is not known to hold."""

from __future__ import annotations

from collections.abc import Sequence

from graphguard.engine.interpret import Interpretation, NodeNeeds
from graphguard.engine.proof import Condition
from graphguard.engine.relate.needs import Needs, in_words
from graphguard.engine.relate.same_steps import SameSteps
from graphguard.graph.ancestry import needed_of_ranks
from graphguard.graph.ir import Graph, Node, Source
from graphguard.graph.lines import OwnLines
from graphguard.graph.matching import Joint


def conditions_of(
    found: Interpretation, sequential: Graph, joint: Joint, paths: Sequence[str], own_lines: OwnLines
) -> tuple[Condition, ...]:
    """One for each text and line, with the outputs among `paths` that it is about."""
    needs = Needs(found.table)
    unmet = [NodeNeeds(each.nodes, tuple(needs.unmet(each.needs))) for each in found.needs]
    unmet = [each for each in unmet if each.needs]
    same = SameSteps(found, sequential, {each.nodes[0] for each in unmet}) if unmet else None
    unmet = [each for each in unmet if same is None or not same.are_taken_from(each.nodes[0])]
    if not unmet:
        return ()
    names = {atom.id: str(key) for (kind, key), atom in found.table.atoms() if kind == "input"}
    made_from = {path: _nodes_of(joint, path) for path in paths}
    outputs: dict[tuple[str, str], dict[str, None]] = {}
    sources: dict[str, Source | None] = {}
    for nodes, open_needs in unmet:
        about = [path for path in paths if _raises(nodes[0]) or any(node in made_from[path] for node in nodes)]
        source = own_lines.at(nodes[0]) or nodes[0].source
        sources.setdefault(str(source), source)
        for text in in_words(found.table, open_needs, names, _name(nodes[0].op)) if about else ():
            outputs.setdefault((text, str(source)), {}).update(dict.fromkeys(about))
    return tuple(Condition(text, sources[source], tuple(about)) for (text, source), about in outputs.items())


def _nodes_of(joint: Joint, path: str) -> set[Node]:
    wanted = [(rank, graph.outputs.get(path)) for rank, graph in enumerate(joint.graphs)]
    return needed_of_ranks(joint, [(rank, value) for rank, value in wanted if value is not None])[0]


def _raises(node: Node) -> bool:
    """Whether it raises where it is not defined: then the rank returns nothing at all. Floats become nan or infinite."""
    return any(not tensor.dtype.startswith(("float", "bfloat", "complex")) for tensor in node.outputs)


def _name(operator: str) -> str:
    """`div` for `aten.div.Tensor`; of another library, its name too."""
    library, _, rest = operator.partition(".")
    return rest.split(".")[0].rstrip("_") if library == "aten" else f"{library}::{rest.split('.')[0]}"
