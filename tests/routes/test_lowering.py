"""Operators at known positions, spelled out: each against torch's own execution."""

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, capture_one, copies, flat, random_inputs

from graphguard import Input
from graphguard.errors import GraphGuardError
from graphguard.graph.wellformed import require_wellformed
from graphguard.oracle.replay import replay
from graphguard.routes.lowering import lowered, lowered_constants
from graphguard.routes.sample import same_on

X, Y = Input((5, 4)), Input((6, 4))
ROWS = torch.tensor([3, 0, 1, 1, 4, 2])
PLACES = torch.tensor([3, 0, 4, 1])
WIDE = torch.tensor([[0, 2], [2, 1], [2, 1], [0, 3], [3, 2]])
MASK = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 0]]).bool()
LINE = torch.tensor([1, 0, 1, 1, 0]).bool()

READS = {
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select of columns": lambda x, i: x.index_select(1, i % 4),
    "index": lambda x, i: x[i],
    "index of two dims": lambda x, i: x[i % 5, i % 4],
    "index of later dims": lambda x, i: x.view(5, 2, 2)[:, i % 2, i // 3],
    "index by a grid": lambda x, i: x[i.view(2, 3), (i % 4).view(2, 3)],
    "index from the end": lambda x, i: x[-1 - i],
    "embedding": lambda x, i: F.embedding(i.view(3, 2), x),
    "index of a run": lambda x, i: x[i - i + torch.arange(6).clamp(max=4)],
}
WRITES = {
    "index_add": lambda x, y, i: x.index_add(0, i, y),
    "index_add in place": lambda x, y, i: x.clone().index_add_(0, i, y),
    "index_put": lambda x, y, i: x.index_put((i[:3],), y[:3]),
    "index_put of one row": lambda x, y, i: x.index_put((i[:3],), y[0]),
    "index_put accumulates": lambda x, y, i: x.index_put((i,), y, accumulate=True),
    "index_put in two dims": lambda x, y, i: x.index_put((i, i % 4), y[:, 0], accumulate=True),
    "write to later dims": lambda x, y, i: _written_later(x, y, i),
    "index_copy": lambda x, y, i: x.index_copy(0, i[:3], y[:3]),
    "scatter_add by rows": lambda x, y, i: x.scatter_add(0, i.view(-1, 1).expand(-1, 4), y),
    "scatter_add": lambda x, y, i: x.scatter_add(0, torch.stack([i, i.flip(0)], 1), y),
    "write to a view": lambda x, y, i: _written(x, y, i),
}


def _written_later(x, y, i):
    x = x.clone().view(5, 2, 2)
    x[:, i[:2] % 2, i[:2] // 3] = y[:5, :2]
    return x


def _written(x, y, i):
    x = x.clone()
    x[i[:3]] = y[:3]
    x[:, 1:3][i[3:]] += y[3:, :2]
    return x


OTHERS = {
    "gather": (lambda x: x.gather(1, WIDE)),
    "gather of columns": (lambda x: x.gather(0, WIDE)),
    "gather of a part": (lambda x: x.gather(1, WIDE[:3])),
    "scatter": (lambda x: x.scatter(1, WIDE, x[:, :2] * 2)),
    "scatter of a number": (lambda x: torch.zeros_like(x).scatter(1, WIDE, 1.0)),
    "scatter into a part": (lambda x: x.scatter(1, WIDE[:3], x[:3, 2:])),
    "scatter along rows of a part": (lambda x: x.scatter_add(0, WIDE, x)),
    "mask of elements": (lambda x: x[MASK]),
    "mask of rows": (lambda x: x[LINE]),
    "masked_select": (lambda x: x.masked_select(MASK)),
    "masked_scatter": (lambda x: x.masked_scatter(MASK, (x * 3).flatten())),
    "masked_scatter of rows": (lambda x: x.masked_scatter(LINE.unsqueeze(1), x * 3)),
    "write by a mask": (lambda x: x.index_put((LINE,), x[:3] * 3)),
    "where": (lambda x: torch.where(MASK, x, x[:1] * 2)),
    "masked_fill": (lambda x: x.masked_fill(MASK, -2.5)),
    "masked_fill of rows": (lambda x: x.masked_fill(LINE.unsqueeze(1), float("-inf"))),
    "a mask as numbers": (lambda x: x * MASK + MASK.sum(0) / 3),
    "counts": (lambda x: x[:4] * WIDE.flatten().bincount(minlength=4).view(4, 1)),
    "argsort": (lambda x: x[torch.argsort(ROWS[:5], stable=True)]),
    "cumsum": (lambda x: x[(MASK.sum(1).cumsum(0) - 1) % 5]),
    "one_hot": (lambda x: F.one_hot(WIDE, 4).sum(1) * x),
    "filled buffer": (lambda x: x[_filled()]),
}

NO_GRADIENT = {"scatter of a number", "scatter along rows of a part"}


def _filled():
    made = torch.empty(4, dtype=torch.int64)
    made[:2] = ROWS[:2]
    made[2:] = ROWS[4:]
    return made


def assert_lowers(program, inputs, given, known=()):
    """The lowered graph has none of the operators that it should have replaced, and computes what torch does."""
    graph = capture_one(program, inputs)
    made = lowered(graph, {graph.inputs[name]: given[name] for name in known})
    require_wellformed(made)
    assert_same(replay(made, given), flat(program(**copies(given))))
    assert same_on(graph, made, given)
    allowed = ("view", "slice", "cat", "full", "add", "mul", "expand", "clone", "empty", "mm", "div", "copy", "select",
               "zeros_like", "_to_copy", "t", "unsqueeze", "transpose", "detach", "alias", "slice_scatter")  # fmt: skip
    names = {node.op.split(".")[1].removesuffix("_") for node in made.nodes}
    assert names <= set(allowed), names - set(allowed)
    return made


@pytest.mark.parametrize("name", READS)
def test_reads_at_known_positions(name):
    inputs = {"x": X, "i": Input((6,), dtype=torch.int64, high=5)}
    assert_lowers(READS[name], inputs, {**random_inputs(inputs), "i": ROWS}, ["i"])


@pytest.mark.parametrize("name", WRITES)
def test_writes_at_known_positions(name):
    inputs = {"x": X, "y": Y, "i": Input((6,), dtype=torch.int64, high=5)}
    assert_lowers(WRITES[name], inputs, {**random_inputs(inputs), "i": ROWS}, ["i"])


@pytest.mark.parametrize("name", OTHERS)
def test_constants_of_the_program(name):
    assert_lowers(lambda x: OTHERS[name](x), {"x": X}, random_inputs({"x": X}))


@pytest.mark.parametrize("name", [*READS, *(name for name in OTHERS if name not in NO_GRADIENT)])
def test_their_gradients(name):
    def program(x, i):
        x = x.requires_grad_()
        y = READS[name](x, i) if name in READS else OTHERS[name](x)
        return torch.autograd.grad((y * y.detach().cos()).sum(), x)[0]

    inputs = {"x": X, "i": Input((6,), dtype=torch.int64, high=5)}
    given = {**random_inputs(inputs), "i": ROWS}
    graph = capture_one(program, inputs)
    made = lowered(graph, {graph.inputs["i"]: ROWS})
    assert_same(replay(made, given), flat(program(**copies(given))))
    assert not any(
        node.op.split(".")[1].startswith(("index", "gather", "scatter", "embedding", "masked")) for node in made.nodes
    )


def test_a_choice_that_was_made():
    """The positions of a topk are given; the values are what is there, and the choice stays an output."""

    def program(x):
        values, chosen = x.topk(2, -1)
        return {"y": torch.zeros_like(x).scatter(1, chosen, values / values.sum(-1, keepdim=True)), "chosen": chosen}

    graph = capture_one(program, {"x": X})
    given = random_inputs({"x": X})
    (node,) = [node for node in graph.nodes if node.op == "aten.topk.default"]
    made = lowered(graph, {node.outputs[1]: given["x"].topk(2, -1).indices})
    assert same_on(graph, made, given)
    assert made.outputs["chosen"] is node.outputs[1]
    assert not any("scatter" in each.op for each in made.nodes)
    other = {"x": given["x"].flip(1)}
    assert not same_on(graph, made, other)  # another path


def test_what_is_found_among_known_numbers_is_known():
    """A rank without rows pads with zeros, and sorts them."""

    def program(x):
        values, order = torch.zeros(3, dtype=torch.int64).sort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(3)
        return {"y": x[back] * torch.bincount(values, minlength=3).view(3, 1), "order": order // 2}

    assert_lowers(program, {"x": X}, random_inputs({"x": X}))


def test_a_choice_of_which_one_result_is_not_known():
    """The largest of known numbers, which rest on positions alone: its place is not folded, and so what finds it stays."""
    graph = capture_one(lambda x: {"y": x[:3], "at": torch.arange(3).max(0).indices}, {"x": X})
    made = lowered(graph)
    require_wellformed(made)
    assert same_on(graph, made, random_inputs({"x": X}))


@pytest.mark.parametrize("rows", [[2, 2, 5], [0, 3, 3], [0, 0, 0]])
@pytest.mark.parametrize("summed", [False, True])
def test_products_in_groups(rows, summed):
    ends, count = torch.tensor(rows, dtype=torch.int32), rows[-1]

    def program(a, b, offs):
        return torch._grouped_mm(a.t() if summed else a, b, offs=offs)

    kind = {"dtype": torch.bfloat16}
    inputs = {"a": Input((count, 8), **kind), "b": Input((count, 8) if summed else (3, 8, 8), **kind)}
    inputs |= {"offs": Input((3,), dtype=torch.int32)}
    graph = capture_one(program, inputs)
    made = lowered(graph, {graph.inputs["offs"]: ends})
    assert not any("grouped" in node.op for node in made.nodes)
    given = {**random_inputs(inputs), "offs": ends}
    found, first = replay(made, given)["out"], 0
    for e, last in enumerate(rows):
        mine = given["a"][first:last]
        if summed:
            torch.testing.assert_close(found[e], mine.t() @ given["b"][first:last])
        else:
            torch.testing.assert_close(found[first:last], mine @ given["b"][e])
        first = last


def test_what_has_no_kernel_here_is_not_known():
    """`histc` of whole numbers: torch has it on a GPU alone."""
    graph = capture_one(lambda x: x[:4] * torch.histc(WIDE, 4, 0, 3).view(4, 1), {"x": X})
    assert any(node.op == "aten.histc.default" for node in lowered(graph).nodes)


# ---------------------------------------------------------------------- dtypes
KINDS = [torch.float32, torch.bool, torch.uint8, torch.int8, torch.int64, torch.complex64]
HALF = torch.tensor([[0, 2]] * 5)
OF_ANY_DTYPE = {
    "index_add": lambda x, y: x.index_add(0, ROWS, y),
    "index_add of twice as much": lambda x, y: x.index_add(0, ROWS, y, alpha=2),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.stack([ROWS, ROWS.flip(0)], 1), y),
    "index_put accumulates": lambda x, y: x.index_put((ROWS,), y, accumulate=True),
    "index_put by a mask": lambda x, y: x.index_put((LINE,), y[:3]),
    "index_put by a mask of bytes": lambda x, y: x.index_put((LINE.to(torch.uint8),), y[:3]),
    "index_put by a mask of elements accumulates": lambda x, y: x.index_put((MASK,), y.flatten()[:10], accumulate=True),
    "index by a mask of bytes": lambda x, y: x[LINE.to(torch.uint8)],
    "index by a mask and by numbers": lambda x, y: x[LINE, torch.tensor([0, 2, 1])],
    "masked_fill of a fraction": lambda x, y: x.masked_fill(MASK, 2.7),
    "masked_fill of 2": lambda x, y: x.masked_fill(MASK, 2),
    "masked_fill by a wider mask": lambda x, y: x[:1].masked_fill(MASK, 1),
    "scatter of a fraction": lambda x, y: x.scatter(1, HALF, 2.7),
    "masked_scatter by a wider mask": lambda x, y: x[:1].masked_scatter(MASK, y),
    "where beside a fraction": lambda x, y: torch.where(MASK, x, 2.7),
    "a mask as a summand": lambda x, y: x + MASK,
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", OF_ANY_DTYPE)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_whatever_the_dtype(kind, name):
    """Sums of truths are truths, bytes go round, fractions are cut off: as torch does it. What it refuses is refused."""
    inputs = {"x": Input((5, 4), dtype=kind), "y": Input((6, 4), dtype=kind)}
    given = random_inputs(inputs, high=127)
    try:
        expected = flat(OF_ANY_DTYPE[name](**copies(given)))
    except RuntimeError:
        with pytest.raises((GraphGuardError, RuntimeError)):
            replay(lowered(capture_one(OF_ANY_DTYPE[name], inputs)), given)
        return
    made = lowered(capture_one(OF_ANY_DTYPE[name], inputs))
    require_wellformed(made)
    assert_same(replay(made, given), expected)


OF_TWO_DTYPES = {
    "index_add": lambda x, y: torch.ops.aten.index_add(x, 0, ROWS, y),
    "index_copy": lambda x, y: torch.ops.aten.index_copy(x, 0, ROWS[:3], y[:3]),
    "index_put": lambda x, y: torch.ops.aten.index_put(x, (ROWS,), y, True),
    "scatter": lambda x, y: torch.ops.aten.scatter(x, 1, HALF, y[:5, :2]),
    "scatter_add": lambda x, y: torch.ops.aten.scatter_add(x, 1, HALF, y[:5, :2]),
    "masked_scatter": lambda x, y: torch.ops.aten.masked_scatter(x, MASK, y),
    "masked_scatter by bytes": lambda x, y: torch.ops.aten.masked_scatter(x, MASK.to(torch.uint8), x),
    "masked_scatter of too few": lambda x, y: torch.ops.aten.masked_scatter(x, MASK, x[:1]),
}


@pytest.mark.parametrize("name", OF_TWO_DTYPES)
def test_what_torch_refuses_is_not_spelled_out(name):
    """Without data some of these pass: they must not become something that has a value."""
    inputs = {"x": Input((5, 4), dtype=torch.complex64), "y": Input((6, 4))}
    with pytest.raises(RuntimeError):
        OF_TWO_DTYPES[name](**random_inputs(inputs))
    try:
        graph = capture_one(OF_TWO_DTYPES[name], inputs)
    except GraphGuardError:
        return
    with pytest.raises(GraphGuardError):
        replay(lowered(graph), random_inputs(inputs))


@pytest.mark.parametrize("padding", [-1, -4, 1])
def test_rows_that_are_padding_have_no_gradient(padding):
    """-1 is none, and so is every other number below 0: the operator does not count from the end."""

    def program(x):
        return torch.ops.aten.embedding_dense_backward(x, ROWS[:5], 5, padding, False)

    assert_lowers(program, {"x": X}, random_inputs({"x": X}))


def test_what_is_not_certain_stays():
    """Two elements for one place, positions outside, and positions that are ranges."""
    twice = capture_one(lambda x: x.index_put((torch.tensor([1, 1]),), x[:2]), {"x": X})
    assert lowered_constants(twice) is None
    ranges = capture_one(lambda x: x[torch.arange(3) + 1], {"x": X})
    assert lowered_constants(ranges) is None
    data = capture_one(lambda x, i: x[i], {"x": X, "i": Input((3,), dtype=torch.int64, high=5)})
    assert lowered_constants(data) is None
