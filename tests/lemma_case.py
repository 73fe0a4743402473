"""What a case for the table of lemmas is: a tiny program and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

aten = torch.ops.aten
f32, f64, i64, i32, u8, bf16 = torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16
INF = float("inf")


# ---------------------------------------------------------------------- inputs
class Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype = f32
    low: float = -2.0
    high: float = 2.0
    declared: bool = True  # whether the range of an integer is given, not inferred

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if self.dtype.is_complex:
            return torch.randn(self.shape, generator=generator, dtype=torch.complex128)
        if self.dtype.is_floating_point:
            return self.low + (self.high - self.low) * torch.rand(self.shape, generator=generator, dtype=f64)
        return torch.randint(int(self.low), int(self.high), self.shape, generator=generator, dtype=self.dtype)


def X(*shape: int, dtype: torch.dtype = f32) -> Spec:
    return Spec(shape, dtype)


def P(*shape: int, low: float = 0.5, high: float = 3.0) -> Spec:
    return Spec(shape, f32, low, high)


def N(*shape: int, high: int = 6, low: int = 0, dtype: torch.dtype = i64, declared: bool = True) -> Spec:
    return Spec(shape, dtype, low, high, declared)


def B(*shape: int) -> Spec:
    return Spec(shape, torch.bool)


def C(*shape: int) -> Spec:
    return Spec(shape, torch.complex64)


# ---------------------------------------------------------------------- cases
class Case(NamedTuple):
    name: str
    program: Callable[..., Any]
    inputs: dict[str, Spec]
    only: tuple[int, ...] | None = None  # cut all inputs together along these dims alone: the kernel does not look at shapes


CASES: dict[str, Case] = {}


def case(name: str, program: Callable[..., Any], only: tuple[int, ...] | None = None, **inputs: Spec) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, program, inputs, only)


def each(names: str, **inputs: Spec) -> None:
    """A case for each function of torch of one kind of arguments."""
    for name in names.split():
        function = getattr(torch, name, None) or getattr(F, name)
        case(f"{name}_of_each", lambda _f=function, **given: _f(*given.values()), **inputs)


def gradients(program: Callable[..., torch.Tensor], **inputs: Spec) -> Callable[..., Any]:
    """The gradients of all float inputs, where a weight that is no constant arrives."""

    def backward(**given: torch.Tensor) -> Any:
        leaves = [t.requires_grad_() for t in given.values() if t.is_floating_point()]
        y = program(**given)
        weight = torch.arange(1, y.numel() + 1, dtype=y.dtype).view(y.shape) / 7
        return torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)

    return backward


def both(name: str, program: Callable[..., Any], only: tuple[int, ...] | None = None, **inputs: Spec) -> None:
    """A case for a function, and one for its gradients."""
    case(name, program, only, **inputs)
    case(f"{name}_backward", gradients(program), only, **inputs)
