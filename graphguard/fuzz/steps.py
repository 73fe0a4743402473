"""What random programs are made of. A kind of step draws its numbers once, and is then run on every side: on the whole tensors
of the sequential program and on what each rank has in their place, so that it must not know their sizes.

Many steps do nothing (t + (a - a), exp of log), round, wrap, order or count: where descriptions may be taken to say more than
they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

Work = Callable[..., Tensor]  # of the operands
Draw = Callable[..., Work | None]  # of the chance and the sequential operands; None where the kind does not fit
NUMBERS = (0, 1, 2, -1, 3, 0.5, -2, 1 / 3, 1.5)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class Kind:
    """takes: for each operand, f(loat), i(nteger), b(ool), n(umber: f or i) or a(ny). partial: it is not defined everywhere, so
    that only ranks may do it."""

    name: str
    takes: str
    draw: Draw
    partial: bool = False
    often: int = 1


KINDS: list[Kind] = []


def kind(takes: str, *, partial: bool = False, often: int = 1) -> Callable[[Draw], Draw]:
    def register(draw: Draw) -> Draw:
        KINDS.append(Kind(draw.__name__.replace("_", " "), takes, draw, partial, often))
        return draw

    return register


def fits(tensor: Tensor, letter: str) -> bool:
    is_float, is_bool = bool(tensor.is_floating_point()), bool(tensor.dtype == torch.bool)
    return {"f": is_float, "i": not (is_float or is_bool), "b": is_bool, "n": not is_bool, "a": True}[letter]


def _some(functions: Sequence[Work]) -> Draw:
    return lambda chance, *operands: chance.choice(functions)


def _dim(chance: Random, tensor: Tensor) -> int | None:
    """A dim of a tensor, counted from the end, where the ranks' tensors have it, too."""
    return chance.randrange(-tensor.dim(), 0) if tensor.dim() else None


# ---------------------------------------------------------------------- numbers, one by one
_TOTAL: tuple[Work, ...] = (
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    F.silu,
    F.gelu,
    torch.neg,
    torch.abs,
    torch.square,
    torch.sin,
    torch.cos,
    torch.erf,
    F.softplus,
    F.leaky_relu,
    F.elu,
    torch.floor,
    torch.ceil,
    torch.round,
    torch.trunc,
    torch.sign,
    torch.frac,
    torch.exp2,
    lambda x: x.abs().sqrt(),
    lambda x: (x.abs() + 1).rsqrt(),
    lambda x: (x.abs() + 1).log(),
    lambda x: 1 / (x * x + 1),
    lambda x: x.tanh().exp(),
    lambda x: x.abs().log1p(),
    lambda x: x.nan_to_num(),
    lambda x: F.hardtanh(x),
    torch.positive,
    lambda x: torch.expm1(x.tanh()),
    lambda x: x.tanh().atanh(),
    lambda x: F.relu6(x),
    lambda x: F.mish(x),
    torch.sinc,
)
_PARTIAL: tuple[Work, ...] = (
    torch.sqrt,
    torch.log,
    torch.rsqrt,
    torch.reciprocal,
    torch.log2,
    torch.log10,
    torch.log1p,
    torch.asin,
    torch.acos,
    torch.acosh,
    torch.atanh,
    torch.logit,
    torch.erfinv,
    torch.lgamma,
    torch.digamma,
    lambda x: x**0.5,
    lambda x: x**-1,
)
_WHOLE: tuple[Work, ...] = (
    torch.neg,
    torch.abs,
    torch.square,
    torch.sign,
    lambda i: i + i,
    lambda i: i * 3 + 1,
    lambda i: i // 2,
    lambda i: i % 3,
    lambda i: -i // 2,
    lambda i: i.float() / 2,
    lambda i: i & 1,
    lambda i: i ^ 3,
    lambda i: ~i,
    lambda i: i << 1,
    lambda i: i >> 1,
)
KINDS += [
    Kind("function", "f", _some(_TOTAL), often=6),
    Kind("partial function", "f", _some(_PARTIAL), partial=True, often=2),
    Kind("function of whole numbers", "i", _some(_WHOLE), often=3),
]


