"""The rules that every graph keeps, checked after every capture and every load. A rule yields what breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from graphguard.errors import MalformedGraphError
from graphguard.graph.collectives import COLLECTIVES, NEW_GROUP, REDUCTIONS, WAIT, Collective, Count
from graphguard.graph.ir import ITEM_SIZES, Arg, Graph, Node, Value

Rule = Callable[[Graph], Iterator[str]]
RULES: list[Rule] = []
_OP = re.compile(r"(dist|gg)\.\w+|\w+\.\w+\.\w+")
_NO_ROW = Collective("", Count.NONE, Count.NONE)  # what only waits, or makes a group


def require_wellformed(graph: Graph) -> None:
    for rule in RULES:
        for problem in rule(graph):
            raise MalformedGraphError(f"graph {graph.name!r}: {problem}")


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


@rule
def values_are_defined_once_before_use(graph: Graph) -> Iterator[str]:
    defined: set[Value] = set()
    ids: set[int] = set()

    def define(value: Value) -> Iterator[str]:
        if value in defined or value.id in ids:
            yield f"{value} is defined twice"
        defined.add(value)
        ids.add(value.id)

    for value in [*graph.inputs.values(), *graph.constants]:
        yield from define(value)
    for node in graph.nodes:
        for operand in node.operands():
            if operand not in defined:
                yield f"{operand} is used before it is defined, in {node}"
        for output in node.outputs:
            yield from define(output)
    for path, result in graph.outputs.items():
        if result is not None and result not in defined:
            yield f"output {path!r} is {result}, which is not defined"


@rule
def values_have_a_shape_and_a_dtype(graph: Graph) -> Iterator[str]:
    for value in graph.values():
        if value.dtype not in ITEM_SIZES:
            yield f"{value} has the unknown dtype {value.dtype!r}"
        if any(type(size) is not int or size < 0 for size in value.shape):
            yield f"{value} has the impossible shape {value.shape}"


@rule
def constants_hold_their_bytes(graph: Graph) -> Iterator[str]:
    for value, constant in graph.constants.items():
        if (constant.shape, constant.dtype) != (value.shape, value.dtype):
            yield f"constant {value} is of another type than its data"
        elif len(constant.data) != value.numel * ITEM_SIZES[value.dtype]:
            yield f"constant {value} has {len(constant.data)} bytes"


@rule
def operators_are_named(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if not _OP.fullmatch(node.op) or (node.communicates and not _is_known(node)):
            yield f"{node.op!r} is not an operator"


@rule
def written_arguments_have_new_values(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if len(node.writes) > len(node.outputs):
            yield f"{node} writes {len(node.writes)} arguments but has {len(node.outputs)} outputs"


@rule
def communication_is_complete(graph: Graph) -> Iterator[str]:
    world = graph.mesh.size if graph.mesh is not None else 0
    for node in graph.nodes:
        if node.communicates and _is_known(node):
            yield from _communication(node, graph.rank, world)


@rule
def waits_name_work_that_was_started(graph: Graph) -> Iterator[str]:
    started = set()
    for node in graph.nodes:
        if not node.communicates:
            continue
        work = node.kwargs.get("work")
        if type(work) is not int:
            yield f"{node} has no work id"
        elif node.op == WAIT and work not in started:
            yield f"{node} waits for work that was not started"
        started.add(work)


@rule
def layouts_belong_to_inputs_and_outputs(graph: Graph) -> Iterator[str]:
    for what, named, layouts in (("output", graph.outputs, graph.layouts), ("input", graph.inputs, graph.input_layouts)):
        for path, layout in layouts.items():
            if named.get(path) is None:
                yield f"there is a layout for {path!r}, which is not an {what}"
            elif len(layout.placements) != len(layout.mesh_shape):
                yield f"the layout of {path!r} has {len(layout.placements)} placements for {len(layout.mesh_shape)} axes"


def _is_known(node: Node) -> bool:
    return node.op in COLLECTIVES or node.op in (WAIT, NEW_GROUP)


def _communication(node: Node, rank: int | None, world: int) -> Iterator[str]:
    row = COLLECTIVES.get(node.op, _NO_ROW)
    reads = sum(1 for _ in node.operands())
    for does, tensors, count in (("reads", row.reads, reads), ("fills", row.fills, len(node.outputs))):
        if count < tensors.least or (tensors.most is not None and count > tensors.most):
            yield f"{node} {does} {count} tensors"
    if node.op == WAIT:
        return
    group = node.kwargs.get("group")
    if not isinstance(group, tuple) or not group or not all(type(r) is int and 0 <= r < world for r in group):
        yield f"{node} has no group of ranks below {world}"
        return
    if node.op == NEW_GROUP and type(node.kwargs.get("name")) is not str:
        yield f"{node} has no name"
    if len(set(group)) != len(group) or (rank not in group and node.op != NEW_GROUP):
        yield f"{node} runs on rank {rank}, which its group {group} does not name once"
    for name in row.needs:
        yield from _argument(node, name, group)


def _argument(node: Node, name: str, group: tuple[Arg, ...]) -> Iterator[str]:
    given = node.kwargs.get(name)
    match name:
        case "reduce" if given not in REDUCTIONS:
            yield f"{node} has the unknown reduce operation {given!r}"
        case "root" | "peer" if given not in group:
            yield f"{node} names {given!r} as its {name}, which is not in its group"
        case "tag" if type(given) is not int:
            yield f"{node} has no {name}"
        case "input_splits" | "output_splits":
            if not isinstance(given, tuple) or not all(type(n) is int and n >= 0 for n in given):
                yield f"{node} has no {name}"
        case _ if name not in node.kwargs:
            yield f"{node} has no {name}"
