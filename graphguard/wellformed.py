"""The rules that every graph keeps, checked after every capture and every load. A rule yields what breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from graphguard.errors import MalformedGraphError
from graphguard.ir import ITEM_SIZES, Graph, Node, Value

Rule = Callable[[Graph], Iterator[str]]
RULES: list[Rule] = []
_OP = re.compile(r"(dist|gg)\.\w+|\w+\.\w+\.\w+")
_REDUCTIONS = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"}
# operator: (least and most tensors read, least and most filled); None is unbounded
_ARITY: dict[str, tuple[int, int | None, int, int | None]] = {
    "dist.all_reduce": (1, 1, 1, 1),
    "dist.reduce": (1, 1, 1, 1),
    "dist.broadcast": (1, 1, 1, 1),
    "dist.all_gather": (1, 1, 1, None),
    "dist.all_gather_into_tensor": (1, 1, 1, 1),
    "dist.reduce_scatter": (1, None, 1, 1),
    "dist.reduce_scatter_tensor": (1, 1, 1, 1),
    "dist.all_to_all": (1, None, 1, None),
    "dist.all_to_all_single": (1, 1, 1, 1),
    "dist.gather": (1, 1, 0, None),
    "dist.scatter": (0, None, 1, 1),
    "dist.send": (1, 1, 0, 0),
    "dist.recv": (0, 0, 1, 1),
    "dist.barrier": (0, 0, 0, 0),
    "dist.new_group": (0, 0, 0, 0),
    "dist.wait": (0, 0, 0, 0),
}
_NEEDS_REDUCE = {"dist.all_reduce", "dist.reduce", "dist.reduce_scatter", "dist.reduce_scatter_tensor"}
_NEEDS_ROOT = {"dist.reduce", "dist.broadcast", "dist.gather", "dist.scatter"}
_NEEDS_PEER = {"dist.send", "dist.recv"}


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
        if not _OP.fullmatch(node.op) or (node.op.startswith("dist.") and node.op not in _ARITY):
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
        if node.communicates and node.op in _ARITY:
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
        elif node.op == "dist.wait" and work not in started:
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


def _communication(node: Node, rank: int | None, world: int) -> Iterator[str]:
    least_in, most_in, least_out, most_out = _ARITY[node.op]
    reads = sum(1 for _ in node.operands())
    if reads < least_in or (most_in is not None and reads > most_in):
        yield f"{node} reads {reads} tensors"
    if len(node.outputs) < least_out or (most_out is not None and len(node.outputs) > most_out):
        yield f"{node} fills {len(node.outputs)} tensors"
    if node.op == "dist.wait":
        return
    group = node.kwargs.get("group")
    if not isinstance(group, tuple) or not group or not all(type(r) is int and 0 <= r < world for r in group):
        yield f"{node} has no group of ranks below {world}"
        return
    if node.op == "dist.new_group" and type(node.kwargs.get("name")) is not str:
        yield f"{node} has no name"
    if len(set(group)) != len(group) or (rank not in group and node.op != "dist.new_group"):
        yield f"{node} runs on rank {rank}, which its group {group} does not name once"
    if node.op in _NEEDS_REDUCE and node.kwargs.get("reduce") not in _REDUCTIONS:
        yield f"{node} has the unknown reduce operation {node.kwargs.get('reduce')!r}"
    for name in ["root"] * (node.op in _NEEDS_ROOT) + ["peer"] * (node.op in _NEEDS_PEER):
        if node.kwargs.get(name) not in group:
            yield f"{node} names {node.kwargs.get(name)!r} as its {name}, which is not in its group"
    if node.op == "dist.all_to_all_single":
        for name in ("input_splits", "output_splits"):
            splits = node.kwargs.get(name)
            if not isinstance(splits, tuple) or not all(type(n) is int and n >= 0 for n in splits):
                yield f"{node} has no {name}"