@kind("n", often=3)
def with_number(chance: Random, x: Tensor) -> Work:
    number = chance.choice(NUMBERS)
    works: list[Work] = [
        lambda x: x + number,
        lambda x: x * number,
        lambda x: number - x,
        lambda x: x.clamp(min=number),
        lambda x: x.clamp(max=number),
        lambda x: x.clamp(-1, 2),
        lambda x: torch.add(x, x, alpha=2),
        lambda x: x / 3,
        lambda x: x.pow(2),
        lambda x: x.pow(3),
        lambda x: torch.where(x > number, x, number),
        lambda x: x % 2,
        lambda x: x // 2,
        lambda x: x.fmod(2),
        lambda x: x.masked_fill(x > number, number),
        lambda x: torch.full_like(x, number),
    ]
    return chance.choice(works)


@kind("nn", often=5)
def pair(chance: Random, x: Tensor, y: Tensor) -> Work:
    works: list[Work] = [
        torch.add,
        torch.sub,
        torch.mul,
        torch.maximum,
        torch.minimum,
        lambda x, y: x / (y * y + 1),
        torch.add,
        torch.mul,
        lambda x, y: torch.where(x > y, x, y),
        lambda x, y: torch.lerp(x, y, 0.25),
        lambda x, y: torch.add(x, y, alpha=-2),
        lambda x, y: torch.atan2(x, y * y + 1),
        lambda x, y: torch.addcmul(x, x, y, value=2),
        torch.fmax,
        torch.hypot,
        lambda x, y: x.float() - y,
        lambda x, y: torch.copysign(x, y),
        lambda x, y: torch.rsub(x, y),
    ]
    return chance.choice(works)


@kind("nn", partial=True, often=2)
def partial_pair(chance: Random, x: Tensor, y: Tensor) -> Work:
    works: list[Work] = [
        torch.div,
        torch.remainder,
        torch.fmod,
        torch.floor_divide,
        torch.pow,
        torch.xlogy,
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: x / y * y,
    ]
    return chance.choice(works)


_COMPARISONS: tuple[Work, ...] = (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne)


@kind("nn", often=2)
def comparison(chance: Random, x: Tensor, y: Tensor) -> Work:
    return chance.choice(_COMPARISONS)


@kind("n")
def comparison_with_number(chance: Random, x: Tensor) -> Work:
    compare, number = chance.choice(_COMPARISONS), chance.choice((0, 1, -1, 0.5))
    return lambda x: compare(x, number)


@kind("bb")
def logic(chance: Random, x: Tensor, y: Tensor) -> Work:
    works: list[Work] = [
        torch.logical_and,
        torch.logical_or,
        torch.logical_xor,
        torch.mul,
        torch.add,
        lambda x, y: x & ~y,
    ]
    return chance.choice(works)


@kind("baa", often=2)
def where(chance: Random, m: Tensor, x: Tensor, y: Tensor) -> Work:
    work: Work = torch.where
    return work


@kind("a", often=4)
def cast(chance: Random, x: Tensor) -> Work:
    dtype = chance.choice(DTYPES)
    return lambda x: x.to(dtype)


