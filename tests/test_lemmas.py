"""Every row of the table of lemmas against torch: whole tensors, and shards in several lanes.

All cases are captured as one program and described over one table; what each output is described as is evaluated and compared
with what torch computes. Then the same with inputs cut into shards, one per lane, as an input relation would.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import lemma_networks  # noqa: F401 - importing cases registers them
import lemma_reductions  # noqa: F401
import lemma_tensors  # noqa: F401
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import capture_one
from lemma_case import CASES, Case, N, Spec, X

from graphguard.aten.operators import overload
from graphguard.engine.evaluate import Evaluator, Unlearned
from graphguard.engine.interpret import Interpreter, Unknown, _bound, elements
from graphguard.engine.lane import collapse
from graphguard.engine.meaning import FUNCTIONS
from graphguard.engine.table import Table
from graphguard.engine.term import Value
from graphguard.engine.value import cut
from graphguard.ir import Graph, Node
from graphguard.lemmas import registry
from graphguard.oracle.replay import run
from graphguard.relation import Input

Tensors = dict[str, torch.Tensor]
Cut = dict[str, int]  # the dim along which each sharded input is cut
MOST_CUTS = 10


class Sharding(NamedTuple):
    lanes: int
    cut: Cut


# ---------------------------------------------------------------------- programs
def tensors_of(cases: Mapping[str, Case]) -> Tensors:
    """Random tensors for all cases; floats in 64 bits."""
    made = {}
    for case in cases.values():
        for number, (name, spec) in enumerate(case.inputs.items()):
            made[f"{case.name}/{name}"] = spec.tensor(torch.Generator().manual_seed(number))
    return made


def capture_all(cases: Mapping[str, Case], shapes: Mapping[str, tuple[int, ...]]) -> Graph:
    def program(**given: torch.Tensor) -> Any:
        return {name: case.program(**{n: given[f"{name}/{n}"] for n in case.inputs}) for name, case in cases.items()}

    inputs = {
        f"{name}/{n}": Input(shapes[f"{name}/{n}"], dtype=spec.dtype)
        for name, case in cases.items()
        for n, spec in case.inputs.items()
    }
    return capture_one(program, inputs)


def outputs_of(graph: Graph, name: str) -> dict[str, Any]:
    return {path: value for path, value in graph.outputs.items() if path.split(".")[0] == name and value is not None}


def nodes_of(graph: Graph, name: str) -> list[Node]:
    """The nodes that a case's outputs depend on."""
    needed, found = set(outputs_of(graph, name).values()), []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.operands())
            found.append(node)
    return found[::-1]


class Watching(Interpreter):
    """Notes the nodes that no row described, and those where a row failed."""

    def __init__(self, table: Table):
        super().__init__(table)
        self.fallen: dict[int, str] = {}

    def describe(self, node: Node, args: Any, kwargs: Any, lanes: int) -> Any:
        try:
            return super().describe(node, args, kwargs, lanes)
        except Exception as error:
            self.fallen[id(node)] = f"{node.op}: {type(error).__name__}: {error}"
            return [Unknown(str(error), node)] * len(node.outputs)

    def _opaque(self, node: Node, args: Any, kwargs: Any, reason: str) -> Any:
        self.fallen[id(node)] = f"{node.op}: {reason}"
        return super()._opaque(node, args, kwargs, reason)

    def run_ranks(self, graph: Graph, inputs: Mapping[str, Value], lanes: int) -> dict[Any, Any]:
        environment: dict[Any, Any] = {value: inputs[name] for name, value in graph.inputs.items()}
        environment |= {value: self.constant(constant) for value, constant in graph.constants.items()}
        for node in graph.nodes:
            args, kwargs = _bound((node.args, dict(node.kwargs)), environment)
            environment |= zip(node.outputs, self.describe(node, args, kwargs, lanes), strict=False)
        return environment


