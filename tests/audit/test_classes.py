"""What the table of operators says of each of them, by execution; and that what is wrong there is found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from harness import capture_one

from graphguard.audit import classes
from graphguard.audit.calls import calls_of
from graphguard.audit.classes import wrongs
from graphguard.audit.dtypes import sample_calls
from graphguard.audit.samples import SAMPLES
from graphguard.capture.torch.relation.inputs import Input
from graphguard.engine.relate.law import law_at
from graphguard.graph import operators
from graphguard.graph.exposure import Exposure, Shown
from graphguard.graph.ir import Mesh, Node
from graphguard.graph.placement import REPLICATE, SUM
from graphguard.graph.tensor_layout import TensorLayout
from graphguard.lemmas import known, registry
from graphguard.mutate import rewrites, site

PORTIONS = 4  # of the samples, so that test processes share them
aten = torch.ops.aten


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("portion", range(PORTIONS))
def test_operators_are_what_the_table_says(portion: int) -> None:
    torch.set_num_threads(1)
    assert list(wrongs(sample_calls(list(SAMPLES.values())[portion::PORTIONS]))) == []


def test_an_operator_has_one_class() -> None:
    counts = Counter(name for names in operators.CLASSES.values() for name in names)
    assert [name for name, count in counts.items() if count > 1] == []


def test_a_row_without_a_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"graph/operators\.py"):
        registry.row("aten.no_such_operator.default", means="nothing")(lambda c: None)


x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
mask = x > y
WRONG_CLASSES: dict[str, tuple[str, Any, str]] = {
    "takes": ("exp", lambda: aten.exp(x), "none of its operands"),
    "joins": ("add", lambda: aten.add(x, y), "none of its operands"),
    "reshapes": ("slice", lambda: aten.slice(x, 0, 1, 3), "not in its result"),
    "elementwise": ("cumsum", lambda: aten.cumsum(x, 0), "other places"),
    "creates": ("clone", lambda: aten.clone(x), "depends on numbers"),
}


@pytest.mark.parametrize("said", WRONG_CLASSES)
def test_a_wrong_class_is_found(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, program, text = WRONG_CLASSES[said]
    assert list(wrongs(calls_of(program))) == []
    monkeypatch.setitem(operators.CLASS, name, said)
    assert any(text in found for found in wrongs(calls_of(program)))


WRONG_SETS: dict[str, tuple[str, Any, str]] = {
    "EXACT": ("exp", lambda: aten.exp(x), "rounded"),
    "SHOWS": ("where", lambda: aten.where(mask, x, y), "that is nan"),
    "KEEPS": ("sigmoid", lambda: aten.sigmoid(x), "hides an element of operand 0 that is inf"),
    "KEEPS_FIRST": ("exp", lambda: aten.exp(x), "hides an element of operand 0 that is -inf"),
}


@pytest.mark.parametrize("said", WRONG_SETS)
def test_a_name_in_a_wrong_set_is_found(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, program, text = WRONG_SETS[said]
    assert list(wrongs(calls_of(program))) == []
    monkeypatch.setattr(operators, said, {name})
    assert any(text in found for found in wrongs(calls_of(program)))


@pytest.mark.parametrize("program", [lambda: aten.mul(x, y), lambda: aten.exp(x), lambda: aten.div(x, y)])
def test_what_is_not_linear_is_found(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "linear_in", lambda _operator, count: (frozenset(range(count)),))
    assert any("not linear" in found for found in wrongs(calls_of(program)))


def test_a_description_that_is_wrong_where_ranks_differ_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = known.describe

    def of_first_rank(table: Any, node: Any, args: Any, kwargs: Any) -> Any:
        return describe(table, node, tuple(int(arg[0]) if hasattr(arg, "astype") else arg for arg in args), kwargs)

    calls = list(calls_of(lambda: aten.slice(x, 0, 1, 3)))
    assert list(wrongs(calls)) == []
    monkeypatch.setattr(known, "describe", of_first_rank)
    assert any("where ranks differ" in found for found in wrongs(calls))


def test_what_out_held_before_is_not_exposed() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        memory = x.reciprocal()
        torch.add(x, x, out=memory)
        return memory

    graph = capture_one(program, {"x": Input((4,))})
    exposure = Exposure(graph)
    shown = {node.op: exposure.of(node) for node in graph.nodes}
    assert shown["aten.add.out"] == Shown.ALL
    assert shown["aten.reciprocal.default"] == Shown.NOTHING


def test_the_operators_of_another_library_are_unknown() -> None:
    assert operators.name_of("aten.add_.Tensor") == "add"
    assert operators.class_of("mine.add.default") is None


@pytest.mark.parametrize("operator", ["aten.div.Tensor", "aten.gelu_backward.default"])
def test_a_law_looks_at_the_operand_that_is_a_summand(operator: str) -> None:
    mesh, whole, part = Mesh.of({"tp": 2}), (REPLICATE,), (SUM,)
    node, x, y = Node(operator, (), {}, ()), ("x", "float32", (4,), mesh, (0, 1)), ("y", "float32", (4,), mesh, (0, 1))
    assert law_at(node, [TensorLayout(*x, part), TensorLayout(*y, whole)]) is None
    assert "is not linear" in str(law_at(node, [TensorLayout(*x, whole), TensorLayout(*y, part)]))


def test_the_lists_of_rewrites_are_of_their_classes() -> None:
    names = {operators.name_of(operator) for operator in site.MOVES}
    assert names <= operators.RESHAPES
    assert {operators.name_of(operator) for operator in site.ELEMENTWISE} <= operators.ELEMENTWISE | operators.RESHAPES
    assert all(operators.linear_in(operator, 2) for operator in rewrites._LINEAR)
