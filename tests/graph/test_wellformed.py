"""Each rule of well-formedness has a graph that breaks it, and no other rule minds that graph's repaired twin."""

from __future__ import annotations

import pytest

from graphguard.errors import MalformedGraphError
from graphguard.graph import wellformed
from graphguard.graph.ir import Constant, Graph, Layout, Mesh, Node, Value

GROUP = {"group": (0, 1), "work": 1}
REDUCE = GROUP | {"reduce": "sum"}


def value(id, *shape, dtype="float32"):
    return Value(id, shape, dtype)


def graph(nodes=(), **rest):
    """A rank's graph with one input %0, to which nodes are added."""
    made = Graph("rank 0", inputs={"x": value(0, 4)}, mesh=Mesh.of({"tp": 2}), rank=0)
    x = made.inputs["x"]
    made.nodes = [node(x) if callable(node) else node for node in nodes]
    for name, item in rest.items():
        setattr(made, name, item)
    return made


def comm(op, kwargs, reads=1, fills=1):
    return lambda x: Node(op, (x,) * reads, kwargs, tuple(value(10 + i, 4) for i in range(fills)))


def negated(x):
    return Node("aten.neg.default", (x,), {}, (value(1, 4),))


STRANGER = value(9, 4)
SPLITS = {"input_splits": (2, 2), "output_splits": (2, 2)}
BROKEN = {
    "values_are_defined_once_before_use": {
        "%0 is defined twice": graph([lambda x: Node("aten.neg.default", (x,), {}, (x,))]),
        "%1 is defined twice": graph([negated, negated]),
        "%9 is used before it is defined, in": graph([Node("aten.neg.default", (STRANGER,), {}, (value(1, 4),))]),
        "%9 is used before": graph([lambda x: Node("aten.cat.default", ((x, (STRANGER,)),), {}, (value(1, 4),))]),
        "%9 is used before it": graph([lambda x: Node("aten.add.Tensor", (x,), {"other": STRANGER}, (value(1, 4),))]),
        "output 'out' is %9, which is not defined": graph(outputs={"out": STRANGER}),
        "%0 is defined": graph(constants={value(0, 1): Constant("float32", (1,), bytes(4))}),
    },
    "values_have_a_shape_and_a_dtype": {
        "%1 has the unknown dtype 'float7'": graph([lambda x: Node("aten.neg.default", (x,), {}, (value(1, dtype="float7"),))]),
        "%1 has the impossible shape (-1,)": graph([lambda x: Node("aten.neg.default", (x,), {}, (value(1, -1),))]),
        "%1 has the impossible shape (2.0,)": graph([lambda x: Node("aten.neg.default", (x,), {}, (value(1, 2.0),))]),
    },
    "constants_hold_their_bytes": {
        "constant %5 has 3 bytes": graph(constants={value(5, 2): Constant("float32", (2,), bytes(3))}),
        "constant %5 is of another type than its data": graph(constants={value(5, 2): Constant("int32", (2,), bytes(8))}),
        "constant %5 is of another type": graph(constants={value(5, 2): Constant("float32", (1, 2), bytes(8))}),
    },
    "operators_are_named": {
        "'add' is not an operator": graph([lambda x: Node("add", (x,), {}, (value(1, 4),))]),
        "'aten.add' is not an operator": graph([lambda x: Node("aten.add", (x,), {}, (value(1, 4),))]),
        "'aten.add.Tensor.x' is not": graph([lambda x: Node("aten.add.Tensor.x", (x,), {}, (value(1, 4),))]),
        "'dist.gossip' is not an operator": graph([comm("dist.gossip", GROUP)]),
        "'' is not an operator": graph([lambda x: Node("", (x,), {}, (value(1, 4),))]),
    },
    "written_arguments_have_new_values": {
        "writes 2 arguments but has 1 outputs": graph(
            [lambda x: Node("aten.add_.Tensor", (x, 1), {}, (value(1, 4),), writes=("self", "other"))]
        ),
    },
    "communication_is_complete": {
        "reads 2 tensors": graph([comm("dist.all_reduce", REDUCE, reads=2)]),
        "reads 0 tensors": graph([comm("dist.all_reduce", REDUCE, reads=0)]),
        "fills 2 tensors": graph([comm("dist.all_reduce", REDUCE, fills=2)]),
        "fills 0 tensors": graph([comm("dist.all_gather", GROUP, fills=0)]),
        "has no group of ranks below 2": graph([comm("dist.all_reduce", {"reduce": "sum", "work": 1})]),
        "has no group of ranks": graph([comm("dist.all_reduce", REDUCE | {"group": (0, 2)})]),
        "has no group of": graph([comm("dist.all_reduce", REDUCE | {"group": ()})]),
        "has no group": graph([comm("dist.all_reduce", REDUCE)], mesh=None),
        "which its group (1,) does not name once": graph([comm("dist.all_reduce", REDUCE | {"group": (1,)})]),
        "which its group (0, 0) does not name once": graph([comm("dist.all_reduce", REDUCE | {"group": (0, 0)})]),
        "has the unknown reduce operation 'xor'": graph([comm("dist.all_reduce", REDUCE | {"reduce": "xor"})]),
        "has the unknown reduce operation None": graph([comm("dist.reduce_scatter_tensor", GROUP)]),
        "names None as its root": graph([comm("dist.broadcast", GROUP)]),
        "names 5 as its root, which is not in its group": graph([comm("dist.gather", GROUP | {"root": 5}, fills=0)]),
        "has no tag": graph([comm("dist.send", GROUP | {"peer": 1}, fills=0)]),
        "names 7 as its peer": graph([comm("dist.send", GROUP | {"peer": 7, "tag": 0}, fills=0)]),
        "has no input_splits": graph([comm("dist.all_to_all_single", GROUP)]),
        "has no output_splits": graph([comm("dist.all_to_all_single", GROUP | SPLITS | {"output_splits": (-1, 5)})]),
    },
    "waits_name_work_that_was_started": {
        "waits for work that was not started": graph([Node("dist.wait", (), {"work": 3}, ())]),
        "has no work id": graph([comm("dist.all_reduce", {"reduce": "sum", "group": (0, 1)})]),
    },
    "layouts_belong_to_inputs_and_outputs": {
        "there is a layout for 'w', which is not an input": graph(input_layouts={"w": Layout((8,), (2,), (0, 1), ("S(0)",))}),
        "there is a layout for 'out', which is not an output": graph(layouts={"out": Layout((8,), (2,), (0, 1), ("S(0)",))}),
        "the layout of 'out' has 1 placements for 2 axes": graph(
            [negated], layouts={"out": Layout((8,), (1, 2), (0, 1), ("S(0)",))}
        ),
    },
}
_last = BROKEN["layouts_belong_to_inputs_and_outputs"]["the layout of 'out' has 1 placements for 2 axes"]
_last.outputs = {"out": _last.nodes[0].outputs[0]}