class Described:
    """All cases, described whole; and the tools to describe and to evaluate shards of them."""

    def __init__(self) -> None:
        self.full = tensors_of(CASES)
        self.graph = capture_all(CASES, {name: tuple(tensor.shape) for name, tensor in self.full.items()})
        self.table = Table()
        self.interpreter = Watching(self.table)
        self.inputs = {
            name: self.interpreter.input(name, registry.described_shape(value)) for name, value in self.graph.inputs.items()
        }
        for case in CASES.values():
            for name, spec in case.inputs.items():
                if (
                    not spec.dtype.is_floating_point
                    and not spec.dtype.is_complex
                    and spec.declared
                    and spec.dtype != torch.bool
                ):
                    for term in self.inputs[f"{case.name}/{name}"].terms:
                        self.table.declare(term.factors[0].atom, int(spec.low), int(spec.high))
        self.environment = self.interpreter.run_sequential(self.graph, self.inputs)
        self.table.recording = False
        self.results = run(self.graph, self.full, wide=True).values
        self.evaluator = self.evaluator_of(self.graph)
        learn(self.evaluator, self.graph.nodes, self.environment, self.results, 0)

    def evaluator_of(self, graph: Graph) -> Evaluator:
        arrays = {name: as_array(tensor) for name, tensor in self.full.items()}
        constants = {constant: elements(constant) for constant in graph.constants.values()}
        return Evaluator(self.table, arrays, constants)


def learn(
    evaluator: Evaluator, nodes: Iterable[Node], environment: Mapping[Any, Any], results: Mapping[Any, torch.Tensor], lane: int
) -> None:
    """What operators that are known by name alone give, from the tensors that they gave."""
    for node in nodes:
        for tensor in node.outputs:
            value = environment.get(tensor)
            if isinstance(value, Value) and tensor in results:
                evaluator.learn(value, lane, as_array(results[tensor]))


def as_array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().resolve_conj()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).numpy(force=True)


@functools.cache
def described() -> Described:
    return Described()


def assert_meets(evaluator: Evaluator, value: Value, lane: int, expected: torch.Tensor, what: str) -> None:
    with np.errstate(all="ignore"):
        got = evaluator.value(value, lane)
    np.testing.assert_allclose(got, as_array(expected).astype(float), rtol=1e-7, atol=1e-9, err_msg=what)


# ---------------------------------------------------------------------- whole tensors
@pytest.mark.parametrize("name", CASES)
def test_a_row_says_what_torch_computes(name: str) -> None:
    whole = described()
    nodes = nodes_of(whole.graph, name)
    fallen = [whole.interpreter.fallen[id(node)] for node in nodes if id(node) in whole.interpreter.fallen]
    assert not fallen
    outputs = outputs_of(whole.graph, name)
    assert outputs
    for path, tensor in outputs.items():
        value = whole.environment[tensor]
        assert isinstance(value, Value), f"{path}: {value}"
        assert_meets(whole.evaluator, value, 0, whole.results[tensor], f"{path} from {[n.op for n in nodes]}")


# ---------------------------------------------------------------------- shards
def shardings(case: Case) -> Iterator[Sharding]:
    """Each input along each dim, alone and together with all others that have the same dim, counted from either end."""
    seen: list[Sharding] = []
    for lanes in (2, 3):
        alone: list[Cut] = [{name: dim} for name, spec in case.inputs.items() for dim in range(len(spec.shape))]
        rank = max(len(spec.shape) for spec in case.inputs.values())
        left: list[Cut] = [{n: d for n, s in case.inputs.items() if len(s.shape) > d} for d in range(rank)]
        right: list[Cut] = [{n: len(s.shape) - 1 - d for n, s in case.inputs.items() if len(s.shape) > d} for d in range(rank)]
        cuts = [*left, *right, *alone] if case.only is None else [left[dim] for dim in case.only]
        for cut_ in cuts:
            even = {name: dim for name, dim in cut_.items() if case.inputs[name].shape[dim] % lanes == 0}
            sharding = Sharding(lanes, even)
            if even and sharding not in seen:
                seen.append(sharding)
                yield sharding


def shard(tensor: torch.Tensor, dim: int, lanes: int, lane: int) -> torch.Tensor:
    return tensor.chunk(lanes, dim)[lane].clone()


def local(case: Case, sharding: Sharding, full: Tensors, lane: int) -> Tensors:
    lane = min(lane, sharding.lanes - 1)
    given = {name: full[f"{case.name}/{name}"].clone() for name in case.inputs}
    return {n: shard(t, sharding.cut[n], sharding.lanes, lane) if n in sharding.cut else t for n, t in given.items()}