# ---------------------------------------------------------------------- along dims
@kind("n", often=4)
def reduction(chance: Random, x: Tensor) -> Work | None:
    dim, keep = _dim(chance, x), chance.random() < 0.5
    if dim is None:
        return None
    works: list[Work] = [
        lambda x: x.sum(dim, keep),
        lambda x: x.amax(dim, keep),
        lambda x: x.amin(dim, keep),
        lambda x: x.float().mean(dim, keep),
        lambda x: x.sum(),
        lambda x: x.prod(dim),
        lambda x: x.cumsum(dim),
        lambda x: x.float().softmax(dim),
        lambda x: x.float().log_softmax(dim),
        lambda x: x.float().logsumexp(dim, keep),
        lambda x: x.float().var(dim, correction=0),
        lambda x: x.float().norm(dim=dim),
        lambda x: x.sum(dim, dtype=torch.float64),
        lambda x: x.max(dim)[0],
        lambda x: x.max(),
        lambda x: (x * x).sum(dim, keep),
        lambda x: x.float().norm(1, dim=dim),
        lambda x: x.cummax(dim)[0],
        lambda x: x.sum(dim, dtype=torch.int64),
        lambda x: x.diff(dim=dim),
    ]
    return chance.choice(works)


@kind("a", often=2)
def count(chance: Random, x: Tensor) -> Work | None:
    dim = _dim(chance, x)
    if dim is None:
        return None
    works: list[Work] = [
        lambda x: x.any(dim),
        lambda x: x.all(dim),
        lambda x: x.sum(dim),
        lambda x: x.cumsum(dim),
        lambda x: (x > 0).sum(dim),
        lambda x: x.sum(dim, dtype=torch.bool),
        lambda x: x.count_nonzero(dim),
        lambda x: (x == 0).float().mean(dim),
        lambda x: x.sum(dim, dtype=torch.uint8),
    ]
    return chance.choice(works)


@kind("f")
def order(chance: Random, x: Tensor) -> Work | None:
    dim = _dim(chance, x)
    if dim is None:
        return None
    works: list[Work] = [
        lambda x: x.argmax(dim),
        lambda x: x.sort(dim, stable=True)[0],
        lambda x: x.topk(1, dim)[0],
        lambda x: x.argmin(dim),
        lambda x: x.argsort(dim, stable=True),
        lambda x: x.median(dim)[0],
        lambda x: x.kthvalue(1, dim)[0],
    ]
    return chance.choice(works)


# ---------------------------------------------------------------------- places
@kind("a", often=5)
def view(chance: Random, x: Tensor) -> Work | None:
    dim = _dim(chance, x)
    if dim is None:
        return lambda x: x.reshape(1)
    far, start = -chance.randint(1, x.dim()), chance.randrange(3)
    works: list[Work] = [
        lambda x: x.flatten(),
        lambda x: x.transpose(dim, far),
        lambda x: x.flip(dim),
        lambda x: x.roll(1, dim),
        lambda x: x.unsqueeze(dim),
        lambda x: x.select(dim, 0),
        lambda x: x.select(dim, -1),
        lambda x: x.narrow(dim, start, 1),
        lambda x: x.chunk(2, dim)[0],
        lambda x: x.chunk(2, dim)[-1],
        lambda x: x.unflatten(dim, (2, -1)),
        lambda x: x.unflatten(dim, (-1, 2)),
        lambda x: x.repeat_interleave(2, dim),
        lambda x: torch.cat([x, x.flip(dim)], dim),
        lambda x: torch.stack([x, x + x], dim),
        lambda x: x.tril(),
        lambda x: x.triu(1),
        lambda x: x.movedim(dim, 0),
        lambda x: F.pad(x, (1, 0)),
        lambda x: F.pad(x, (0, 2)),
        lambda x: x.expand(2, *x.shape),
        lambda x: x.narrow(dim, 1, x.shape[dim] - 1),
        lambda x: x.mT,
        lambda x: x.diagonal(),
        lambda x: x.unfold(dim, 2, 1),
        lambda x: x[..., ::2],
        lambda x: x.reshape(-1, x.shape[0]),
    ]
    return chance.choice(works)


@kind("aa")
def join(chance: Random, x: Tensor, y: Tensor) -> Work | None:
    dim = _dim(chance, x)
    return None if dim is None else chance.choice([lambda x, y: torch.cat([x, y], dim), lambda x, y: torch.stack([x, y], dim)])