@pytest.mark.parametrize(("rule", "problem"), [(rule, problem) for rule, cases in BROKEN.items() for problem in cases])
def test_each_rule_finds_what_breaks_it(rule, problem):
    broken = BROKEN[rule][problem]
    found = list(getattr(wellformed, rule)(broken))
    assert any(problem in text for text in found), found
    with pytest.raises(MalformedGraphError, match=r"^graph 'rank 0': "):
        wellformed.require_wellformed(broken)


def test_every_rule_has_a_graph_that_breaks_it():
    assert {rule.__name__ for rule in wellformed.RULES} == set(BROKEN)


SOUND = {
    "nothing": graph(),
    "a node": graph([negated]),
    "all_reduce": graph([comm("dist.all_reduce", REDUCE), Node("dist.wait", (), {"work": 1}, ())]),
    "all_gather": graph([comm("dist.all_gather", GROUP, fills=2)]),
    "reduce_scatter": graph([comm("dist.reduce_scatter", REDUCE, reads=2)]),
    "all_to_all_single": graph([comm("dist.all_to_all_single", GROUP | SPLITS)]),
    "scatter on another rank than the root": graph([comm("dist.scatter", GROUP | {"root": 1}, reads=0)]),
    "gather on the root": graph([comm("dist.gather", GROUP | {"root": 0}, fills=2)]),
    "send": graph([comm("dist.send", GROUP | {"peer": 1, "tag": 0}, fills=0)]),
    "barrier": graph([comm("dist.barrier", GROUP, reads=0, fills=0)]),
    "written argument": graph([lambda x: Node("aten.add_.Tensor", (x, 1), {}, (value(1, 4),), writes=("self",))]),
    "part of an input": graph([lambda x: Node("gg.part", (x, "x/tp", 0, 2), {}, (value(1, 4),))]),
    "constant": graph(constants={value(5, 2, dtype="int64"): Constant("int64", (2,), bytes(16))}),
    "missing output": graph(outputs={"loss": None}),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_graphs_break_no_rule(name):
    wellformed.require_wellformed(SOUND[name])
