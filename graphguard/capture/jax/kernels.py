"""Kernels by Pallas: what a user says of one, and how that is compared with the kernel itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from graphguard.capture.jax.dtypes import is_float
from graphguard.errors import CaptureError, UsageError, first_line

_TRIALS, _TOLERANCE = 3, 1e-3  # kernels compute in their own dtypes


@dataclass(frozen=True, eq=False)
class KernelLemma:
    """What a kernel computes, as a function of its operands in plain JAX. `kernel`: the name of its `pallas_call`."""

    kernel: str
    definition: Callable[..., Any]
    _compared: dict[Any, str] = field(default_factory=dict, repr=False)

    def assumption(self, equation: Any, traced: Any) -> str:
        """Compared on random numbers, in the shapes of one call; an interpreter of JAX's runs the kernel."""
        key = tuple((each.aval.shape, str(each.aval.dtype)) for each in equation.invars), str(equation.params["jaxpr"])
        if key not in self._compared:
            self._compared[key] = self._compare(equation, traced)
        return self._compared[key]

    def traced(self, equation: Any) -> Any:
        avals = [each.aval for each in equation.invars]
        if not all(hasattr(aval, "shape") and hasattr(aval, "dtype") for aval in avals):
            raise CaptureError("a kernel that is given references has no exact graph yet")
        try:
            traced = jax.make_jaxpr(self.definition)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
        except Exception as error:
            raise UsageError(
                f"the lemma of the kernel {self.kernel} raised {type(error).__name__}: {first_line(error)}"
            ) from None
        made, wanted = ([_type(each.aval) for each in side] for side in (traced.jaxpr.outvars, equation.outvars))
        if made != wanted:
            raise UsageError(
                f"the lemma of the kernel {self.kernel} gives {', '.join(made)}, where the kernel gives {', '.join(wanted)}"
            )
        return traced

    def _compare(self, equation: Any, traced: Any) -> str:
        said = f"the kernel {self.kernel} is {getattr(self.definition, '__name__', 'a function')}, a lemma of yours"
        for trial in range(_TRIALS):
            rng = np.random.default_rng(trial)
            data = [_drawn(rng, each.aval) for each in equation.invars]
            try:
                params = {**equation.params, "interpret": True}
                by_kernel = equation.primitive.bind(*data, **params)
            except Exception as error:
                return f"trusted: {said}; the kernel cannot be run here: {first_line(error)}"
            by_lemma = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *data)
            for one, other in zip(by_kernel, by_lemma, strict=True):
                self._require_equal(np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64))
        return f"{said} that held in {_TRIALS} random cases"

    def _require_equal(self, one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
        off = ~np.isclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        if off.any():
            at = tuple(int(place) for place in np.argwhere(off)[0])
            raise UsageError(
                f"the lemma of the kernel {self.kernel} does not hold: element {list(at)} of its result is {other[at]:.6g}, "
                f"where the kernel gives {one[at]:.6g}"
            )


def _type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def _drawn(rng: np.random.Generator, aval: Any) -> Any:
    if is_float(aval.dtype):
        return jax.numpy.asarray(rng.standard_normal(aval.shape), dtype=aval.dtype)
    return jax.numpy.asarray(rng.integers(0, 2, aval.shape), dtype=aval.dtype)