def runs(case: Case, sharding: Sharding, full: Tensors) -> bool:
    """Whether the program accepts shards of these shapes. Some kernels do not look at shapes; their meta kernels do."""
    try:
        for device in ("meta", "cpu"):
            for lane in range(sharding.lanes):
                given = {n: t.to(case.inputs[n].dtype) for n, t in local(case, sharding, full, lane).items()}
                with torch.device(device):
                    case.program(**{n: t.to(device) for n, t in given.items()})
    except (RuntimeError, IndexError, ValueError, AssertionError):
        return False
    return True


class Lanes(NamedTuple):
    """One sharding of each case, captured, described and run at once."""

    graph: Graph
    environment: Mapping[Any, Any]
    results: list[Mapping[Any, torch.Tensor]]
    shardings: Mapping[str, Sharding]


@functools.cache
def sharded() -> list[Lanes]:
    whole = described()
    torch.set_num_threads(1)
    batches: list[dict[str, Sharding]] = defaultdict(dict)  # type: ignore[assignment]
    for case in CASES.values():
        accepted = (s for s in shardings(case) if runs(case, s, whole.full))
        for number, sharding in zip(range(MOST_CUTS), accepted, strict=False):
            batches[number][case.name] = sharding
    return [_described_lanes(whole, batches[number]) for number in sorted(batches)]


def _described_lanes(whole: Described, batch: Mapping[str, Sharding]) -> Lanes:
    cases = {name: CASES[name] for name in batch}
    given = []
    for lane in range(3):
        parts = {name: local(case, batch[name], whole.full, lane) for name, case in cases.items()}
        given.append({f"{name}/{n}": tensor for name, each in parts.items() for n, tensor in each.items()})
    graph = capture_all(cases, {name: tuple(tensor.shape) for name, tensor in given[0].items()})
    inputs = {}
    for name, (lanes, dims) in batch.items():
        for n in cases[name].inputs:
            value = whole.inputs[f"{name}/{n}"]
            if n in dims:
                size = int(value.shape[dims[n]]) // lanes
                starts = np.arange(lanes, dtype=np.int64) * size
                value = cut(whole.table, value, dims[n], collapse(starts), collapse(starts + size))
            inputs[f"{name}/{n}"] = value
    environment = whole.interpreter.run_ranks(graph, inputs, 1)
    return Lanes(graph, environment, [run(graph, each, wide=True).values for each in given], batch)


@pytest.mark.parametrize("name", CASES)
def test_a_row_says_what_torch_computes_of_shards(name: str) -> None:
    whole = described()
    for lanes in sharded():
        if name not in lanes.shardings:
            continue
        evaluator = whole.evaluator_of(lanes.graph)
        learn(evaluator, nodes_of(whole.graph, name), whole.environment, whole.results, 0)
        count, cut_ = lanes.shardings[name]
        for lane in range(count):
            learn(evaluator, nodes_of(lanes.graph, name), lanes.environment, lanes.results[lane], lane)
            for path, tensor in outputs_of(lanes.graph, name).items():
                value = lanes.environment[tensor]
                if isinstance(value, Value):
                    with contextlib.suppress(Unlearned):  # of rows of other lanes nothing is known yet
                        assert_meets(evaluator, value, lane, lanes.results[lane][tensor], f"{path}, lane {lane} of {cut_}")


# ---------------------------------------------------------------------- the table as a whole
def test_every_row_has_a_case() -> None:
    rows = {row.operator for row in registry.rows() if row.kind != "random"}
    met = {row.operator for node in described().graph.nodes if (row := registry.lookup(node.op)) is not None}
    assert sorted(rows - met) == []


def test_every_row_is_of_an_operator_of_torch() -> None:
    for row in registry.rows():
        if row.operator.startswith("aten."):
            names = [row.operator, row.operator.replace(".", "_.", 2).replace("aten_.", "aten.", 1)]
            assert any(_exists(name) for name in names), row.operator


def _exists(name: str) -> bool:
    try:
        return overload(name) is not None
    except AttributeError:
        return False


def test_every_function_has_a_meaning() -> None:
    table = described().table
    used = {table.definitions[atom.id].name for (kind, _), atom in table.atoms() if kind == "function"}
    assert used <= FUNCTIONS.keys()


