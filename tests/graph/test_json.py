"""Graphs in files: they come back as they were, and a damaged or hostile file is an error, never code that runs."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import random
import sys

import pytest
import torch
import torch.distributed as dist
from harness import capture_both, capture_one
from hypothesis import given, settings
from hypothesis import strategies as st

from graphguard import Input, Shard
from graphguard.errors import GraphFormatError, ReplayError
from graphguard.graph import json as graph_json
from graphguard.graph.findings import Finding
from graphguard.graph.ir import Constant, Graph, Layout, Mesh, Node, Source, Symbol, Value
from graphguard.graph.wellformed import require_wellformed
from graphguard.oracle.replay import replay


def everything():
    """One graph with every kind of thing in it."""
    x, y, z, c = (Value(i, (2, 3), "float32") for i in range(4))
    here = Source("/home/me/net.py", 12, "forward")
    args = (
        x,
        None,
        True,
        3,
        -1.5,
        float("nan"),
        float("-inf"),
        2 - 3j,
        "text ü \n",
        (c, (1, (y,)), ()),
        Symbol("dtype", "bfloat16"),
    )
    return Graph(
        "rank 1",
        inputs={"x": x},
        constants={c: Constant("float32", (2, 3), bytes(range(24)))},
        nodes=[
            Node("aten.neg.default", (x,), {}, (y,), here),
            Node("aten.fused.default", args, {"alpha": 2, "memory": Symbol("memory_format", "channels_last")}, (z,), here, True,
                 ("self",)),
            Node("dist.all_reduce", (z,), {"reduce": "sum", "group": (0, 1), "work": 1}, (Value(7, (2, 3), "float32"),)),
        ],
        outputs={"a.b": z, "none": None},
        layouts={"a.b": Layout((4, 3), (2,), (0, 1), ("S(0)",))},
        input_layouts={"x": Layout((4, 3), (2,), (0, 1), ("S(1)",))},
        states={z: "0f3a"},
        mesh=Mesh.of({"dp": 1, "tp": 2}),
        rank=1,
        assumptions=("torch is torch",),
        findings=[Finding("race", "a race", (0, 1), (here, Source("b.py", 1)))],
    )  # fmt: skip


def trained(x):
    w = torch.ones(6, 3).requires_grad_()
    (torch.tanh(x @ w)[:, :2] ** 2).sum().backward()
    return {"grad": w.grad, "mask": x.masked_fill(x > 0, float("-inf"))}


def summed(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x.to(torch.bfloat16)


@pytest.fixture(scope="module")
def graphs():
    captured = capture_both(trained, summed, 2, {"x": Input((4, 6), Shard(0))})
    return [captured.sequential, *captured.ranks, *captured.relations, everything()]


def test_a_graph_comes_back_as_it_was(graphs):
    for graph in graphs:
        text = graph_json.dumps(graph)
        again = graph_json.loads(text)
        assert (
            str(again) == str(graph) and graph_json.dumps(again) == text and graph_json.loads(text.encode()).name == graph.name
        )
        assert (again.mesh, again.rank, again.assumptions) == (graph.mesh, graph.rank, graph.assumptions)
        assert (again.layouts, again.input_layouts) == (graph.layouts, graph.input_layouts)
        assert again.findings == graph.findings
        assert [(n.source, n.backward, n.writes) for n in again.nodes] == [
            (n.source, n.backward, n.writes) for n in graph.nodes
        ]
        assert list(again.constants.values()) == list(graph.constants.values())


def test_a_file_is_plain_json_of_a_known_version(graphs):
    plain = json.loads(graph_json.dumps(graphs[0]), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert plain["format"] == "graphguard-graph" and plain["version"] == graph_json.VERSION == 1


def test_arguments_keep_their_types(graphs):
    again = graph_json.loads(graph_json.dumps(everything()))
    want, got = everything().nodes[1].args, again.nodes[1].args
    assert [type(arg) for arg in got] == [type(arg) for arg in want]
    assert repr(got) == repr(want)


def test_a_loaded_graph_replays_as_the_captured_one(graphs):
    given = {"x": torch.randn(4, 6)}
    first, second = replay(graphs[0], given), replay(graph_json.loads(graph_json.dumps(graphs[0])), given)
    assert all(torch.equal(first[path], second[path]) for path in first)


# ---------------------------------------------------------------------- damaged files
PLAIN = graph_json.to_plain(everything())
TEXT = graph_json.dumps(everything())


class Bomb:
    def __reduce__(self):
        return sys.exit, (99,)


def with_(path, item):
    """The file of `everything` with one part replaced."""
    plain = json.loads(TEXT)
    at = plain
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = item
    return json.dumps(plain)


DAMAGED = {
    "empty": ("", "not a graph file: Expecting value"),
    "cut": (TEXT[: len(TEXT) // 2], "not a graph file: "),
    "pickle": (pickle.dumps(Bomb()), "not a graph file: "),
    "bad bytes": (b"\xff\xfe\x00{", "not a graph file: "),
    "deep lists": ("[" * 100_000, "not a graph file: it is nested too deeply"),
    "deep lists, closed": ("[" * 50_000 + "]" * 50_000, "not a graph file: it is nested too deeply"),
    "deep argument": (with_(("nodes", 1, 1, 0), eval("[" * 80 + "]" * 80)), "an argument is nested too deeply"),
    "a huge number": ("9" * 10_000, "not a graph file: "),
    "another file": ('{"a": 1}', "it does not say that it is one"),
    "a list": ("[]", "it does not say that it is one"),
    "a later version": (with_(("version",), 2), "graph file of version 2; this GraphGuard reads version 1"),
    "a strange version": (with_(("version",), "x" * 9), "graph file of version 'xxxxxxxxx'"),
    "an undefined value": (with_(("nodes", 0, 1, 0), {"v": 99}), "%99 is used before it is defined"),
    "a value that is true": (with_(("nodes", 0, 1, 0), {"v": True}), "%True is used before it is defined"),
    "a value defined twice": (with_(("nodes", 0, 3, 0, 0), 0), "%0 is defined twice"),
    "a negative size": (with_(("inputs", "x", 2), [2, -3]), "-3 is not a natural number"),
    "a fractional size": (with_(("inputs", "x", 2), [2, 3.0]), "3.0 is not a natural number"),
    "an unknown dtype": (with_(("inputs", "x", 1), "float7"), "'float7' is not a dtype"),
    "an unhashable dtype": (with_(("inputs", "x", 1), []), "TypeError while reading it"),
    "short data": (with_(("constants", 0, 3), base64.b64encode(b"abc").decode()), "constant %3 has 3 bytes"),
    "a shape without data": (with_(("constants", 0, 2), [10**18, 10**18]), "constant %3 has 24 bytes"),
    "bad base64": (with_(("constants", 0, 3), "?!"), "while reading it"),
    "a source that is not there": (with_(("nodes", 0, 4), 17), "IndexError while reading it"),
    "a source from the end": (with_(("nodes", 0, 4), -1), "-1 is not a natural number"),
    "a text for a list": (with_(("nodes", 1, 6), "self"), "the writes of 'aten.fused.default'"),
    "an unknown kind of argument": (with_(("nodes", 0, 1, 0), {"q": 1}), "an argument of the unknown kind 'q'"),
    "two kinds of argument": (with_(("nodes", 0, 1, 0), {"v": 0, "s": 1}), "an argument of an unknown kind"),
    "a bad float": (with_(("nodes", 0, 1, 0), {"f": "one"}), "ValueError while reading it"),
    "an unknown finding": (with_(("findings", 0, 0), "gremlin"), "'gremlin' is not a kind of finding"),
    "a bad operator": (with_(("nodes", 0, 0), "os.system"), "'os.system' is not an operator"),
    "a rank outside the group": (with_(("rank",), 5), "runs on rank 5, which its group (0, 1) does not name once"),
    "a missing part": (json.dumps({k: v for k, v in json.loads(TEXT).items() if k != "nodes"}), "KeyError while reading it"),
    "half a character": (with_(("name",), "\ud800"), "a text that is not Unicode"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_an_error_in_words(name):
    text, message = DAMAGED[name]
    with pytest.raises(GraphFormatError) as caught:
        graph_json.loads(text)
    assert message in str(caught.value) and len(str(caught.value)) < 500


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([0, 1, 7, "x", "v"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["v", "s", "f", "c", "x"]), inner, max_size=2),
    max_leaves=6,
)


def places(plain, path=()):
    yield path
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


PLACES = [path for path in places(json.loads(TEXT)) if path]


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.lists(JSON, min_size=1, max_size=3))
def test_any_change_of_a_file_loads_or_is_refused(seed, items):
    rng, plain = random.Random(seed), json.loads(TEXT)
    for item in items:
        *path, last = rng.choice(PLACES)
        at = plain
        try:
            for key in path:
                at = at[key]
            if rng.random() < 0.3:
                del at[last]
            elif rng.random() < 0.3:
                at[last] = copy.deepcopy(json.loads(json.dumps(rng.choice(list(plain.values())))))
            else:
                at[last] = item
        except (KeyError, IndexError, TypeError):
            continue
    assert_loads_or_is_refused(json.dumps(plain))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(JSON)
def test_random_json_is_refused(plain):
    assert_loads_or_is_refused(json.dumps(plain))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, len(TEXT) - 1), st.binary(max_size=3), st.integers(0, 5))
def test_random_bytes_in_a_file_load_or_are_refused(at, new, dropped):
    raw = TEXT.encode()
    assert_loads_or_is_refused(raw[:at] + new + raw[at + dropped :])


def assert_loads_or_is_refused(text):
    try:
        graph = graph_json.loads(text)
    except GraphFormatError:
        return
    require_wellformed(graph)
    str(graph).encode()
    assert graph_json.dumps(graph_json.loads(graph_json.dumps(graph))) == graph_json.dumps(graph)


# ---------------------------------------------------------------------- hostile operators
@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.from_file.default", ("/etc/hostname", False, 4)),
        ("aten.save.default", (1, "FILE")),
        ("aten.warn.default", ("careful", 2)),
        ("os.system.default", ("touch FILE",)),
        ("__class__.__init__.__globals__", ()),
        ("aten.add.__class__", ()),
        ("aten.nothing.default", ()),
    ],
)
def test_operators_that_reach_outside_are_never_executed(op, args, tmp_path):
    target = tmp_path / "touched"
    args = tuple(arg.replace("FILE", str(target)) if isinstance(arg, str) else arg for arg in args)
    graph = Graph("sequential", nodes=[Node(op, args, {}, (Value(0, (4,), "float32"),))])
    with pytest.raises(ReplayError, match=r"there is no operator|is never executed"):
        replay(graph_json.loads(graph_json.dumps(graph)), {})
    assert not target.exists()


def test_symbols_name_nothing_but_framework_constants():
    x = Value(0, (2,), "float32")
    graph = Graph("sequential", inputs={"x": x})
    graph.nodes = [
        Node("aten.clone.default", (x,), {"memory_format": Symbol("memory_format", "hub")}, (Value(1, (2,), "float32"),))
    ]
    with pytest.raises(ReplayError, match="there is no memory_format hub"):
        replay(graph, {"x": torch.ones(2)})


def test_saved_constants_are_the_bytes_of_the_tensor():
    graph = capture_one(lambda x: x + torch.tensor([1, -2], dtype=torch.int16), {"x": Input((2,))})
    (row,) = json.loads(graph_json.dumps(graph))["constants"]
    assert base64.b64decode(row[3]) == b"\x01\x00\xfe\xff" and row[1:3] == ["int16", [2]]
