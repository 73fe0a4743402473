"""All that a verdict depends on, as one hash.

The programs are captured in every run: what is hashed is what was captured, not the files that it came from. Nothing is left
out because nobody thought of it: every field of a problem is written down, and what cannot be written down is not kept.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np

from graphguard.cache.kit import changed_since_loaded, kit
from graphguard.capture.front import Captured, Problem
from graphguard.graph import json as graph_json
from graphguard.graph.ir import Graph, Node, Source, Value
from graphguard.graph.matching import Joint
from graphguard.graph.rank_class import Each, Groups, PerRank
from graphguard.verdict.limits import Limits

# What the JSON of a graph has, and how it has it: a graph with more than that is not kept.
_OF_GRAPHS = {
    "name", "inputs", "outputs", "nodes", "constants", "layouts", "input_layouts", "ties", "states", "mesh", "rank",
    "assumptions", "findings", "built",
}  # fmt: skip
_OF_NODES = {"args", "backward", "kwargs", "op", "outputs", "source", "writes"}
_OF_JOINTS = {"graphs", "matches", "findings", "_by_node"}
_KNOWN = ("aten.", "dist.")  # operators that are known by their names; what others compute is in code of the user's
_OWN = {"gg.part"}


class UnkeptError(Exception):
    """Why a result is not kept."""


def key_of(problem: Problem, lemmas: Mapping[str, Any], trials: int | None, seed: int, limits: Limits) -> str:
    """The hash of a question. Two questions of one hash have one answer."""
    if lemmas:
        raise UnkeptError("lemmas of yours are Python functions, whose content cannot be told")
    if changed_since_loaded():
        raise UnkeptError("GraphGuard was changed while it ran")
    asked = {
        "kit": kit(),
        "machine": [platform.system(), platform.machine()],
        "torch": _state_of_torch(),
        "folder": os.getcwd(),  # messages name files as seen from here
        "options": [trials, seed, plain(limits)],
        "problem": plain(problem),
    }
    return sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _state_of_torch() -> list[str]:
    """Of the torch that is loaded, which may not be the one that is installed."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [str(torch.__version__), str(torch.version.git_version), str(torch.get_default_dtype())]


def plain(item: Any) -> Any:
    """As JSON that another item does not have."""
    kind = type(item)
    if item is None or kind in (bool, int, str):
        return item
    if kind in (float, complex):
        return {kind.__name__: repr(item)}
    if kind is Graph:
        return {"graph": _graph(item)}
    if kind is Value:  # of the graph that it is told with
        return {"value": [item.id, list(item.shape), item.dtype]}
    if kind is Joint:
        return {"joint": _joint(item)}
    if kind is Captured:  # classes of ranks say all that is made of them
        return _fields(item, {"seconds"} if item.matched is None else {"seconds", "ranks", "relations", "joint"})
    if kind is np.ndarray:
        return {"array": [str(item.dtype), list(item.shape), sha256(np.ascontiguousarray(item).data).hexdigest()]}
    if kind is bytes:
        return {"bytes": sha256(item).hexdigest()}
    if kind in (PerRank, Groups, Each):
        return {kind.__name__: [plain(getattr(item, name)) for name in kind.__slots__ if name != "key"]}
    if isinstance(item, Mapping):
        return {"map": [[plain(key), plain(value)] for key, value in item.items()]}
    if kind in (tuple, list):
        return [kind.__name__, *map(plain, item)]
    if kind.__module__.startswith("graphguard."):
        if is_dataclass(item):
            return _fields(item)
        if isinstance(item, Source):
            return ["Source", item.module, *map(plain, item)]
        if isinstance(item, tuple):
            return [kind.__qualname__, *map(plain, item)]
    raise UnkeptError(f"nothing is known of {kind.__module__}.{kind.__qualname__}")


def _fields(item: Any, left_out: Iterable[str] = ()) -> dict[str, Any]:
    kind = type(item)
    named = {each.name: plain(getattr(item, each.name)) for each in fields(item) if each.name not in left_out}
    return {"is": f"{kind.__module__}.{kind.__qualname__}", "has": named}


def _graph(graph: Graph) -> str:
    if {each.name for each in fields(graph)} != _OF_GRAPHS or set(Node.__slots__) != _OF_NODES:
        raise UnkeptError("graphs have parts that are not written down")
    if graph.findings:
        raise UnkeptError("what does not fit together is found again at once")
    for node in graph.nodes:
        if not node.op.startswith(_KNOWN) and node.op not in _OWN:
            raise UnkeptError(f"{node.op} is an operator of yours, whose content cannot be told")
    constants: Mapping[Any, Any] = graph.constants
    apart = {value.id: plain(each) for value, each in constants.items() if type(each) is Each}
    alike = replace(graph, constants={value: each for value, each in constants.items() if type(each) is not Each})
    text = json.dumps([graph.built, apart, graph_json.to_plain(alike)], default=plain)
    return sha256(text.encode()).hexdigest()


def _joint(joint: Joint) -> list[Any]:
    """Which operations of the ranks belong together, each by its place in its graph."""
    if {each.name for each in fields(joint)} != _OF_JOINTS:
        raise UnkeptError("matched graphs have parts that are not written down")
    if joint.findings:
        raise UnkeptError("what does not fit together is found again at once")
    places = [{node: place for place, node in enumerate(graph.nodes)} for graph in joint.graphs]
    matches = [
        [match.id, match.op, list(match.group), [[rank, places[rank][node]] for rank, node in match.nodes.items()]]
        for match in joint.matches
    ]
    return [[_graph(graph) for graph in joint.graphs], matches]