@kind("a")
def written(chance: Random, x: Tensor) -> Work | None:
    """What is changed in place, or given as `out=`."""
    dim, number = _dim(chance, x), chance.choice(NUMBERS)
    if dim is None:
        return None

    def part(x: Tensor) -> Tensor:
        y = x.clone()
        y.select(dim, 0).fill_(number)
        return y

    def whole(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.copy_(x.float() * number)
        return y

    def added(x: Tensor) -> Tensor:
        y = x.clone()
        y.narrow(dim, 0, 1).add_(x.narrow(dim, -1, 1))
        return y

    def out(x: Tensor) -> Tensor:
        y = torch.empty(x.shape, dtype=torch.float32)
        torch.mul(x, 2, out=y)
        return y

    def scattered(x: Tensor) -> Tensor:
        return x.select_scatter(torch.ones(x.select(dim, 0).shape) * number, dim, 0)

    return chance.choice([part, whole, added, out, scattered])


# ---------------------------------------------------------------------- indices
@kind("ia", often=3)
def looked_up(chance: Random, i: Tensor, x: Tensor) -> Work | None:
    if not x.dim():
        return None
    works: list[Work] = [
        lambda i, x: x[i % x.shape[0]],
        lambda i, x: F.embedding(i % x.shape[0], x),
        lambda i, x: x[i.clamp(0, x.shape[0] - 1)],
        lambda i, x: x.index_select(0, i.flatten() % x.shape[0]),
        lambda i, x: F.embedding(i, x),
        lambda i, x: x[i],
        lambda i, x: x.gather(0, i % x.shape[0]),
        lambda i, x: x.take(i % x.numel()),
        lambda i, x: torch.take_along_dim(x, i % x.shape[-1], -1),
        lambda i, x: x.gather(-1, i),
    ]
    return chance.choice(works)


@kind("i")
def hot(chance: Random, i: Tensor) -> Work:
    size = chance.randint(1, 4)
    works: list[Work] = [
        lambda i: F.one_hot(i % size, size),
        lambda i: i[..., None] == torch.arange(size),
        lambda i: F.one_hot(i, size),
        lambda i: torch.bincount(i.flatten() % size, minlength=size),
    ]
    return chance.choice(works)


@kind("ia", often=2)
def scattered(chance: Random, i: Tensor, x: Tensor) -> Work | None:
    if i.dim() != 1 or x.dim() != 1:
        return None
    size, reduce = chance.randint(2, 4), chance.choice(["sum", "amax", "prod", "mean"])
    works: list[Work] = [
        lambda i, x: torch.zeros(size, dtype=x.dtype).index_add(0, i % size, x),
        lambda i, x: torch.zeros(size, dtype=x.dtype).scatter_add(0, i % size, x),
        lambda i, x: torch.ones(size, dtype=x.dtype).scatter_reduce(0, i % size, x, reduce),
        lambda i, x: torch.zeros(size, dtype=x.dtype).index_put((i % size,), x, accumulate=True),
        lambda i, x: torch.zeros(size, dtype=x.dtype).scatter(0, i % size, 1),
    ]
    return chance.choice(works)


# ---------------------------------------------------------------------- products, norms, losses
@kind("ff", often=3)
def product(chance: Random, x: Tensor, y: Tensor) -> Work:
    works: list[Work] = [
        lambda x, y: x @ y.mT,
        lambda x, y: x @ y,
        lambda x, y: x.mT @ y,
        lambda x, y: torch.einsum("ij,ij->i", x, y),
        lambda x, y: F.linear(x, y),
        lambda x, y: x.flatten() @ y.flatten(),
        lambda x, y: torch.addmm(x, x, y.mT),
        lambda x, y: F.mse_loss(x, y),
        lambda x, y: F.smooth_l1_loss(x, y, reduction="sum"),
        lambda x, y: torch.outer(x, y),
        lambda x, y: F.cosine_similarity(x, y, dim=-1),
        lambda x, y: F.l1_loss(x, y, reduction="none"),
    ]
    return chance.choice(works)


@kind("f")
def norm(chance: Random, x: Tensor) -> Work | None:
    if not x.dim():
        return None
    works: list[Work] = [
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: F.rms_norm(x, x.shape[-1:]),
        lambda x: F.normalize(x, dim=-1),
        lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1),
    ]
    return chance.choice(works)