# ---------------------------------------------------------------------- what is refused
def describe_one(program: Any, **inputs: Spec) -> tuple[Watching, dict[str, Any]]:
    """A program described on its own: the interpreter, and its outputs."""
    graph = capture_one(program, {name: Input(spec.shape, dtype=spec.dtype) for name, spec in inputs.items()})
    interpreter = Watching(Table())
    given = {name: interpreter.input(name, registry.described_shape(value)) for name, value in graph.inputs.items()}
    for name, spec in inputs.items():
        if spec.dtype == torch.int64 and spec.declared:
            for term in given[name].terms:
                interpreter.table.declare(term.factors[0].atom, int(spec.low), int(spec.high))
    environment = interpreter.run_sequential(graph, given)
    return interpreter, {path: environment[tensor] for path, tensor in graph.outputs.items() if tensor is not None}


REFUSED = {
    "negative positions count from the end": (lambda x, i: x[i], {"x": X(6, 4), "i": N(3, low=-6, high=6)}),
    "several elements in one place": (lambda x, i: x.index_put((i,), x[:3]), {"x": X(6, 4), "i": N(3)}),
    "several elements per row": (lambda x, i: x.scatter(1, i, 2.0), {"x": X(6, 4), "i": N(6, 2, high=4)}),
    "bits": (lambda i: i & 3, {"i": N(6)}),
    "exp of complex numbers": (lambda z: z.exp(), {"z": Spec((6, 2), torch.complex64)}),
    "powers of complex numbers": (lambda z: z * z.abs() + z**2, {"z": Spec((6, 2), torch.complex64)}),
    "rounded ranges": (lambda x: torch.linspace(0, 5, 4, dtype=torch.int64) + x, {"x": X(4)}),
    "overlapping windows": (lambda x, w: F.conv1d(x, w, padding=1), {"x": X(2, 3, 6), "w": X(4, 3, 3)}),
    "a scatter by product": (
        lambda x, i, y: x.scatter_reduce(1, i, y, "prod"),
        {"x": X(6, 4), "i": N(6, 2, high=4), "y": X(6, 2)},
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_row_does_not_cover_is_refused(reason: str) -> None:
    program, inputs = REFUSED[reason]
    interpreter, _ = describe_one(program, **inputs)
    assert interpreter.fallen


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
    assert all(isinstance(value, Unknown) for value in outputs.values())


def test_an_index_of_a_rank_must_lie_in_its_shard() -> None:
    """Ids minus an offset, unmasked, read before the shard: torch wraps around or raises, and neither is a row of zeros."""
    graph = capture_one(
        lambda w, i: (w[i - 3], F.embedding(i - 3, w)), {"w": Input((3, 4)), "i": Input((5,), dtype=torch.int64)}
    )
    interpreter = Watching(Table())
    w, i = interpreter.input("w", (6, 4)), interpreter.input("i", (5,))
    interpreter.table.declare(i.terms[0].factors[0].atom, 0, 6)
    interpreter.table.recording = False
    part = cut(interpreter.table, w, 0, 3, 6)
    interpreter.run_ranks(graph, {"w": part, "i": i}, 1)
    assert {text.split(":")[0] for text in interpreter.fallen.values()} == {"aten.index.Tensor", "aten.embedding.default"}


def test_masked_ids_lie_in_the_shard() -> None:
    def program(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        mask = (i < 3) | (i >= 6)
        return F.embedding((i - 3).masked_fill(mask, 0), w).masked_fill(mask[:, None], 0.0)

    graph = capture_one(program, {"w": Input((3, 4)), "i": Input((5,), dtype=torch.int64)})
    interpreter = Watching(Table())
    w, i = interpreter.input("w", (8, 4)), interpreter.input("i", (5,))
    interpreter.table.declare(i.terms[0].factors[0].atom, 0, 8)
    interpreter.table.recording = False
    environment = interpreter.run_ranks(graph, {"w": cut(interpreter.table, w, 0, 3, 6), "i": i}, 1)
    assert not interpreter.fallen
    weights, ids = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, 3, 5, 7, 4])
    expected = program(weights[3:6], ids)
    evaluator = Evaluator(interpreter.table, {"w": weights.numpy(), "i": ids.numpy()})
    assert_meets(evaluator, environment[graph.outputs["out"]], 0, expected, "masked ids")


def test_a_target_that_is_ignored_keeps_its_range() -> None:
    """A range that was given with the ignored number in it is not narrowed to the classes."""
    interpreter, _ = describe_one(lambda x, t: F.cross_entropy(x, t), x=X(6, 4), t=N(6, low=-100, high=4))
    assert (-100, 4) in interpreter.table.bounds.values()
