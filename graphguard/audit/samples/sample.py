"""What the lemma audit runs: a tiny program and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

aten = torch.ops.aten
f32, f64, i64, i32, u8, bf16 = torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16
INF = float("inf")
ZEROS = 0.08


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
            drawn = self.low + (self.high - self.low) * torch.rand(self.shape, generator=generator, dtype=f64)
            if self.low < 0 < self.high:  # some zeros, where functions have their kinks
                drawn = torch.where(torch.rand(self.shape, generator=generator) < ZEROS, 0.0, drawn)
            return drawn
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


# ---------------------------------------------------------------------- samples
class Sample(NamedTuple):
    name: str
    program: Callable[..., Any]
    inputs: dict[str, Spec]
    only: tuple[int, ...] | None = None  # cut all inputs together along these dims alone: the kernel does not look at shapes

    def resized(self, sizes: Mapping[int, int]) -> Sample:
        """The sample with other sizes, where one number is replaced by one number throughout."""

        def of(number: float) -> float:
            return sizes.get(int(number), number)

        inputs = {
            name: spec._replace(
                shape=tuple(sizes.get(size, size) for size in spec.shape),
                high=spec.high if spec.dtype.is_floating_point else of(spec.high),
            )
            for name, spec in self.inputs.items()
        }
        return self._replace(inputs=inputs)


SAMPLES: dict[str, Sample] = {}


def sample(name: str, program: Callable[..., Any], only: tuple[int, ...] | None = None, **inputs: Spec) -> None:
    assert name not in SAMPLES, name
    SAMPLES[name] = Sample(name, program, inputs, only)


def each(names: str, **inputs: Spec) -> None:
    """A sample for each function of torch of one kind of arguments."""
    for name in names.split():
        function = getattr(torch, name, None) or getattr(F, name)
        sample(f"{name}_of_each", lambda _f=function, **given: _f(*given.values()), None, **inputs)


def gradients(program: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The gradients of all float inputs, where a weight that is no constant arrives."""

    def backward(**given: torch.Tensor) -> Any:
        leaves = [t.requires_grad_() for t in given.values() if t.is_floating_point()]
        y = program(**given)
        weight = torch.arange(1, y.numel() + 1, dtype=y.dtype).view(y.shape) / 7
        return torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)

    return backward


def both(name: str, program: Callable[..., Any], only: tuple[int, ...] | None = None, **inputs: Spec) -> None:
    """A sample of a function, and one of its gradients."""
    sample(name, program, only, **inputs)
    sample(f"{name}_backward", gradients(program), only, **inputs)