@kind("fi")
def loss(chance: Random, x: Tensor, i: Tensor) -> Work | None:
    if x.dim() != 2:
        return None
    ignored, reduction = chance.choice([-100, 0, 1, 255]), chance.choice(["mean", "sum", "none"])
    wraps = chance.random() < 0.5
    return lambda x, i: F.cross_entropy(x, i % x.shape[1] if wraps else i, ignore_index=ignored, reduction=reduction)


@kind("ff", often=2)
def gradient(chance: Random, x: Tensor, y: Tensor) -> Work:
    inner = chance.choice(
        [
            torch.relu,
            torch.tanh,
            torch.sigmoid,
            F.silu,
            torch.abs,
            torch.square,
            lambda x: x.softmax(-1),
            lambda x: F.layer_norm(x, x.shape[-1:]),
            lambda x: x.amax(-1),
            lambda x: x.cumsum(-1),
            lambda x: x.clamp(-1, 1),
            lambda x: x.sum(-1) ** 2,
            lambda x: (x + 1).tril(),
        ]
    )

    def work(x: Tensor, y: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (inner(leaf) * (y * y).sum()).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    return work


# ---------------------------------------------------------------------- what does nothing, where it is defined
@kind("ff", often=3)
def nothing(chance: Random, t: Tensor, a: Tensor) -> Work:
    works: list[Work] = [
        lambda t, a: t + (a - a),
        lambda t, a: t + 0 * a,
        lambda t, a: torch.where(a > 0, t, t),
        lambda t, a: t.exp().log(),
        lambda t, a: torch.maximum(t, t),
        lambda t, a: t.neg().neg(),
        lambda t, a: t.relu() - (-t).relu(),
        lambda t, a: t * 3 / 3,
        lambda t, a: t - a + a,
        lambda t, a: (t * (a * a + 1)) / (a * a + 1),
        lambda t, a: t.abs() * t.sign(),
        lambda t, a: t.square().sqrt(),
        lambda t, a: (a.sigmoid() + (-a).sigmoid()) * t,
        lambda t, a: t.clone(),
    ]
    return chance.choice(works)


@kind("ff", partial=True, often=3)
def nothing_if_defined(chance: Random, t: Tensor, a: Tensor) -> Work:
    works: list[Work] = [
        lambda t, a: t + 0 * a.log(),
        lambda t, a: t + a.rsqrt() - a.rsqrt(),
        lambda t, a: t / a * a,
        lambda t, a: t.log().exp(),
        lambda t, a: t.sqrt().square(),
        lambda t, a: t + torch.remainder(t, a) * 0,
        lambda t, a: t + 0 * a.asin(),
        lambda t, a: torch.where(a > 9, a.log(), t),
        lambda t, a: t * (a / a),
        lambda t, a: t + torch.empty(t.shape) * 0,
        lambda t, a: t + torch.floor_divide(t, a) - torch.floor_divide(t, a),
        lambda t, a: t.reciprocal().reciprocal(),
        lambda t, a: t + torch.logit(a) - torch.logit(a),
        lambda t, a: torch.exp(a.log() + t.log()),
        lambda t, a: t + 0**a * 0,
    ]
    return chance.choice(works)


def operands(chance: Random, kind: Kind, tensors: Sequence[Tensor]) -> list[int] | None:
    """The numbers of tensors that a kind may be given; the newest are the likeliest."""
    chosen: list[int] = []
    for letter in kind.takes:
        fitting = [number for number, tensor in enumerate(tensors) if fits(tensor, letter)]
        if not fitting:
            return None
        chosen.append(chance.choices(fitting, [1 + number for number in fitting])[0])
    return chosen
