"""Reports as JSON from which the same report is made again. Reading makes objects of a closed list of classes, and runs nothing
else."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from graphguard.cache.content import UnkeptError
from graphguard.engine.proof import Condition, Relation
from graphguard.graph.findings import Finding, Place
from graphguard.graph.ir import Mesh, Source
from graphguard.graph.limits import Stop
from graphguard.graph.placement import Partial, Replicate, Shard, StridedShard
from graphguard.graph.tensor_layout import TensorLayout
from graphguard.oracle.difference import Counterexample, Divergence, Element
from graphguard.relation.arrangement import Arrangement, Tile
from graphguard.report.report import OutputRelation, Report

_PARTS = (
    Arrangement, Condition, Counterexample, Divergence, Element, Finding, Mesh, Partial, Place, Relation, Replicate, Report,
    Shard, Stop, StridedShard, TensorLayout, Tile,
)  # fmt: skip
_CLASSES: dict[str, type[Any]] = {each.__name__: each for each in _PARTS}
_NOT_KEPT = {"make_listing", "programs"}  # of a report: the operations of both programs, for pages
_DEEPEST = 40


class DamagedError(Exception):
    """What is wrong with what was read."""


def written(item: Any) -> Any:
    kind = type(item)
    if item is None or kind in (bool, int, str):
        return item
    if kind in (float, complex):
        return {kind.__name__: repr(item)}
    if kind in (list, tuple):
        return {kind.__name__: [written(each) for each in item]}
    if kind in (dict, OutputRelation):
        return {kind.__name__: [[written(key), written(value)] for key, value in item.items()]}
    if isinstance(item, Source):
        return {"Source": [*(written(each) for each in item), item.module]}
    if _CLASSES.get(kind.__name__) is kind:
        return {kind.__name__: {name: written(getattr(item, name)) for name in _names(kind)}}
    raise UnkeptError(f"a report has a {kind.__name__}")


def read(plain: Any, depth: int = 0) -> Any:
    """The inverse. What was not written by `written` is damaged."""
    if plain is None or type(plain) in (bool, int, str):
        return plain
    if type(plain) is not dict or len(plain) != 1 or depth > _DEEPEST:
        raise DamagedError("it has something of an unknown kind")
    ((name, content),) = plain.items()
    try:
        return _made(name, content, depth + 1)
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"a {name} cannot be made of what it has ({type(error).__name__})") from None


def _made(name: str, content: Any, depth: int) -> Any:
    match name:
        case "float" | "complex":
            return {"float": float, "complex": complex}[name](content)
        case "list" | "tuple" if type(content) is list:
            return {"list": list, "tuple": tuple}[name](read(each, depth) for each in content)
        case "dict" | "OutputRelation" if type(content) is list:
            return {"dict": dict, "OutputRelation": OutputRelation}[name](
                (read(key, depth), read(value, depth)) for key, value in content
            )
        case "Source" if type(content) is list:
            *line, module = (read(each, depth) for each in content)
            return Source(*line).inside(module)
    kind = _CLASSES[name]
    if list(content) != _names(kind):
        raise DamagedError(f"a {name} has other parts")
    return kind(**{part: read(value, depth) for part, value in content.items()})


def _names(kind: type[Any]) -> list[str]:
    return [each.name for each in fields(kind) if not (kind is Report and each.name in _NOT_KEPT)]
