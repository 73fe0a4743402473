"""The conditions of a proof: what the ranks' operations need, and is not known to hold."""

from __future__ import annotations

from collections.abc import Sequence

from graphguard.engine.interpret import Interpretation, NodeNeeds
from graphguard.engine.proof import Condition
from graphguard.engine.relate.needs import Needs, in_words
from graphguard.engine.relate.same_steps import SameSteps
from graphguard.graph.ancestry import needed_of_classes
from graphguard.graph.ir import Graph, Node, Source
from graphguard.graph.lines import OwnLines
from graphguard.graph.world import Place, World


def conditions_of(
    found: Interpretation, sequential: Graph, world: World, paths: Sequence[str], own_lines: OwnLines
) -> tuple[Condition, ...]:
    """One for each text and line, with the outputs among `paths` that it is about."""
    needs = Needs(found.table)
    unmet = [NodeNeeds(each.place, tuple(needs.unmet(each.needs))) for each in found.needs]
    unmet = [each for each in unmet if each.needs]
    same = SameSteps(found, sequential, {world.node(each.place) for each in unmet}) if unmet else None
    unmet = [each for each in unmet if same is None or not same.are_taken_from(world.node(each.place))]
    if not unmet:
        return ()
    names = {atom.id: str(key) for (kind, key), atom in found.table.atoms() if kind == "input"}
    made_from = {path: _places_of(world, path) for path in paths}
    outputs: dict[tuple[str, str], dict[str, None]] = {}
    sources: dict[str, Source | None] = {}
    for place, open_needs in unmet:
        node = world.node(place)
        about = [path for path in paths if _raises(node) or place in made_from[path]]
        source = own_lines.at(node) or node.source
        sources.setdefault(str(source), source)
        for text in in_words(found.table, open_needs, names, _name(node.op)) if about else ():
            outputs.setdefault((text, str(source)), {}).update(dict.fromkeys(about))
    return tuple(Condition(text, sources[source], tuple(about)) for (text, source), about in outputs.items())


def _places_of(world: World, path: str) -> set[Place]:
    wanted = [(number, each.graph.outputs.get(path)) for number, each in enumerate(world.classes)]
    return needed_of_classes(world, [(number, value) for number, value in wanted if value is not None])


def _raises(node: Node) -> bool:
    """Whether it raises where it is not defined: then the rank returns nothing at all. Floats become nan or infinite."""
    return any(not tensor.dtype.startswith(("float", "bfloat", "complex")) for tensor in node.outputs)


def _name(operator: str) -> str:
    """`div` for `aten.div.Tensor`; of another library, its name too."""
    library, _, rest = operator.partition(".")
    return rest.split(".")[0].rstrip("_") if library == "aten" else f"{library}::{rest.split('.')[0]}"
