"""Graphs as people see them."""

from __future__ import annotations

import itertools
import os
import struct

import pytest
import torch
from harness import capture_both, capture_one

from graphguard import Input, Shard
from graphguard.graph.ir import Constant, Graph, Layout, Mesh, Node, Source, Symbol, Value, preview, show, values_in

HERE = Source(os.path.abspath("model.py"), 42, "forward")


def value(id, *shape, dtype="float32"):
    return Value(id, shape, dtype)


def node(op, args, outputs, kwargs=None, **rest):
    return Node(op, args, kwargs or {}, outputs, **{"source": HERE} | rest)


a, b, c, half = value(3, 8, 4), value(11, 4, 16), value(12, 8, 16), value(13, dtype="bfloat16")
PRINTED = [
    (node("aten.mm.default", (a, b), (c,)), "%12: f32[8, 16] = aten.mm(%3, %11)  # model.py:42"),
    (node("aten.mm.default", (a, b), (c,), backward=True), "%12: f32[8, 16] = aten.mm(%3, %11)  # model.py:42 backward"),
    (node("aten.mm.default", (a, b), (c,), source=None), "%12: f32[8, 16] = aten.mm(%3, %11)"),
    (node("aten.sum.dim_IntList", (a, (0, -1), True), (half,), {"dtype": Symbol("dtype", "bfloat16")}),
     "%13: bf16[] = aten.sum.dim_IntList(%3, [0, -1], True, dtype=bfloat16)  # model.py:42"),
    (node("aten.topk.default", (a, 2), (value(4, 8, 2), value(5, 8, 2, dtype="int64"))),
     "%4: f32[8, 2], %5: i64[8, 2] = aten.topk(%3, 2)  # model.py:42"),
    (node("aten.cat.default", ((a, a), 1), (c,)), "%12: f32[8, 16] = aten.cat([%3, %3], 1)  # model.py:42"),
    (node("aten.index.Tensor", (a, (None, b)), (c,)), "%12: f32[8, 16] = aten.index.Tensor(%3, [None, %11])  # model.py:42"),
    (node("aten.div.Tensor_mode", (a, 2.5), (c,), {"rounding_mode": "floor"}),
     "%12: f32[8, 16] = aten.div.Tensor_mode(%3, 2.5, rounding_mode='floor')  # model.py:42"),
    (node("dist.all_reduce", (a,), (c,), {"reduce": "sum", "group": (0, 1), "work": 1}),
     "%12: f32[8, 16] = dist.all_reduce(%3, reduce='sum', group=[0, 1], work=1)  # model.py:42"),
    (node("dist.wait", (), (), {"work": 1}), "dist.wait(work=1)  # model.py:42"),
]  # fmt: skip


@pytest.mark.parametrize(("printed", "text"), PRINTED)
def test_a_node_prints_as_one_line(printed, text):
    assert str(printed) == repr(printed) == text


def test_a_captured_graph_prints_as_a_program():
    table = torch.tensor([[1.0, 2.5, -3.0]])
    graph = capture_one(lambda x: {"y": (x * table).sum(-1), "none": None}, {"x": Input((2, 3))})
    line = f"tests/graph/test_ir.py:{test_a_captured_graph_prints_as_a_program.__code__.co_firstlineno + 2}"
    assert str(graph) == (
        "graph sequential\n"
        "  input x = %0: f32[2, 3]\n"
        "  %1: f32[1, 3] = constant([1, 2.5, -3])\n"
        f"  %2: f32[2, 3] = aten.mul.Tensor(%0, %1)  # {line}\n"
        f"  %3: f32[2] = aten.sum.dim_IntList(%2, [-1])  # {line}\n"
        "  output y = %3\n"
        "  output none = None"
    )


def test_a_rank_prints_its_mesh_and_the_layout_of_its_outputs():
    captured = capture_both(lambda x: x * 2, lambda x: x * 2, {"dp": 2, "tp": 1}, {"x": Input((4, 3), {"dp": Shard(0)})})
    assert str(captured.ranks[1]).startswith("graph rank 1 on dp=2 x tp=1\n  input x = %0: f32[2, 3]\n")
    graph = Graph("rank 0", outputs={"out": c}, layouts={"out": Layout((8, 32), (2,), (0, 1), ("S(1)",))})
    assert str(graph).endswith("  output out = %12  # part of (8, 32): S(1)")


def test_operands_are_in_order_with_repetitions():
    assert list(node("aten.cat.default", ((b, a), a), (c,), {"other": (None, (c,))}).operands()) == [b, a, a, c]
    assert list(values_in([1, "x", (a, [b])])) == [a], "only tuples nest"


def test_values_are_compared_by_identity():
    assert value(1) != value(1) and value(2, 3, 4).numel == 12 and value(2).numel == 1 and value(2, 0, 9).numel == 0


def test_a_source_is_shown_below_the_working_folder_or_by_its_folder():
    assert str(HERE) == "model.py:42"
    assert str(Source(os.path.abspath(os.path.join("nets", "a.py")), 7)) == os.path.join("nets", "a.py") + ":7"
    assert str(Source("/somewhere/else/net.py", 3)) == "else/net.py:3"
    assert str(Source("/net.py", 3)) == "net.py:3"
    assert str(Source("", 3)) == ":3"


@pytest.mark.parametrize("axes", [{"tp": 4}, {"dp": 2, "tp": 3}, {"pp": 2, "dp": 3, "tp": 4}, {"a": 1, "b": 1}])
def test_ranks_are_laid_out_row_major(axes):
    mesh = Mesh.of(axes)
    expected = list(itertools.product(*map(range, axes.values())))
    assert [tuple(mesh.coordinate(rank).values()) for rank in range(mesh.size)] == expected
    assert list(mesh.coordinate(0)) == list(axes) == list(mesh.names)
    assert mesh.shape == tuple(axes.values()) and str(mesh) == " x ".join(f"{k}={v}" for k, v in axes.items())


@pytest.mark.parametrize(
    ("constant", "text"),
    [
        (Constant("float32", (2,), struct.pack("<2f", 0.1, 2)), "[0.1, 2]"),
        (Constant("int64", (9,), struct.pack("<9q", *range(9))), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        (Constant("bool", (2,), b"\x00\x01"), "[False, True]"),
        (Constant("bfloat16", (2,), b"abcd"), "4 bytes"),
        (Constant("float64", (0, 3), b""), "[]"),
        (Constant("float32", (), struct.pack("<f", float("inf"))), "[inf]"),
    ],
)
def test_a_constant_shows_its_first_elements(constant, text):
    assert preview(constant) == text


def test_arguments_print_as_they_are_written():
    assert (
        show((1, (a, None), Symbol("layout", "strided"), "s", 1.5, 2j, True)) == "[1, [%3, None], strided, 's', 1.5, 2j, True]"
    )
