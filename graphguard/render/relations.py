"""How outputs are rebuilt, in few rows: outputs that the ranks hold alike are one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from graphguard.engine.proof import Relation
from graphguard.graph.paths import in_words
from graphguard.graph.placement import Replicate


class Row(NamedTuple):
    """text: how the outputs at `paths` are held. type: of one that is alone."""

    text: str
    paths: tuple[str, ...]
    type: str | None = None


def rows(relations: Iterable[Relation]) -> list[Row]:
    """`grads.h.*.mlp.weight: Shard(0) on tp   (24 outputs)`; an output that is held as no other is told in full."""
    groups: dict[object, list[Relation]] = {}
    for each in relations:
        groups.setdefault(each.placements or _without_path(each), []).append(each)
    return [_row(group) for group in groups.values()]


def _row(group: list[Relation]) -> Row:
    paths = tuple(each.path for each in group)
    if len(group) == 1:
        return Row(group[0].text, paths, group[0].type)
    return Row(f"{in_words(paths)}: {held_in_words(group[0])}   ({len(group)} outputs)", paths)


def held_in_words(relation: Relation) -> str:
    """How the ranks hold an output, without its name."""
    if relation.placements is None:
        return _without_path(relation)
    parts = [f"{placement} on {axis}" for axis, placement in relation.placements if placement != str(Replicate())]
    return ", ".join(parts) or "whole on every rank"


def _without_path(relation: Relation) -> str:
    return relation.text.removeprefix(f"{relation.path} = ").replace(relation.path, "*")
