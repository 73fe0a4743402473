"""Every row of the table of lemmas against torch, by the audit that `graphguard lemmas audit` runs; and what rows refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import capture_one

from graphguard.aten.operators import overload
from graphguard.audit.rows import audit, operators_met
from graphguard.audit.samples import SAMPLES
from graphguard.audit.samples.sample import N, Spec, X
from graphguard.capture.torch.relation.inputs import Input
from graphguard.engine.algebra.value import cut
from graphguard.engine.interpret import Interpreter
from graphguard.engine.numeric.evaluator import Evaluator
from graphguard.engine.store.table import Table
from graphguard.engine.terms.unknown import Unknown
from graphguard.lemmas import known, registry
from graphguard.lemmas.known import all_lemmas

PORTIONS = 16  # of the samples, so that test processes share them


# ---------------------------------------------------------------------- the audit
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("portion", range(PORTIONS))
def test_rows_say_what_torch_computes_of_whole_tensors_and_of_shards(portion: int) -> None:
    torch.set_num_threads(1)
    samples = list(SAMPLES.values())[portion::PORTIONS]
    ledger = audit(samples, examples=1, seed=0)
    assert [text for line in ledger.values() for text in line.wrong] == []
    refused = [text for line in ledger.values() for text in line.refused]
    assert [text for text in refused if not text.endswith("for which its lemma is not audited")] == []
    assert [text for line in ledger.values() for text in line.weaker] == []  # what all other examples find is no fault
    assert sum(line.cases for line in ledger.values()) >= 20 * len(samples)


# ---------------------------------------------------------------------- the table as a whole
def test_every_row_has_a_sample() -> None:
    rows = {row.operator for row in known.rows() if row.kind != "random"}  # of random numbers nothing is said
    assert rows and sorted(rows - set().union(*operators_met().values())) == []


def test_every_row_is_of_an_operator_of_torch() -> None:
    operators = [row.operator for row in known.rows() if row.operator.startswith("aten.")]
    assert len(operators) > 300
    for operator in operators:
        names = [operator, operator.replace(".", "_.", 2).replace("aten_.", "aten.", 1)]
        assert any(_exists(name) for name in names), operator


def _exists(name: str) -> bool:
    try:
        return overload(name) is not None
    except AttributeError:
        return False


# ---------------------------------------------------------------------- what is refused
def describe_one(program: Any, **inputs: Spec) -> tuple[Interpreter, dict[str, Any]]:
    """A program described on its own: the interpreter, and its outputs."""
    graph = capture_one(program, {name: Input(spec.shape, dtype=spec.dtype) for name, spec in inputs.items()})
    interpreter = Interpreter(Table(), all_lemmas())
    given = {name: interpreter.input(name, registry.described_shape(value)) for name, value in graph.inputs.items()}
    for name, spec in inputs.items():
        if spec.dtype == torch.int64 and spec.declared:
            for term in given[name].terms:
                interpreter.table.facts.declare(term.factors[0].atom, int(spec.low), int(spec.high))
    environment = interpreter.run_sequential(graph, given)
    return interpreter, {path: environment[tensor] for path, tensor in graph.outputs.items() if tensor is not None}


REFUSED = {
    "negative positions count from the end": (lambda x, i: x[i], {"x": X(6, 4), "i": N(3, low=-6, high=6)}),
    "several elements in one place": (lambda x, i: x.index_put((i,), x[:3]), {"x": X(6, 4), "i": N(3)}),
    "a scatter to a part of the rows": (lambda x, i: x.scatter(1, i, 2.0), {"x": X(6, 4), "i": N(3, 1, high=4)}),
    "bits": (lambda i: i & 3, {"i": N(6)}),
    "exp of complex numbers": (lambda z: z.exp(), {"z": Spec((6, 2), torch.complex64)}),
    "powers of complex numbers": (lambda z: z * z.abs() + z**2, {"z": Spec((6, 2), torch.complex64)}),
    "rounded ranges": (lambda x: torch.linspace(0, 5, 4, dtype=torch.int64) + x, {"x": X(4)}),
    "transposed windows": (lambda x, w: F.conv_transpose1d(x, w), {"x": X(2, 4, 6), "w": X(4, 2, 3)}),
    "a scatter by product": (
        lambda x, i, y: x.scatter_reduce(1, i, y, "prod"),
        {"x": X(6, 4), "i": N(6, 2, high=4), "y": X(6, 2)},
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_row_does_not_cover_is_refused(reason: str) -> None:
    program, inputs = REFUSED[reason]
    interpreter, _ = describe_one(program, **inputs)
    assert interpreter.fallbacks


RANDOM = {
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "uniform": lambda x: x.uniform_(),
    "normal": lambda x: x.normal_(),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "rand_like": lambda x: torch.rand_like(x),
    "randn": lambda x: torch.randn(3) + x[0, 0],
    "dropout": lambda x: F.dropout(x, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_have_no_description(name: str) -> None:
    _, outputs = describe_one(RANDOM[name], x=X(6, 4))
    assert outputs and all(isinstance(value, Unknown) for value in outputs.values())


def test_an_index_of_a_rank_must_lie_in_its_shard() -> None:
    """Ids minus an offset, unmasked, read before the shard: torch wraps around or raises, and neither is a row of zeros."""
    graph = capture_one(
        lambda w, i: (w[i - 3], F.embedding(i - 3, w)), {"w": Input((3, 4)), "i": Input((5,), dtype=torch.int64)}
    )
    interpreter = Interpreter(Table(), all_lemmas())
    w, i = interpreter.input("w", (6, 4)), interpreter.input("i", (5,))
    interpreter.table.facts.declare(i.terms[0].factors[0].atom, 0, 6)
    interpreter.table.recording = False
    part = cut(interpreter.table, w, 0, 3, 6)
    interpreter.run_lanes(graph, {"w": part, "i": i}, 1)
    assert {node.op for node, _ in interpreter.fallbacks} == {"aten.index.Tensor", "aten.embedding.default"}


def test_masked_ids_lie_in_the_shard() -> None:
    def program(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        mask = (i < 3) | (i >= 6)
        return F.embedding((i - 3).masked_fill(mask, 0), w).masked_fill(mask[:, None], 0.0)

    graph = capture_one(program, {"w": Input((3, 4)), "i": Input((5,), dtype=torch.int64)})
    interpreter = Interpreter(Table(), all_lemmas())
    w, i = interpreter.input("w", (8, 4)), interpreter.input("i", (5,))
    interpreter.table.facts.declare(i.terms[0].factors[0].atom, 0, 8)
    interpreter.table.recording = False
    environment = interpreter.run_lanes(graph, {"w": cut(interpreter.table, w, 0, 3, 6), "i": i}, 1)
    assert not interpreter.fallbacks
    weights, ids = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, 3, 5, 7, 4])
    expected = program(weights[3:6], ids)
    evaluator = Evaluator(interpreter.table, {"w": weights.numpy(), "i": ids.numpy()})
    np.testing.assert_allclose(evaluator.value(environment[graph.outputs["out"]]), expected)


def test_a_target_is_a_class_or_ignored_whatever_range_was_given() -> None:
    interpreter, _ = describe_one(lambda x, t: F.cross_entropy(x, t), x=X(6, 4), t=N(6, low=-100, high=4))
    (known,) = interpreter.table.facts.ranges().values()
    assert known.in_words("t", (6,)) == ["-100 <= t < 4", "0 <= t < 4 or t = -100"]
