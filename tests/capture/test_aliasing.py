"""Views and in-place writes: whatever shares memory is seen to change, in whatever order it is written and read."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from harness import assert_replays_as_eager, capture_one, named
from hypothesis import given, settings
from hypothesis import strategies as st

from graphguard import Input
from graphguard.capture.torch.record.recorder import Recorder
from graphguard.errors import CaptureError
from graphguard.graph.ir import Graph
from graphguard.oracle.replay import replay

I64 = torch.int64
X = {"x": Input((4, 6)), "y": Input((4, 6))}

# Views that may be written through, each of a (4, 6) tensor.
WRITABLE = {
    "slice": lambda x: x[1:3],
    "slice with a step": lambda x: x[:, 1::2],
    "select": lambda x: x[2],
    "negative select": lambda x: x[:, -1],
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, 1),
    "view": lambda x: x.view(2, 12),
    "reshape": lambda x: x.reshape(-1),
    "flatten of a slice": lambda x: x[1:].flatten(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:, None].squeeze(1),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "diagonal": lambda x: x.diagonal(),
    "diagonal with offset": lambda x: x.diagonal(-1, 1, 0),
    "split": lambda x: x.split([1, 3])[1],
    "chunk": lambda x: x.chunk(3, 1)[2],
    "unbind": lambda x: x.unbind(1)[3],
    "expand of size one": lambda x: x.expand(1, 4, 6),
    "as_strided": lambda x: x.as_strided((3, 2), (6, 2), 1),
    "as_strided of a transpose": lambda x: x.t().as_strided((6, 2), (1, 12), 6),
    "movedim": lambda x: x.view(2, 2, 6).movedim(0, 2),
    "unflatten": lambda x: x.unflatten(1, (2, 3))[:, 1],
    "tensor_split": lambda x: x.tensor_split(4, 1)[1],
    "view as another dtype": lambda x: x.view(torch.int32).view(torch.float32),
    "view as complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)))[..., 0],
    "imaginary part": lambda x: torch.view_as_complex(x.view(4, 3, 2)).imag,
    "conjugate": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().real,
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data[1:],
    "alias of a view of a view": lambda x: x[1:].t()[2:5].detach().t()[:, 1:],
    "window over all": lambda x: x[...],
    "empty window": lambda x: x[2:2],
    "swapped axes in place": lambda x: x.detach().t_(),
    "squeezed in place": lambda x: x[:, None].squeeze_(1).unsqueeze_(0),
}
# Views that are only read.
READABLE = WRITABLE | {
    "expand": lambda x: x[:, :1].expand(4, 5),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "overlapping as_strided": lambda x: x.as_strided((5, 4), (2, 1)),
    "broadcast_to": lambda x: x[0].broadcast_to(3, 6),
}
WRITES = {
    "add_": lambda v, y: v.add_(1.5),
    "copy_": lambda v, y: v.copy_(y.flatten()[:1].expand_as(v)),
    "fill_": lambda v, y: v.fill_(7),
    "mul_ by itself": lambda v, y: v.mul_(v),
    "index assignment": lambda v, y: v.__setitem__(..., 3.0),
    "out": lambda v, y: torch.exp(v.clone(), out=v),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", WRITABLE)
def test_a_write_through_a_view_changes_its_base(view, write):
    """In one process: hundreds of programs are too many to fork for."""

    def function(x, y):
        base = x * 1
        before = WRITABLE[view](base)
        kept = before.clone()
        WRITES[write](WRITABLE[view](base), y)
        WRITES[write](WRITABLE[view](x), y)
        return kept, before.clone(), base, x

    assert_recorder_replays(function)


@pytest.mark.parametrize("view", READABLE)
def test_a_view_sees_writes_to_its_base(view):
    def function(x, y):
        early = READABLE[view](x)
        first = early * 2
        x.mul_(3)
        second = early * 2
        x[1:3, ::2] = y[1:3, ::2]
        x.t()[0].neg_()
        return first, second, early * 1, READABLE[view](x) * 1

    assert_recorder_replays(function)


def assert_recorder_replays(function, cached=True):
    """As `assert_replays_as_eager`, in this process: the program must not need the adjustments that a fork gets."""
    recorder = Recorder(Graph("sequential"), use_cache=cached)
    inputs = {name: recorder.tensor_input(name, spec.shape, spec.dtype) for name, spec in X.items()}
    with recorder:
        outputs = function(**inputs)
        recorder.graph.outputs = {str(i): recorder.value(output) for i, output in enumerate(outputs)}
    given = {name: torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("xy")}
    expected = function(**{name: tensor.clone() for name, tensor in given.items()})
    for got, want in zip(replay(recorder.graph, given).values(), expected, strict=True):
        assert torch.equal(got, want)


# ---------------------------------------------------------------------- programs
def written_in_turn(x, y):
    a, b = x[:, :3], x[1:, 1:]
    a.add_(1)
    b.mul_(2)
    first = a.clone()
    x.t()[2] = y[:, 0]
    a[0, 0] = 100
    b[0].copy_(y[0, :5])
    return first, a, b, x


def views_outlive_their_base(x, y):
    part = (x + y)[1:3]
    part.mul_(2)
    return part, part.t()


def copied_between_views(x, y):
    x[0].copy_(x[3])
    x[:, 0].copy_(y[:, 5])
    x[1:3].copy_(y[:2])
    y.copy_(x.clone().flip(0))
    return x, y


def accumulated_by_index(x, y):
    i = torch.tensor([0, 2, 0])
    x.index_put_((i,), y[:3], accumulate=True)
    x[:, 1:].index_add_(0, i, y[:3, 1:])
    x.t().scatter_add_(0, torch.tensor([[1, 1, 0, 5]]), y[:1, :4])
    x[i, 2] = 9.0
    x[x > 1] = 0.25
    x.masked_fill_(y < 0, -2)
    return x


def with_out(x, y):
    z = torch.empty(2, 4, 6)
    torch.add(x, y, out=z[0])
    torch.mul(x, y, alpha=1, out=z[1]) if False else torch.mul(x, y, out=z[1])
    w = torch.zeros(4, 4)
    torch.mm(x, y.t(), out=w)
    values, indices = torch.empty(4, 2), torch.empty(4, 2, dtype=I64)
    torch.topk(x, 2, out=(values, indices))
    torch.cat([x, y], out=(joined := torch.empty(8, 6)))
    torch.sum(x, 1, out=w[:, 0])
    return z, w, values, indices, joined


def foreach(x, y):
    parts = [x[:2], x[2:], y]
    torch._foreach_add_(parts, 1.0)
    torch._foreach_mul_(parts, [2.0, 3.0, 4.0])
    torch._foreach_addcmul_(parts, [p.clone() for p in parts], [p * 0.5 for p in parts], 0.1)
    torch._foreach_copy_([x[:2]], [y[:2]])
    torch._foreach_sqrt_([y.abs_()])
    norms = torch._foreach_norm(parts)
    return x, y, norms, torch._foreach_add(parts, parts)


def data_writes(x, y):
    w = x.clone().requires_grad_()
    loss = (w * y).sum()
    w.data.mul_(2)
    w.data[0] = 5
    loss.backward()
    w.grad.data.add_(1)
    return w, w.grad


def flat_parameters(x, y):
    p, q = torch.nn.Parameter(x * 2), torch.nn.Parameter(y * 2)
    flat = torch.cat([p.data.view(-1), q.data.view(-1)])
    p.data, q.data = flat[:24].view(4, 6), flat[24:].view(6, 4).t()
    p.data.mul_(2)
    first = flat.clone()
    flat[20:30].add_(100)
    with torch.no_grad():
        q.sub_(1)
    return first, flat, p, q, flat.data_ptr() == p.data_ptr()


def swapped_storages(x, y):
    a, b = x.clone(), y.clone()
    a_view = a[1:]
    a.data, b.data = b.data, a.data
    a.add_(1)
    b.mul_(2)
    return a, b, a_view


def swapped_tensors(x, y):
    a, b = x.clone(), y.clone()
    torch.utils.swap_tensors(a, b)
    a[0] = 3
    return a, b


def detached(x, y):
    w = (x * 1).requires_grad_()
    d = w.detach()
    d[0] = 0
    with torch.no_grad():
        w[1].add_(d[2])
    return w, d, (d + w).sum()


def scalars(x, y):
    total, first = torch.zeros(()), x[0, 0]
    for row in x:
        total += row.sum()
        first += 1
    x[1, 1] = total
    x[2, 2] += 5
    return total, first, x


def nothing_is_written(x, y):
    a = x.reshape(6, 4)
    b = x.t().reshape(-1)  # a copy
    b.add_(1)
    c = x.contiguous()  # the same memory
    c[0] = 1
    d = x.to(torch.float32)
    d[1] = 2
    e = x.to(torch.float64)
    e[2] = 3
    f = x.expand(2, 4, 6).contiguous()
    f.zero_()
    return a, b, c, d, e, f, x


def copies_of_constants(x, y):
    table = torch.arange(24.0).view(4, 6)
    other = copy.deepcopy(table)
    table.add_(x)
    third = copy.deepcopy(table)
    third[0] = 0
    return table, other, third, torch.clone(table[1:])


def in_place_random_fill_of_a_part(x, y):
    x[1:].zero_()
    x[:, 2:4].uniform_(0, 1)
    return x


def zero_dim_and_empty(x, y):
    e = x[:0]
    e.add_(1)
    z = x.new_zeros(0, 3)
    z.t().mul_(2)
    return e, z, x.sum().view(1).squeeze(0).add_(1), torch.cat([e, x])


def set_of_reads(x, y):
    views = [x[i:, j:] for i in range(3) for j in range(3)]
    for i, view in enumerate(views):
        view.add_(views[-1 - i].sum())
    return [view * 1 for view in views]


PROGRAMS = [written_in_turn, views_outlive_their_base, copied_between_views, accumulated_by_index, with_out, foreach,
            data_writes, swapped_storages, swapped_tensors, detached, scalars, nothing_is_written, copies_of_constants,
            in_place_random_fill_of_a_part, zero_dim_and_empty, set_of_reads]  # fmt: skip


@pytest.mark.parametrize("function", PROGRAMS)
def test_programs_that_share_memory_replay_as_eager(function):
    assert_replays_as_eager(function, X)


def test_flat_parameters_replay_as_eager():
    graph = assert_replays_as_eager(lambda x, y: flat_parameters(x, y)[:4], X)
    assert not graph.constants


def test_a_conjugated_closure_tensor_shares_memory_with_its_base():
    base = torch.randn(4, 6, dtype=torch.complex64)
    lazy = base.conj()

    def function(x, y):
        first = lazy * x
        base.mul_(2j)
        return first, lazy * x, base * x, lazy.imag + y

    expected_base = base.clone()
    graph = capture_one(function, X)
    assert torch.equal(base, expected_base)
    given = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    got = replay(graph, given)
    for have, want in zip(got.values(), function(**given), strict=True):
        assert torch.equal(have, want)


def test_a_value_that_is_part_of_larger_memory_is_cut_by_strides_as_eager():
    """as_strided counts from the start of the memory, whatever else the replay keeps there."""
    graph = capture_one(lambda x, y: (x.as_strided((2, 3), (6, 2), 1), x.as_strided((3,), (1,), 20)), X)
    memory = torch.randn(8, 6)
    given = {"x": memory[3:7], "y": memory[:4]}
    got = replay(graph, given)
    assert torch.equal(got["0"], given["x"].clone().as_strided((2, 3), (6, 2), 1))
    assert torch.equal(got["1"], given["x"].flatten()[20:23])


REFUSED = {
    "a write through aten.unfold": lambda x, y: x.unfold(1, 3, 2).view_as(x.unfold(1, 3, 2))[0, 0, 0].add_(1),
    "writes to memory that another of its arguments shares": lambda x, y: x[:, 1:].copy_(x[:, :-1]),
    "aten.mm.out writes to memory that another of its arguments shares": lambda x, y: torch.mm(x, y[:, :6].t() @ x, out=x),
    "aten._foreach_add_.Scalar writes to memory that another": lambda x, y: torch._foreach_add_([x, x], 1.0),
    "aten._foreach_mul_.Scalar writes to memory that another": lambda x, y: torch._foreach_mul_([x[:3], x[2:]], 2.0),
    "aten.add_.Tensor writes to a tensor several of whose elements are one place": lambda x, y: x.as_strided(
        (3, 4), (2, 1)
    ).add_(1),
    "aten.mul_.Tensor writes to a tensor several of whose elements are one place": lambda x, y: (
        x.as_strided((3, 4), (2, 1)).t().mul_(2)
    ),
    "aten.resize_.default changes a tensor's shape in place": lambda x, y: x.resize_(5, 6),
    "aten.set_.source_Storage changes a tensor's shape in place": lambda x, y: torch.empty(0).set_(x.untyped_storage()),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_memory_cannot_say_is_refused(text):
    with pytest.raises(CaptureError, match=text.replace(".", r"\.")):
        capture_one(lambda x, y: (REFUSED[text](x, y), x)[1], X)


def strided_without_overlap(x, y):
    x.as_strided((3, 2), (2, 3)).add_(1)
    return x


def set_to_another(x, y):
    first, second = x * 1, y * 2
    seen = first[0]
    first.set_(second[1:])
    first.add_(1)
    seen.zero_()
    return first, second, seen


def renamed(x, y):
    first = x * 1
    first.transpose_(0, 1)
    first[0].add_(1)
    second = (y * 1).unsqueeze_(0).swapaxes_(0, 2)
    return first, second, first.t_()


@named(strided_without_overlap, set_to_another, renamed)
def test_windows_that_move_replay_as_eager(program):
    assert_replays_as_eager(program, X)


def test_an_empty_out_tensor_grows():
    def function(x, y):
        z, v = torch.empty(0), torch.empty(0)
        torch.add(x, y, out=z)
        z.mul_(2)
        torch.sort(x, out=(v, torch.empty(0, dtype=I64)))
        return z, z[1:], v

    assert_replays_as_eager(function, X)


def test_an_out_tensor_of_another_shape_is_refused():
    with pytest.raises(
        CaptureError, match=r"aten\.add\.out resizes the tensor that it writes to; give it one of the right shape"
    ):
        capture_one(lambda x, y: torch.add(x, y, out=torch.zeros(2, 3)), X)


def through_an_array(array, tensor, x, y):
    z = x + tensor
    array[0] = 100
    return z + tensor


def through_two_tensors(array, tensor, x, y):
    tensor.add_(x)
    return y + torch.from_numpy(array)


def through_two_tensors_read_first(array, tensor, x, y):
    z = y + torch.from_numpy(array)
    tensor.add_(x)
    return z


@pytest.mark.parametrize("function", [through_an_array, through_two_tensors, through_two_tensors_read_first])
def test_memory_that_is_changed_around_torch_is_refused(function):
    array = np.ones((4, 6), dtype=np.float32)
    tensor = torch.from_numpy(array)
    with pytest.raises(CaptureError, match=r"test_aliasing.py:\d+: memory that a tensor shares with numpy or a buffer is "):
        capture_one(functools.partial(function, array, tensor), X)


def test_a_write_through_an_array_over_a_constant_is_refused():
    def function(x, y):
        table = torch.ones(4, 6)
        table.numpy()[0] = 5
        return x + table

    with pytest.raises(CaptureError, match=r"shares with numpy or a buffer \(shared at .*\) is changed through numpy"):
        capture_one(function, X)


def test_memory_that_is_only_read_may_be_shared_around_torch():
    array = np.ones((4, 6), dtype=np.float32)
    assert_replays_as_eager(lambda x, y: x + torch.from_numpy(array) * torch.from_numpy(array[1:3]).sum(), X)


def test_disjoint_parts_of_one_memory_may_be_read_and_written_at_once():
    def function(x, y):
        x[:2].add_(x[2:])
        x[:, ::2].mul_(x[:, 1::2])
        torch._foreach_add_([x[:1], x[1:3], x[3:]], 1.0)
        return x

    assert_replays_as_eager(function, X)


# ---------------------------------------------------------------------- random programs
def cut(tensor, dim, piece):
    """A slice along some dim; `piece` says which, for its size."""
    if tensor.dim() == 0:
        return tensor
    dim %= tensor.dim()
    return tensor[(slice(None),) * dim + (piece(tensor.shape[dim]),)]


VIEW_STEPS = {
    "t": lambda v, a, b: v.t() if v.dim() == 2 else v.permute(*reversed(range(v.dim()))),
    "slice": lambda v, a, b: cut(v, a, lambda size: slice(b % size, b % size + 1 + (size - 1 - b % size) // 2)),
    "step": lambda v, a, b: cut(v, a, lambda size: slice(b % 2 if size > 1 else 0, None, 2)),
    "select": lambda v, a, b: v if v.dim() < 2 else v.select(a % v.dim(), b % v.shape[a % v.dim()]),
    "unsqueeze": lambda v, a, b: v.unsqueeze(a % (v.dim() + 1)) if v.dim() < 4 else v,
    "squeeze": lambda v, a, b: v.squeeze(),
    "view": lambda v, a, b: v.view(-1) if v.is_contiguous() else v,
    "halves": lambda v, a, b: v if v.dim() == 0 or v.shape[0] < 2 else v.split((v.shape[0] + 1) // 2)[a % 2],
    "rows": lambda v, a, b: v if v.dim() < 2 else v.unbind(0)[a % v.shape[0]],
    "diagonal": lambda v, a, b: v.diagonal() if v.dim() == 2 else v,
    "detach": lambda v, a, b: v.detach(),
}  # fmt: skip
WRITE_STEPS = {
    "add_": lambda v, w, c: v.add_(c),
    "mul_": lambda v, w, c: v.mul_(c),
    "fill_": lambda v, w, c: v.fill_(c),
    "neg_": lambda v, w, c: v.neg_(),
    "copy_": lambda v, w, c: v.copy_(w.sum().expand_as(v)),
    "add a read": lambda v, w, c: v.add_(w.clone().sum()),
    "square": lambda v, w, c: v.mul_(v),
}
STEPS = st.one_of(
    st.tuples(st.just("view"), st.sampled_from(sorted(VIEW_STEPS)), st.integers(0, 30), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(
        st.just("write"), st.sampled_from(sorted(WRITE_STEPS)), st.integers(0, 30), st.integers(0, 30), st.integers(-2, 3)
    ),
    st.tuples(st.just("read"), st.just(""), st.integers(0, 30), st.just(0), st.just(0)),
)


def play(steps, integers, x, y):
    """Views and writes over two tensors; the steps name earlier tensors by their position."""
    held = [x, y.clone()]
    if integers:
        held = [(tensor * 8).to(I64) for tensor in held]
    seen = []
    for kind, name, at, a, b in steps:
        tensor = held[at % len(held)]
        if kind == "view":
            held.append(VIEW_STEPS[name](tensor, a, b))
        elif kind == "write":
            WRITE_STEPS[name](tensor, held[a % len(held)], b)
        else:
            seen.append(tensor * 1)
    return [*seen, *held]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.lists(STEPS, min_size=4, max_size=25), st.booleans(), st.booleans())
def test_random_views_and_writes_replay_as_eager(steps, integers, cached):
    assert_recorder_replays(functools.partial(play, steps, integers), cached)
