"""Samples of rows that compute with tensors: arithmetic, masks, creation, products, views."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphguard.audit.samples.sample import INF, B, C, N, P, X, aten, bf16, both, each, f32, i64, sample, u8

# arithmetic
sample("add", lambda x, y: (x + y, torch.add(x, y, alpha=-0.5), y + 2, x.add(3, alpha=2), x + y[0]), x=X(6, 4), y=X(1, 4))
sample("add_ints", lambda i, x: (i + 3, i + x, i + 0.5, i - 2, 5 - i), i=N(6, 2), x=X(2))
sample("add_bools", lambda m, n: (m + n, m + True, m.add(n, alpha=1), m * n, m.int() + n), m=B(6, 4), n=B(4))
sample("add_in_place", lambda x, y: (x.add_(y).mul_(2).sub_(y, alpha=3), x.div_(4).neg_()), x=X(6, 4), y=X(4))
sample(
    "scalar_overloads",
    lambda x: (aten.add.Scalar(x, 2, 3), aten.sub.Scalar(x, 2, 3), aten.mul.Scalar(x, 0.25), aten.div.Scalar(x, 3)),
    x=X(6),
)
sample(
    "out",
    lambda x, y: (
        torch.add(x, y, out=torch.empty(6, 4)),
        torch.mean(x, 1, out=torch.empty(6)),
        torch.sum(x, 0, out=torch.empty(4)),
        torch.maximum(x, y, out=torch.empty(6, 4)),
        torch.pow(x, 2, out=torch.empty(6, 4)),
    ),
    (),
    x=X(6, 4),
    y=X(6, 4),
)
sample(
    "sub",
    lambda x, y: (x - y, torch.sub(x, y, alpha=2), 3 - x, torch.rsub(x, y, alpha=2), torch.rsub(x, 2, alpha=3)),
    x=X(6, 4),
    y=X(6, 1),
)
sample("mul", lambda x, y: (x * y, x * 2.5, x * y[0, 0], -x), x=X(6, 4), y=X(6, 1))
sample("div", lambda x, y, i: (x / y, x / 4, 1 / y, y.reciprocal(), i / 2, 3 / y), x=X(6, 4), y=P(4), i=N(6, 4))
sample(
    "div_mode",
    lambda x, y: tuple(torch.div(x, d, rounding_mode=m) for d in (y, 0.7) for m in ("floor", "trunc", None)),
    x=X(6, 4),
    y=P(4),
)
sample(
    "div_ints",
    lambda i, j: (i // 3, i // j, i % 4, i % j, torch.div(i, j, rounding_mode="trunc"), torch.fmod(i, 3)),
    i=N(6, 4, low=-9, high=9),
    j=N(4, low=1),
)
sample(
    "scalar_divisions",
    lambda x: (
        aten.floor_divide.Scalar(x, 0.7),
        aten.div.Scalar_mode(x, 0.7, rounding_mode="trunc"),
        aten.div.Scalar_mode(x, 0.7, rounding_mode="floor"),
    ),
    x=X(6, 4),
)
sample(
    "floor_divide", lambda x, y: (x // y, x // 0.5, x % y, x % 0.75, torch.fmod(x, y), torch.fmod(x, -0.75)), x=X(6, 4), y=P(4)
)
sample(
    "pow",
    lambda x, p: (x**2, x**3, x**0, p**-1, p**-2, p**0.5, p**-1.5, p**0.3, x.square(), p.sqrt(), p.rsqrt(), x**1),
    x=X(6, 4),
    p=P(6, 4),
)
sample(
    "pow_more",
    lambda x, p, i: (p**x, 2.0**x, p**i, i**2, torch.pow(p, torch.tensor(3.0)), (-p) ** 3, (x * p) ** 2, (p * p) ** 0.5),
    x=X(6, 4),
    p=P(6, 1),
    i=N(4),
)
sample(
    "exp_log",
    lambda x, p: (
        x.exp(),
        p.log(),
        (x + p).exp(),
        (p * p).log(),
        x.exp().log(),
        x.expm1(),
        p.log1p(),
        (2 * x - 1).exp(),
        torch.logaddexp(x, p),
    ),
    x=X(6, 4),
    p=P(6, 4),
)
each("abs sin cos tan asinh atan sinh cosh erf erfc sign sgn floor ceil round trunc frac exp2 isnan isinf sinc", x=X(6, 4))
each("asin acos atanh log2 log10 lgamma", x=P(6, 4, low=0.1, high=0.9))
each("acosh", x=P(6, 4, low=1.1))
each("hypot maximum minimum fmax fmin", x=X(6, 4), y=X(4))
each("xlogy", x=X(6, 4), y=P(4))
sample(
    "clamp",
    lambda x: (
        x.clamp(-1, 1),
        x.clamp(min=0),
        x.clamp(max=0.5),
        x.clamp(min=-0.5),
        x.clamp_min(0.1),
        x.clamp_max(0.1),
        x.clamp(1, -1),
        x.clamp(-INF, 1),
    ),
    x=X(6, 4),
)
sample("clamp_ints", lambda i: (i.clamp(1, 3), i.clamp(min=1.5), i.clamp_(max=2)), i=N(6, 4))
sample(
    "clamp_tensors",
    lambda x, a, b: (x.clamp(a, b), x.clamp(min=a), x.clamp(max=b), x.clamp_min(a), x.clamp_max(b)),
    x=X(6, 4),
    a=X(4),
    b=X(6, 1),
)
sample(
    "addc",
    lambda x, a, b: (
        torch.addcmul(x, a, b, value=-2),
        torch.addcdiv(x, a, b, value=3),
        torch.addcmul(x, a, b),
        x.addcdiv_(a, b),
    ),
    x=X(6, 4),
    a=X(6, 4),
    b=P(4),
)
sample("lerp", lambda x, y, w: (torch.lerp(x, y, 0.3), torch.lerp(x, y, w), x.lerp_(y, -1)), x=X(6, 4), y=X(6, 4), w=X(4))
sample(
    "casts",
    lambda x, i, m: (
        x.int(),
        x.long().float(),
        x.bool(),
        i.float(),
        m.float(),
        m.long(),
        i.bool(),
        x.double(),
        x.half(),
        i.to(u8),
        (200 + i).to(torch.int8),
    ),
    x=X(6, 4),
    i=N(6),
    m=B(6),
)
sample(
    "copies",
    lambda x, i: (i.copy_(x), torch.zeros(6, 4).copy_(i[0]), torch.zeros(6, 4, dtype=torch.bool).copy_(x), x.clone()),
    x=X(6, 4),
    i=N(6, 4),
)
sample(
    "fills",
    lambda x, i: (
        x.fill_(2.5),
        i.fill_(2.5),
        torch.ones(6, dtype=torch.bool).fill_(3),
        x.clone().fill_(x[0, 0]),
        i.clone().fill_(x[0, 1]),
        x.clone().zero_(),
    ),
    x=X(6, 4),
    i=N(6),
)
# complex numbers
sample(
    "complex_parts",
    lambda x, y: (
        torch.complex(x, y),
        torch.polar(x, y),
        torch.view_as_real(torch.complex(x, y).conj() * 1),
        torch.complex(x, y).conj() + 0,
        torch.complex(x, y).conj().imag,
        torch.conj_physical(torch.complex(x, y)),
    ),
    x=X(6, 4),
    y=X(6, 4),
)
sample("complex_pairs", lambda x: (torch.view_as_complex(x), torch.view_as_complex(x).real), x=X(6, 4, 2))
sample(
    "complex_arithmetic",
    lambda z, w, x: (z * w, z + w, z - w, z * x, z + x, z * 2, z / 4, z / x, -z, z + 1, x * z),
    z=C(6, 4),
    w=C(4),
    x=P(6, 4),
)
sample(
    "complex_views",
    lambda z: (
        z.t(),
        z.sum(-1),
        z.mean(0),
        z.sum(),
        z[:, -1],
        z[1:3, ::2],
        z.view(-1),
        z.unsqueeze(0).expand(2, 6, 2),
        torch.cat([z, z], -1),
        torch.stack([z, z], -1),
        z.permute(1, 0),
        z.clone().zero_(),
        torch.zeros_like(z),
        z.transpose(-1, 0),
        z[0].t(),
    ),
    z=C(6, 2),
)
# masks
sample(
    "comparisons",
    lambda x, y: (x < y, x <= y, x > y, x >= y, x == y, x != y, x < 0, x > 0, x <= 0.5, x >= -0.5, x == 0, x != 0, x < 1),
    x=X(6, 4),
    y=X(4),
)
sample("comparisons_with_numbers", lambda x: (x > 0.25, x != 0.25, x < 0.25, x == 0.25), x=X(6, 4))
sample(
    "comparisons_of_ints",
    lambda i, j: (i < j, i <= 3, i > 2, i >= 0, i == 4, i != 3, i < 2.5, i == j, i == 2.0, i > -1, i < 99, i != -3),
    i=N(6, 4),
    j=N(4),
)
sample(
    "comparisons_of_positions",
    lambda x: (x + (torch.arange(4) < 2), x * (torch.arange(6)[:, None] >= torch.arange(4)), x + (torch.arange(4) == 3)),
    x=X(6, 4),
)
sample("logic", lambda m, n: (m & n, m | n, m ^ n, ~m, m & True, m | False, m ^ True, m.logical_not()), m=B(6, 4), n=B(4))
sample(
    "logic_of_numbers",
    lambda x, i: (x.logical_not(), torch.logical_and(x, i), torch.logical_or(i - 1, i), torch.logical_xor(i, i - 2), ~i),
    x=X(6, 4),
    i=N(6, 4, low=-2, high=2),
)
sample(
    "where",
    lambda m, x, y: (
        torch.where(m, x, y),
        torch.where(m, x, 2.0),
        torch.where(m, 0.0, y),
        torch.where(m, x, -INF),
        torch.where(m, INF, x),
        torch.where(m, 1, 2),
    ),
    m=B(6, 4),
    x=X(6, 4),
    y=X(4),
)
sample(
    "masked_fill",
    lambda m, x, i: (
        x.masked_fill(m, -INF),
        x.masked_fill(m, 2.5),
        x.masked_fill(m, i[0, 0]),
        x.masked_fill(m, x[0, 0]),
        i.masked_fill_(m, 3),
        x.masked_fill(m[0], INF),
    ),
    m=B(6, 4),
    x=X(6, 4),
    i=N(6, 4),
)
sample("masked_exp", lambda m, x: (x.masked_fill(m, -INF).exp(), torch.where(m, x, -INF).exp().sum(1)), m=B(6, 4), x=X(6, 4))
sample("heaviside", lambda x, y: torch.heaviside(x, y), x=X(6, 4), y=X(4))
sample("isin", lambda i: (torch.isin(i, 3), torch.isin(i, torch.tensor([2]), invert=True)), i=N(6, 4))
# creation
sample(
    "creation",
    lambda x: (
        torch.zeros(2, 3) + x[0, 0],
        torch.ones(3),
        torch.full((2,), 1.5),
        torch.full((2,), 1.5, dtype=i64),
        torch.full((2,), -INF),
        torch.full((2,), INF),
        torch.full((2,), 2, dtype=torch.bool),
        torch.zeros_like(x),
        torch.ones_like(x),
        torch.full_like(x, 3),
        x.new_zeros(2),
        x.new_ones(2),
        x.new_full((2,), 7),
        torch.scalar_tensor(2.5),
        aten._efficientzerotensor([2], device="cpu"),
    ),
    x=X(6, 4),
)
sample(
    "ranges",
    lambda x: (
        torch.arange(5),
        torch.arange(2, 7),
        torch.arange(1, 9, 3),
        torch.arange(0.5, 3.0, 0.5),
        torch.arange(5.0),
        torch.arange(7, 1, -2),
        torch.linspace(0, 1, 5),
        torch.linspace(2, 3, 1),
        torch.eye(4),
        torch.eye(3, 5) + x[0, 0],
    ),
    x=X(6, 4),
)
sample("hardtanh_inside_of_one", lambda x: (F.hardtanh(x, -0.5, 0.5), F.hardtanh(x, 0.25, 2.5)), x=X(6, 4))
ALL_DTYPES = (f32, torch.float64, bf16, i64, torch.int32, u8, torch.int8, torch.bool)
sample(
    "made_in_dtypes",
    lambda x: tuple(
        tensor
        for dtype in ALL_DTYPES
        for tensor in (
            torch.zeros(2, dtype=dtype),
            torch.ones(2, dtype=dtype),
            torch.full((2,), 2, dtype=dtype),
            torch.full((2,), 1.5, dtype=dtype),
            torch.zeros_like(x, dtype=dtype),
            torch.ones_like(x, dtype=dtype),
            torch.full_like(x, 3, dtype=dtype),
            torch.full_like(x, 3.5, dtype=dtype),
            x.new_zeros(2, dtype=dtype),
            x.new_ones(2, dtype=dtype),
            x.new_full((2,), 7, dtype=dtype),
            x.new_full((2,), 7.5, dtype=dtype),
            torch.scalar_tensor(2, dtype=dtype),
            torch.scalar_tensor(2.5, dtype=dtype),
            torch.eye(3, dtype=dtype),
            torch.eye(3, 5, dtype=dtype),
            x.to(dtype),
        )
    ),
    x=X(6, 4),
)
sample(
    "counted_in_dtypes",
    lambda x: tuple(
        x.sum() + tensor
        for dtype in ALL_DTYPES[:-1]
        for tensor in (
            torch.arange(5, dtype=dtype),
            torch.arange(5.0, dtype=dtype),
            torch.arange(1, 5, dtype=dtype),
            torch.arange(1.0, 5.0, dtype=dtype),
            torch.arange(1, 9, 3, dtype=dtype),
            torch.arange(1.0, 9.0, 3.0, dtype=dtype),
        )
    ),
    x=X(6),
)
sample(
    "counted_beyond_eight_bits",
    lambda x: (
        x + torch.arange(300, dtype=u8),
        x + torch.arange(0, 300, dtype=u8),
        x + torch.arange(0, 600, 2, dtype=u8),
        x + torch.arange(300.0, dtype=u8),
        x + torch.arange(0.0, 300.0, dtype=u8),
        x + torch.arange(0.0, 600.0, 2.0, dtype=u8),
    ),
    (),
    x=X(300),
)
sample(
    "triangles",
    lambda x: (x.tril(), x.triu(), x.tril(-1), x.triu(2), x.tril(1), torch.ones(5, 5, dtype=torch.bool).tril()),
    x=X(2, 6, 4),
)
# contraction
both("mm", lambda a, b: a @ b, a=X(6, 4), b=X(4, 6))
both("bmm", lambda a, b: a @ b, a=X(2, 6, 4), b=X(2, 4, 6))
sample(
    "vectors",
    lambda a, x, y: (a @ x, x @ x, torch.vdot(x, x), torch.outer(x, y), x @ a.t(), torch.einsum("ij,j,i->j", a, x, y)),
    a=X(6, 4),
    x=X(4),
    y=X(6),
)
sample(
    "addmm",
    lambda x, a, b: (torch.addmm(x, a, b), torch.addmm(x, a, b, beta=0.5, alpha=-2), torch.addmm(x[0], a, b, beta=0)),
    x=X(6, 6),
    a=X(6, 4),
    b=X(4, 6),
)
sample(
    "baddbmm",
    lambda x, a, b: (torch.baddbmm(x, a, b, beta=2, alpha=0.5), torch.addbmm(x[0], a, b, beta=2, alpha=3)),
    x=X(2, 6, 6),
    a=X(2, 6, 4),
    b=X(2, 4, 6),
)
sample(
    "addmv",
    lambda x, a, b, y: (torch.addmv(x, a, b, beta=2, alpha=0.5), torch.addr(a, x, y, beta=2, alpha=0.5), torch.addr(a, x, y)),
    x=X(6),
    a=X(6, 4),
    b=X(4),
    y=X(4),
)
both("patches", lambda x, w, b: F.conv2d(x, w, b, stride=2), x=X(2, 3, 4, 6), w=X(6, 3, 2, 2), b=X(6))
both("pointwise_convolution", lambda x, w: F.conv1d(x, w), x=X(2, 6, 4), w=X(6, 6, 1))
both("convolution", lambda x, w, b: F.conv1d(x, w, b, padding=1), x=X(2, 3, 6), w=X(6, 3, 3), b=X(6))
both("convolution_with_gaps", lambda x, w: F.conv1d(x, w, stride=2, padding=2, dilation=2), x=X(2, 3, 6), w=X(6, 3, 2))
sample(
    "triangular_systems",
    lambda a, b: (
        torch.linalg.solve_triangular(a, b, upper=False),
        torch.linalg.solve_triangular(a, b, upper=True, unitriangular=True),
        torch.linalg.solve_triangular(a, b.mT, upper=False, left=False, unitriangular=True),
        torch.linalg.solve_triangular(a[0], b, upper=True),
    ),
    a=X(2, 3, 3),
    b=X(2, 3, 4),
)
both("depthwise_convolution", lambda x, w, b: F.conv1d(x, w, b, padding=2, groups=6), x=X(2, 6, 4), w=X(6, 1, 3), b=X(6))
both("convolution_in_groups", lambda x, w: F.conv1d(x, w, stride=2, groups=2), x=X(2, 6, 4), w=X(4, 3, 2))
both("convolution_of_multiples", lambda x, w: F.conv2d(x, w, padding=1, groups=2), x=X(2, 2, 3, 4), w=X(6, 1, 2, 3))
both("convolution_in_two_dims", lambda x, w: F.conv2d(x, w, padding=(1, 0)), x=X(2, 3, 4, 3), w=X(4, 3, 3, 2))
# views
sample(
    "views",
    lambda x: (
        x.view(-1),
        x.view(2, 3, 4),
        x.reshape(3, 8),
        x.t(),
        x.transpose(-1, 0),
        x.permute(1, 0),
        x.unsqueeze(1),
        x[None].squeeze(0),
        x.flatten(),
        x.movedim(0, 1),
        x.mT,
        x.view(2, 3, 4).permute(2, 0, 1),
    ),
    x=X(6, 4),
)
sample(
    "views_of_points",
    lambda x: (x.view(1, 1), x.t(), x.expand(2, 3), x.unsqueeze(0), x.transpose(0, -1), x[None].squeeze()),
    x=X(),
)
sample(
    "expands",
    lambda x: (
        x.expand(2, 6, 4, 3),
        x.repeat(2, 1, 1, 3),
        x.tile(2, 3),
        x.repeat_interleave(2, 1),
        x.expand(-1, -1, 5),
        x[..., 0].repeat(3, 2),
    ),
    x=X(6, 4, 1),
)
sample(
    "slices",
    lambda x: (
        x[1:4],
        x[:, -2:],
        x[::2],
        x[1::3, 1:],
        x[2],
        x[:, -1],
        x[..., None, 3],
        x[4:99],
        x.narrow(1, 1, 2),
        x.unbind(1)[2],
        x.chunk(3)[1],
        x.split([1, 5])[1],
        *torch.split_with_sizes_copy(x, [1, 3], 1),
    ),
    x=X(6, 4),
)
both(
    "slice_gradients",
    lambda x: torch.cat([x[1:4].sum(0), x[::2, 1:].flatten(), x[2], x[1::3].flatten(), x[:, -1] ** 2]),
    x=X(6, 4),
)
sample(
    "joins",
    lambda x, y: (
        torch.cat([x, y]),
        torch.cat([x, x], -1),
        torch.stack([x, x], -1),
        torch.stack([x, x, x]),
        torch.hstack([x, x]),
        torch.cat([x, torch.zeros(0)]),
        torch.cat([y[0], y[1]]),
    ),
    x=X(6, 4),
    y=X(3, 4),
)


def _writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1:3] = y[:2]
    x[:, -1] = y[0, 0]
    x[4] *= 2
    x.t()[0] += 1
    x.diagonal()[:] = 7
    return x


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    first, rest = torch.empty(1, *x.shape[1:]), torch.empty(x.shape[0] - 1, *x.shape[1:])
    torch.split_with_sizes_copy(x, [1, x.shape[0] - 1], 0, out=[first, rest])
    return [first, rest]


sample("split_copies", _parts, x=X(6, 4))
sample("writes", _writes, x=X(6, 4), y=X(6, 4))
sample(
    "pads",
    lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 2, 1), value=3.0), F.pad(x, (-1, 1, -2, 0)), F.pad(x, (1, 0), value=-INF)),
    x=X(6, 4),
)
sample(
    "rolls",
    lambda x: (x.roll(1, 0), x.roll((-1, 2), (0, 1)), x[:, 0].roll(5), x.flip(0), x.flip(0, -1), x.flip(1)[:, 1:]),
    x=X(6, 4),
)
sample("windows", lambda x: (x.unfold(0, 2, 2), x.unfold(1, 3, 1), x[:, 0].unfold(0, 4, 1)), x=X(6, 4))
sample(
    "strides",
    lambda x: (
        x.as_strided((3, 8), (8, 1)),
        x.as_strided((3, 2), (4, 1), 2),
        x.as_strided((3,), (5,)),
        x.as_strided((2, 3), (1, 8), 5),
        x.as_strided((2, 2), (4, 4)),
    ),
    x=X(6, 4),
)
sample(
    "strided_writes",
    lambda x, y: (
        torch.as_strided_scatter(x, y, (3, 2), (4, 1), 2),
        torch.as_strided_scatter(x, y, (3, 2), (8, 1), 5),
        torch.as_strided_scatter(x, y, (3, 2), (2, 12), 1),
    ),
    x=X(6, 4),
    y=X(3, 2),
)
sample(
    "diagonals",
    lambda x: (
        x.diagonal(),
        x.diagonal(1),
        x.diagonal(-2),
        x.diagonal(0, -1, 0),
        x.trace(),
        x[0].diag_embed(),
        x.diag_embed(-1),
        x.diag_embed(2, 0, 2),
        x.diagonal_scatter(x[0]),
        x.diagonal_scatter(x[0, 1:], 1),
    ),
    x=X(6, 4),
)
both("diagonal_gradient", lambda x: x.diagonal(1), x=X(6, 4))
sample("shuffles", lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)), x=X(2, 4, 4, 6))
