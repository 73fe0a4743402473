"""torch: DTensor operators, each with its first operand placed in every way, and with all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from graphguard.api import Input, verify
from graphguard.report.report import Report
from graphguard.sweep.candidate import Candidate

Shapes = tuple[tuple[int, ...], ...]
Operator = Callable[..., torch.Tensor]
_SQUARE, _ROWS, _IMAGES = ((4, 8),), ((4, 8), (8,)), ((4, 8, 6),)
# By name: what is computed, and of which shapes.
OPERATORS: Mapping[str, tuple[Operator, Shapes]] = {
    "sum": (lambda x: x.sum(), _SQUARE),
    "sum(0)": (lambda x: x.sum(0), _SQUARE),
    "mean": (lambda x: x.mean(), _SQUARE),
    "mean(1)": (lambda x: x.mean(1), _SQUARE),
    "amax(0)": (lambda x: x.amax(0), _SQUARE),
    "amin(1)": (lambda x: x.amin(1), _SQUARE),
    "max": (lambda x: x.max(), _SQUARE),
    "prod(0)": (lambda x: x.prod(0), _SQUARE),
    "var(0)": (lambda x: x.var(0), _SQUARE),
    "std": (lambda x: x.std(), _SQUARE),
    "norm": (lambda x: x.norm(), _SQUARE),
    "vector_norm": (torch.linalg.vector_norm, _SQUARE),
    "vector_norm(1)": (lambda x: torch.linalg.vector_norm(x, 1), _SQUARE),
    "logsumexp(0)": (lambda x: x.logsumexp(0), _SQUARE),
    "cumsum(0)": (lambda x: x.cumsum(0), _SQUARE),
    "softmax(1)": (lambda x: x.softmax(1), _SQUARE),
    "log_softmax(0)": (lambda x: x.log_softmax(0), _SQUARE),
    "relu": (torch.relu, _SQUARE),
    "gelu": (F.gelu, _SQUARE),
    "silu": (F.silu, _SQUARE),
    "exp": (torch.exp, _SQUARE),
    "tanh": (torch.tanh, _SQUARE),
    "abs": (torch.abs, _SQUARE),
    "sqrt of squares": (lambda x: (x * x + 1).sqrt(), _SQUARE),
    "add a number": (lambda x: x + 3, _SQUARE),
    "times a number": (lambda x: x * 3, _SQUARE),
    "clamp": (lambda x: x.clamp(min=0), _SQUARE),
    "add": (torch.add, ((4, 8), (4, 8))),
    "mul": (torch.mul, ((4, 8), (4, 8))),
    "mul by rows": (torch.mul, _ROWS),
    "div": (lambda x, y: x / (y * y + 1), ((4, 8), (4, 8))),
    "where": (lambda x, y: torch.where(x > 0, x, y), ((4, 8), (4, 8))),
    "mm": (torch.mm, ((4, 8), (8, 6))),
    "bmm": (torch.bmm, ((4, 6, 8), (4, 8, 2))),
    "linear": (F.linear, ((4, 8), (6, 8), (6,))),
    "addmm": (lambda x, y, z: torch.addmm(z, x, y), ((4, 8), (8, 6), (6,))),
    "einsum": (lambda x, y: torch.einsum("bi,bj->ij", x, y), ((4, 8), (4, 6))),
    "t": (lambda x: x.t(), _SQUARE),
    "transpose": (lambda x: x.transpose(0, 2), _IMAGES),
    "permute": (lambda x: x.permute(2, 0, 1), _IMAGES),
    "view": (lambda x: x.view(-1), _SQUARE),
    "reshape": (lambda x: x.reshape(8, 4), _SQUARE),
    "unflatten": (lambda x: x.unflatten(1, (2, 4)), _SQUARE),
    "flatten": (lambda x: x.flatten(1), _IMAGES),
    "unsqueeze": (lambda x: x.unsqueeze(1), _SQUARE),
    "expand": (lambda x: x.unsqueeze(0).expand(3, 4, 8), _SQUARE),
    "cat(0)": (lambda x, y: torch.cat([x, y], 0), ((4, 8), (4, 8))),
    "cat(1)": (lambda x, y: torch.cat([x, y], 1), ((4, 8), (4, 8))),
    "stack": (lambda x, y: torch.stack([x, y]), ((4, 8), (4, 8))),
    "split(0)": (lambda x: x.split(2, 0)[1], _SQUARE),
    "split(1)": (lambda x: x.split(4, 1)[1], _SQUARE),
    "chunk(1)": (lambda x: x.chunk(2, 1)[0], _SQUARE),
    "slice": (lambda x: x[1:3], _SQUARE),
    "slice of dim 1": (lambda x: x[:, 2:6], _SQUARE),
    "select": (lambda x: x[1], _SQUARE),
    "unbind": (lambda x: x.unbind(1)[2], _SQUARE),
    "flip": (lambda x: x.flip(0), _SQUARE),
    "roll": (lambda x: x.roll(1, 0), _SQUARE),
    "tril": (torch.tril, _SQUARE),
    "pad": (lambda x: F.pad(x, (1, 1)), _SQUARE),
    "repeat": (lambda x: x.repeat(2, 1), _SQUARE),
    "layer_norm": (lambda x, w: F.layer_norm(x, (8,), w), _ROWS),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), _ROWS),
    "group_norm": (lambda x: F.group_norm(x, 2), _IMAGES),
    "cross_entropy": (lambda x: F.cross_entropy(x, _constant(x, torch.tensor([1, 3, 0, 7]))), _SQUARE),
    "mse_loss": (F.mse_loss, ((4, 8), (4, 8))),
    "attention": (F.scaled_dot_product_attention, ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8))),
    "embedding": (lambda x: F.embedding(_constant(x, torch.tensor([1, 3, 0, 2])), x), _SQUARE),
    "index_select": (lambda x: x.index_select(0, _constant(x, torch.tensor([1, 3]))), _SQUARE),
    "gather": (lambda x: x.gather(1, _constant(x, torch.tensor([[1, 3], [0, 2], [5, 5], [7, 0]]))), _SQUARE),
}


def candidates(sizes: tuple[int, ...], options: bool) -> Iterator[Candidate]:
    """Each operator with each placement; if so asked, with uneven shards, too."""
    for size in sizes:
        for name, (_, shapes) in OPERATORS.items():
            for placement in (*(Shard(dim) for dim in range(len(shapes[0]))), Replicate(), Partial()):
                yield Candidate(f"{name} of {placement}", {"tp": size}, partial(_verify, name, placement, size))
        for name in _UNEVEN if options else ():
            for dim in range(2):
                verify_uneven = partial(_verify, name, Shard(dim), size, uneven=True)
                yield Candidate(f"{name} of {Shard(dim)}, uneven", {"tp": size}, verify_uneven)


# Operators of one operand that are computed of one more in each dim, too.
_UNEVEN = (
    "sum", "sum(0)", "mean", "mean(1)", "amax(0)", "var(0)", "std", "norm", "softmax(1)", "log_softmax(0)", "relu", "t", "view",
    "cumsum(0)", "logsumexp(0)", "flip", "roll", "slice", "pad",
)  # fmt: skip


def _verify(name: str, placement: Placement, size: int, uneven: bool = False) -> Report:
    operator, shapes = OPERATORS[name]
    if uneven:
        shapes = (tuple(length + 1 for length in shapes[0]), *shapes[1:])
    placements = [placement, *(Replicate() for _ in shapes[1:])]
    names = "xyz"[: len(shapes)]

    def sequential(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        return _with_gradients(operator, list(given.values()))

    def distributed(mesh: Any, **given: torch.Tensor) -> dict[str, torch.Tensor]:
        strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
        placed = [
            DTensor.from_local(each, mesh, [where], shape=torch.Size(shape), stride=stride)
            for each, where, shape, stride in zip(given.values(), placements, shapes, strides, strict=True)
        ]
        return {path: tensor.full_tensor() for path, tensor in _with_gradients(operator, placed).items()}

    inputs = {each: Input(shape, where) for each, shape, where in zip(names, shapes, placements, strict=True)}
    outputs = dict.fromkeys(["out", *(f"grad_{each}" for each in names)], Replicate())
    return verify(sequential, distributed, mesh={"tp": size}, inputs=inputs, outputs=outputs)


def _with_gradients(operator: Operator, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in tensors:
        tensor.requires_grad_()
    out = operator(*tensors)
    grads = torch.autograd.grad((out * out).sum(), tensors)
    return {"out": out, **{f"grad_{name}": grad for name, grad in zip("xyz", grads, strict=False)}}


def _constant(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same on every rank, as a DTensor where the operand is one."""
    return DTensor.from_local(value, like.device_mesh, [Replicate()]) if isinstance(like, DTensor) else value
