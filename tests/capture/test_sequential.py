"""Forward programs: the captured graph, replayed on real data, gives what plain execution gives, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import assert_replays_as_eager, capture_one, copies, flat, random_inputs
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphguard import Input
from graphguard.capture.torch.program import FunctionProgram
from graphguard.capture.torch.session import capture_sequential
from graphguard.errors import ReplayError
from graphguard.oracle.replay import replay

I64, BOOL, BF16, F64 = torch.int64, torch.bool, torch.bfloat16, torch.float64
X = {"x": Input((4, 6))}
IDS = {"ids": Input((3, 5), dtype=I64)}
IMAGE = {"x": Input((2, 4, 8, 8))}
QKV = {"q": Input((2, 4, 6, 8)), "k": Input((2, 4, 6, 8)), "v": Input((2, 4, 6, 8))}


def attention(**options):
    """SDPA as torch computes it where no fused kernel is at hand: so does the capture."""

    def function(q, k, v, **mask):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, **mask, **options)

    return function


def batch_norm_in_training(x, w, b, mean, var):
    y = F.batch_norm(x, mean, var, w, b, training=True, momentum=0.3)
    return y, mean, var


def rope(x, angles):
    turned = torch.view_as_complex(x.reshape(2, 5, 3, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).reshape(2, 5, 6)


def scattered(x, i, y):
    a = x.scatter(1, i, y)
    b = x.scatter_add(1, i, y)
    c = x.scatter_reduce(1, i, y, "amax", include_self=False)
    return a, b, c, torch.gather(x, 1, i), x.index_select(1, i[0]), x.index_add(1, i[0], y), torch.take_along_dim(x, i, 1)


def masked(x, m):
    y = x.masked_fill(m, -1.0)
    z = torch.where(m, x, x.exp())
    w = x.clone()
    w[m] = 0.5
    return y, z, w, torch.where(m, 0.0, x), x.masked_fill(~m, float("-inf")).softmax(-1)


def indexed(x, i):
    y = x.clone()
    y[i, 1:3] = 7.0
    y.index_put_((i,), x[:3], accumulate=True)
    return y, x[i], x[i, :2], x[:, None, i % 2], x[..., -1], x[i[:, None], i[None, :]]


def ordered(x):
    top = x.topk(3, dim=-1)
    values, order = x.sort(dim=0, descending=True, stable=True)
    return (
        top.values,
        top.indices,
        values,
        order,
        x.cumsum(1),
        x.cumprod(0),
        x.argmax(-1),
        x.flip(1),
        x.roll(2, 0),
        x.kthvalue(2),
    )


def triangles(x):
    return x.tril(-1), x.triu(1), torch.ones(4, 4).tril() * x[:, :4], x.diagonal(), torch.diag_embed(x), x[:4, :4].trace()


def pieces(x):
    a, b = x.chunk(2, 1)
    c, d, e = x.split([1, 2, 3], 1)
    rows = x.unbind(0)
    return (
        a * b,
        c + d.sum() + e.mean(),
        torch.stack(rows[::-1]),
        torch.cat([b, a], 1),
        x.tensor_split(3, 1)[1],
        x.unflatten(1, (2, 3)),
    )


def reduced(x):
    return (
        x.sum(),
        x.mean(0),
        x.amax(1),
        x.amin(1, keepdim=True),
        x.var(1),
        x.std(unbiased=False),
        x.norm(),
        x.prod(1),
        x.logsumexp(1),
        x.max(dim=1),
        x.min(),
        x.all(),
        (x > 0).any(1),
        torch.linalg.vector_norm(x, 1, 0),
        x.median(),
        x.nansum(),
    )


def casts(x):
    y = x.to(BF16) @ x.to(BF16).T
    return (
        y,
        y.float() * 2,
        x.half() + 1,
        (x * 10).to(torch.int32),
        x.double().sin(),
        x.bool(),
        (x > 0).long() * 3,
        x.to(torch.int8),
    )


def pointwise(x):
    y = x.abs() + 0.1
    return (
        x.exp(),
        y.log(),
        y.rsqrt(),
        y.pow(2.5),
        x**3,
        2**x,
        x.sigmoid(),
        x.tanh(),
        F.silu(x),
        F.gelu(x, approximate="tanh"),
        F.softplus(x),
        x.clamp(-1, 0.5),
        torch.erf(x),
        F.elu(x),
        x.remainder(0.7),
        x // 0.3,
        x.round(),
        x.lerp(y, 0.3),
        torch.addcmul(x, y, y, value=2),
        1 - x,
        1 / y,
        x.sign(),
        x.maximum(y),
        torch.hypot(x, y),
        F.leaky_relu(x),
        F.mish(x),
    )


def contractions(x, y):
    return (
        torch.einsum("bij,bkj->bik", x, y),
        torch.einsum("bij,bij->", x, y),
        torch.baddbmm(x @ y.mT, x, y.mT, alpha=0.5),
        torch.tensordot(x, y, dims=([0, 2], [0, 2])),
        torch.outer(x[0, 0], y[1, 1]),
        x[0] @ y[0, 1],
        torch.kron(x[0], y[0]),
    )


def pooled(x):
    return (
        F.max_pool2d(x, 2),
        F.avg_pool2d(x, 3, stride=2, padding=1),
        F.adaptive_avg_pool2d(x, 3),
        F.interpolate(x, scale_factor=2),
        F.unfold(x, 3),
        F.pixel_shuffle(x, 2),
        F.interpolate(x, size=(5, 5), mode="bilinear"),
    )


def padded(x):
    return (
        F.pad(x, (1, 2)),
        F.pad(x, (1, 0, 0, 2), value=3.0),
        F.pad(x[None], (2, 1), mode="reflect"),
        F.pad(x, (-1, 1)),
        F.pad(x[None], (1, 1), mode="replicate"),
        F.pad(x[None], (2, 1), mode="circular"),
    )


def losses(x, t, y):
    return (
        F.cross_entropy(x, t),
        F.cross_entropy(x, t, ignore_index=2, label_smoothing=0.1),
        F.nll_loss(x.log_softmax(-1), t),
        F.cross_entropy(x, t, reduction="none", weight=torch.arange(1.0, 7.0)),
        F.mse_loss(x, y),
        F.smooth_l1_loss(x, y),
        F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        F.cosine_similarity(x, y),
        F.cross_entropy(x, y.softmax(-1)),
    )


def embedded(ids, w):
    bag = F.embedding_bag(ids, w, mode="mean")
    return (
        F.embedding(ids, w, padding_idx=0),
        w[ids],
        F.one_hot(ids, 8),
        F.one_hot(ids, 8).float() @ w,
        bag,
    )


def repeated(x):
    counts = torch.tensor([1, 0, 2, 3])
    return (
        x.repeat_interleave(2, 0),
        x.repeat_interleave(counts, 0, output_size=6),
        x.repeat(2, 1),
        x.expand(3, 4, 6),
        torch.tile(x, (1, 2)),
        torch.meshgrid(x[0], x[1], indexing="ij"),
    )


def recurrent(x, wi, wh, bi, bh):
    state = torch.zeros(1, 2, 6)
    return torch._VF.lstm(x, (state, state.clone()), [wi, wh, bi, bh], True, 1, 0.0, False, False, True)


PROGRAMS = {
    "linear": (F.linear, {"input": Input((2, 3, 4)), "weight": Input((5, 4)), "bias": Input((5,))}),
    "conv1d": (F.conv1d, {"input": Input((2, 4, 9)), "weight": Input((6, 2, 3)), "groups": 2, "padding": 1}),
    "conv2d": (F.conv2d, {"input": Input((2, 4, 8, 8)), "weight": Input((6, 4, 3, 3)), "bias": Input((6,)), "stride": 2}),
    "conv_transpose2d": (F.conv_transpose2d, {"input": Input((2, 4, 5, 5)), "weight": Input((4, 3, 3, 3)), "stride": 2}),
    "layer_norm": (F.layer_norm, {"input": Input((4, 6)), "weight": Input((6,)), "bias": Input((6,)),
                                  "normalized_shape": (6,)}),
    "rms_norm": (F.rms_norm, {"input": Input((4, 6)), "weight": Input((6,)), "normalized_shape": (6,), "eps": 1e-5}),
    "group_norm": (F.group_norm, {"input": Input((2, 6, 5)), "weight": Input((6,)), "bias": Input((6,)), "num_groups": 3}),
    "instance_norm": (F.instance_norm, {"input": Input((2, 6, 5))}),
    "batch_norm in training": (batch_norm_in_training, {"x": Input((8, 3)), **{k: Input((3,)) for k in ("w", "b", "mean")},
                                                        "var": Input((3,))}),
    "batch_norm in evaluation": (lambda x, mean, var: F.batch_norm(x, mean, var.abs()), {"x": Input((8, 3)), "mean": Input(3),
                                                                                         "var": Input((3,))}),
    "batch_norm without statistics": (lambda x: F.batch_norm(x, None, None, training=True), {"x": Input((8, 3))}),
    "attention": (attention(), QKV),
    "attention, causal": (attention(is_causal=True, scale=0.3), QKV),
    "attention with a mask": (attention(), QKV | {"attn_mask": Input((6, 6))}),
    "attention with a bool mask": (attention(), QKV | {"attn_mask": Input((2, 1, 6, 6), dtype=BOOL)}),
    "attention, grouped": (attention(enable_gqa=True), QKV | {k: Input((2, 2, 6, 8)) for k in "kv"}),
    "rope": (rope, {"x": Input((2, 5, 6)), "angles": Input((5, 3))}),
    "scatter and gather": (scattered, X | {"i": Input((4, 3), dtype=I64, high=6), "y": Input((4, 3))}),
    "masks": (masked, X | {"m": Input((4, 6), dtype=BOOL)}),
    "indices": (indexed, {"x": Input((4, 6)), "i": Input((3,), dtype=I64, high=4)}),
    "sorting and scans": (ordered, X),
    "triangles": (triangles, X),
    "eight bits": (lambda x: x.to(torch.float8_e4m3fn).float() * 2, X),
    "pieces": (pieces, X),
    "reductions": (reduced, X),
    "casts": (casts, X),
    "pointwise": (pointwise, X),
    "contractions": (contractions, {"x": Input((2, 3, 4)), "y": Input((2, 3, 4))}),
    "pooling": (pooled, IMAGE),
    "padding": (padded, X),
    "losses": (losses, X | {"t": Input((4,), dtype=I64, high=6), "y": Input((4, 6))}),
    "embedding": (embedded, IDS | {"w": Input((8, 4))}),
    "repetition": (repeated, X),
    "lstm": (recurrent, {"x": Input((2, 3, 5)), "wi": Input((24, 5)), "wh": Input((24, 6)), "bi": Input(24), "bh": Input(24)}),
    "complex numbers": (lambda x: (torch.fft.fft(x).abs(), torch.complex(x, x).conj() * 2, torch.complex(x, x).conj().imag), X),
    "bfloat16 mlp": (lambda x, w: F.gelu(x @ w).softmax(-1), {"x": Input((4, 6), dtype=BF16), "w": Input((6, 5), dtype=BF16)}),
    "integers": (lambda ids: (ids % 3, ids // 2, ids << 1, ids & 5, ids.float().mean(), -ids, ids / 3, ids * 0.1), IDS),
}  # fmt: skip


def program(name):
    """The function with its options bound, and its tensor inputs."""
    function, given = PROGRAMS[name]
    inputs = {key: item for key, item in given.items() if isinstance(item, Input)}
    options = {key: item for key, item in given.items() if not isinstance(item, Input)}
    return (lambda **tensors: function(**tensors, **options)), inputs


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "lstm"])  # eager torch has a fused kernel that rounds otherwise
def test_replay_is_bit_for_bit_eager(name):
    assert_replays_as_eager(*program(name))


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in ("sorting and scans", "casts", "eight bits")])
def test_wide_replay_is_in_double_precision_and_near_eager(name):
    function, inputs = program(name)
    given = random_inputs(inputs)
    expected = flat(function(**copies(given)))
    tolerance = 1e-1 if any(spec.dtype == BF16 for spec in inputs.values()) else 1e-4
    for path, have in replay(capture_one(function, inputs), given, wide=True).items():
        if expected[path].is_floating_point():
            assert have.dtype == F64, path
        torch.testing.assert_close(have, expected[path].to(have.dtype), rtol=tolerance, atol=tolerance)


def test_wide_replay_of_casts_keeps_full_precision():
    graph = capture_one(lambda x: x.to(BF16).float(), X)
    given = random_inputs(X)
    assert torch.equal(replay(graph, given, wide=True)["out"], given["x"].double())
    assert not torch.equal(replay(graph, given)["out"], given["x"])


def test_replay_refuses_wrong_shapes_and_missing_inputs():
    graph = capture_one(lambda x: x + 1, X)
    with pytest.raises(ReplayError, match=r"input 'x' has shape \(4, 5\), not \(4, 6\)"):
        replay(graph, {"x": torch.ones(4, 5)})
    with pytest.raises(ReplayError, match="no tensor is given for the input 'x'"):
        replay(graph, {})


# ---------------------------------------------------------------------- constants
TABLE = torch.arange(24.0).reshape(4, 6)
STRIDED = torch.arange(48.0).reshape(6, 8).t()[1:5]
NUMBERS = np.linspace(0, 1, 6, dtype=np.float32)
MASK = torch.tensor([True, False, True, True])


class WithBuffers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, 6))
        self.register_buffer("calls", torch.zeros((), dtype=I64))
        self.plain = torch.full((6,), 0.5)

    def forward(self, x):
        self.calls += 1
        self.scale.mul_(2)
        return x * self.scale + self.plain * self.calls


def buffers(x):
    module = WithBuffers()
    module(x)
    return module(x), module.scale, module.calls


def literals(x):
    a = torch.tensor([1.0, 2, 3, 4, 5, 6], device=x.device)
    b = x.new_tensor([[2.0]])
    c = torch.as_tensor(NUMBERS, device=x.device) + torch.from_numpy(NUMBERS) + torch.as_tensor([1.0] * 6)
    return (
        x * a + b + c,
        x.new_zeros(2),
        x.new_full((2,), 3.0),
        x.new_ones(3, dtype=I64),
        torch.scalar_tensor(2.0) * x,
        a.dtype == x.dtype,
    )


def factories(x):
    y = torch.arange(6, device=x.device) + torch.linspace(0, 1, 6) + torch.eye(4, 6) + torch.full((4, 6), 2.5)
    return (
        x + y,
        torch.zeros_like(x),
        torch.ones(2, dtype=BF16),
        torch.logspace(0, 1, 3),
        torch.tril_indices(3, 3),
        torch.hann_window(4),
    )


def values_that_are_known(x):
    n = torch.arange(5).sum().item()
    y = x * n if bool(torch.tensor(3) > 2) else x
    for scale in torch.tensor([1, 2]).tolist():
        y = y + scale
    if torch.equal(torch.ones(2), torch.ones(2)) and torch.allclose(torch.ones(2), torch.ones(2)):
        y = y - int(torch.tensor(7.9))
    counts = torch.ones(4, dtype=I64)
    counts[2] += 5
    written = torch.zeros(3)
    written[1] = 4
    return y * float(written.max()), y[: int(counts.max()) - 3], np.asarray(torch.arange(3)).sum() * x, x[torch.tensor(1)]


def selected_by_known_masks(x):
    keep = torch.arange(4) != 2
    cells = torch.arange(24).reshape(4, 6) % 5 == 0
    return (
        x[MASK],
        x[keep],
        x[cells],
        x[keep.nonzero().squeeze(1)],
        torch.masked_select(x, cells),
        x.repeat_interleave(torch.tensor([2, 1, 0, 1]), 0),
        torch.unique(torch.tensor([3, 1, 3])) * x[0, 0],
    )


def closures(x):
    return (
        x + TABLE,
        x + TABLE[1],
        x @ TABLE.T,
        x[:, :4] * TABLE[:, 1:5],
        x + STRIDED,
        TABLE.sum() + NUMBERS[2] * x,
        TABLE.to(x.device) - x,
    )


def empty_memory_that_is_written(x):
    y = torch.empty(4, 6)
    y.copy_(x)
    z = torch.empty_like(x).fill_(2)
    w = x.new_empty(2)
    w[0], w[1] = 1.0, x.sum()
    return y * z, w, torch.empty(0), torch.empty((), dtype=I64).fill_(3)


CONSTANTS = {f.__name__: f for f in (buffers, literals, factories, values_that_are_known, selected_by_known_masks, closures,
                                     empty_memory_that_is_written)}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_replay_as_eager(name):
    assert_replays_as_eager(CONSTANTS[name], X)


def test_a_constant_of_the_program_is_stored_with_its_values():
    graph = capture_one(lambda x: x + TABLE, X)
    (constant,) = graph.constants.values()
    assert constant.shape == (4, 6) and constant.data == TABLE.numpy().tobytes()


def test_memory_that_was_never_written_is_seen_in_the_replay():
    graph = capture_one(lambda x: (x + torch.empty(4, 6), torch.empty(2, dtype=I64)), X)
    outputs = replay(graph, random_inputs(X))
    assert outputs["0"].isnan().all() and (outputs["1"] > 1 << 61).all()


def test_writes_to_closure_tensors_stay_in_the_capture():
    shared, before = torch.zeros(4, 6), torch.zeros(4, 6)

    def function(x):
        shared.add_(x)
        shared[0] = 5
        return shared * 2

    graph = capture_one(function, X)
    assert torch.equal(shared, before)
    given = random_inputs(X)
    want = given["x"].clone()
    want[0] = 5
    assert torch.equal(replay(graph, given)["out"], want * 2)


def test_the_order_of_a_read_and_a_write_of_a_closure_tensor_counts():
    shared = torch.ones(4, 6)

    def function(x):
        before = shared * x
        shared.mul_(3)
        return before, shared * x

    given = random_inputs(X)
    outputs = replay(capture_one(function, X), given)
    assert torch.equal(outputs["0"], given["x"]) and torch.equal(outputs["1"], 3 * given["x"])


# ---------------------------------------------------------------------- modes and random numbers
def without_gradients(x):
    w = x.clone().requires_grad_()
    with torch.no_grad():
        y = w * 2
        w += 1
    return y, w, y.requires_grad


def in_inference_mode(x):
    with torch.inference_mode():
        y = F.layer_norm(x, (6,)).reshape(2, 12).chunk(2)[0] @ torch.ones(12, 3)
        y[0] = 1
        a, b = x.split(3, 1)
        return y.clone(), F.scaled_dot_product_attention(a, b, b, is_causal=True).T, torch.einsum("ij,kj->ik", x, x)


@pytest.mark.parametrize("function", [without_gradients, in_inference_mode])
def test_gradient_modes_replay_as_eager(function):
    with sdpa_kernel(SDPBackend.MATH):
        assert_replays_as_eager(function, X)


RANDOM = {
    "aten.bernoulli_.float": lambda x: F.dropout(x, 0.3),
    "aten.rand.default": lambda x: x + torch.rand(4, 6),
    "aten.randn.default": lambda x: x + torch.randn(4, 6, device=x.device),
    "aten.bernoulli.default": lambda x: torch.bernoulli(x.sigmoid()),
    "aten.randint.low": lambda x: x + torch.randint(2, 9, (4, 6)),
    "aten.randperm.default": lambda x: x[torch.randperm(4)],
    "aten.normal_.default": lambda x: x.clone().normal_(1, 2),
    "aten.uniform_.default": lambda x: torch.nn.init.xavier_uniform_(torch.empty(4, 6)) * x,
    "aten.multinomial.default": lambda x: torch.multinomial(x.softmax(-1), 2),
    "aten.rand_like.default": lambda x: x * torch.rand_like(x) + torch.rand_like(x),
}


@pytest.mark.parametrize("op", RANDOM)
def test_random_numbers_are_operators_never_constants(op):
    graph = assert_replays_as_eager(RANDOM[op], X)
    assert op in [node.op for node in graph.nodes] and not graph.constants


def test_dropout_that_is_off_leaves_no_operator():
    graph = assert_replays_as_eager(lambda x: F.dropout(F.dropout(x, 0.5, training=False), 0.0) + 1, X)
    assert not any("bernoulli" in node.op for node in graph.nodes)


def test_a_generator_of_the_program_is_still_random():
    graph = capture_one(lambda x: x + torch.rand(4, 6, generator=torch.Generator().manual_seed(3)), X)
    assert [node.op for node in graph.nodes] == ["aten.rand.generator", "aten.add.Tensor"]


def test_the_default_dtype_of_the_program_counts():
    def function(ids):
        torch.set_default_dtype(F64)
        try:
            return ids / 3, ids * 0.1, torch.ones(2), torch.tensor(0.1), ids.float() * torch.tensor(3), torch.arange(3) / 7
        finally:
            torch.set_default_dtype(torch.float32)

    assert_replays_as_eager(function, IDS)


def test_batch_norm_writes_its_statistics_in_the_graph():
    function, inputs = program("batch_norm in training")
    graph = capture_one(function, inputs)
    (node,) = [node for node in graph.nodes if "batch_norm" in node.op]
    assert node.writes == ("running_mean", "running_var") and node.outputs[:2] == (graph.outputs["1"], graph.outputs["2"])


def told_apart_by_the_kinds_of_their_arguments(ids):
    """Pairs of calls that a careless memory of output shapes would take for one."""
    x, out = ids.float(), [ids * 2, ids * 2.0, ids * True, (ids > 2) * 1, (ids > 2) * 1.0, (ids > 2) * True]
    out += [x.sum(0), x.sum(-2, True), x.sum((0, 1)), ids.sum(dtype=torch.float32), ids.sum(), x.t() + 1, x.reshape(5, 3) + 1]
    out += [x.to(F64), x.to(BF16), torch.zeros(2), torch.zeros(2, dtype=I64), torch.full((2,), 1), torch.full((2,), 1.0)]
    out += [x + 1, x.double() + 1, x[:, :2] + 1, torch.zeros_like(x.t()).t().reshape(-1)]
    torch.set_default_dtype(F64)
    out += [ids * 2.0, ids / 2, torch.zeros(2)]
    torch.set_default_dtype(torch.float32)
    return [*out, x.t().clone().reshape(-1), torch.empty_like(x.t(), memory_format=torch.contiguous_format).fill_(1)]


def test_the_memory_of_output_shapes_changes_nothing():
    graph = assert_replays_as_eager(told_apart_by_the_kinds_of_their_arguments, IDS)
    role = FunctionProgram(told_apart_by_the_kinds_of_their_arguments, "sequential")
    texts = {str(capture_sequential(role, IDS, use_cache=cached)) for cached in (True, False)}
    assert texts == {str(graph)}


def test_compiled_functions_are_captured_as_they_were_written():
    compiled = torch.compile(lambda x: torch.relu(x) * 2, backend="eager")
    graph = assert_replays_as_eager(lambda x: compiled(x), {"x": Input((3, 4))})
    assert [node.op for node in graph.nodes] == ["aten.relu.default", "aten.mul.Tensor"]
