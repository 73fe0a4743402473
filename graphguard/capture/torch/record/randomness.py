"""Which random numbers are the same. A generator in the same state gives the same numbers: activation checkpointing puts the
state back before it computes a dropout again, and programs seed twice to get equal weights. Only equal calls are told to be
equal: different calls from one state share bits too, but no program can mean to use that."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from graphguard.aten.operators import Operator
from graphguard.errors import CaptureError
from graphguard.graph.ir import Arg, Value, values_in

# These overwrite the tensor that they are called on, whatever it held.
_OVERWRITES = {"aten.bernoulli_.float", "aten.bernoulli_.Tensor", "aten.uniform_.default", "aten.normal_.default",
               "aten.exponential_.default", "aten.random_.default", "aten.random_.from", "aten.random_.to",
               "aten.geometric_.default", "aten.cauchy_.default", "aten.log_normal_.default"}  # fmt: skip
_numpy = torch.Tensor.numpy  # a capture replaces the method by one that asks the graph
_SEED_BYTES = 8  # the state of a generator of the CPU starts with the seed that it was given
_ONLY_FORM = {"aten.rand", "aten.randn"}  # what they draw depends on the form of the result alone


class RandomState:
    """Who draws from a generator in which state. Nothing is drawn without data, so generators do not move by themselves: each
    draw puts its generator into a state of its own, and what seeds, saves or restores generators works as it always does."""

    def __init__(self) -> None:
        self._drawn: dict[str, tuple[tuple[Value, ...], tuple[Value, ...]]] = {}
        self._calls: dict[bytes, str] = {}  # the first call in each state
        self.state = ""  # of the generator, before it drew last
        self.shared = False  # whether different calls drew from one state

    def draw(
        self,
        generator: torch.Generator,
        info: Operator,
        args: tuple[Arg, ...],
        keywords: dict[str, Arg],
        outputs: list[Any],
    ) -> tuple[Value, ...] | None:
        """Move on by one draw. The values drawn before in this very state, if it was so; else `remember` is to be told."""
        content: tuple[Arg, ...] = () if "_like." in info.name else (*args, *keywords.values())
        if info.name in _OVERWRITES:
            content = content[1:]
        reads = tuple(values_in(content))
        forms = tuple((tuple(t.shape), t.stride(), t.dtype) for t in outputs)
        scalars = repr([_form(arg) for arg in (*args, *keywords.items())])
        family = info.name.rsplit(".", 1)[0].removesuffix("_like")
        call = repr((family, forms, "" if family in _ONLY_FORM else scalars))
        state = _numpy(generator.get_state())
        now = hashlib.sha256(state).digest()
        self.state = now.hex()[:16]
        self.shared |= self._calls.setdefault(now, call) != call
        self._last = hashlib.sha256(now + call.encode()).hexdigest()
        _move(generator, state, self._last)
        before = self._drawn.get(self._last)
        if before is None:
            self._reads = reads
            return None
        if before[0] != reads:
            raise CaptureError(
                f"{info.name} draws the random numbers of an earlier call again, with other tensors; draw once, and keep them"
            )
        return before[1]

    def remember(self, values: tuple[Value, ...]) -> None:
        self._drawn[self._last] = self._reads, values


def _move(generator: torch.Generator, state: np.ndarray[Any, Any], name: str) -> None:
    """Into a state that only this draw leads to. The seed that the generator was given is still its own."""
    moved = torch.Generator().manual_seed(int(name[:16], 16)).get_state()
    _numpy(moved)[:_SEED_BYTES] = state[:_SEED_BYTES]
    generator.set_state(moved)


def _form(arg: Any) -> object:
    if isinstance(arg, Value):
        return arg.shape, arg.dtype
    return tuple(_form(item) for item in arg) if isinstance(arg, tuple) else arg
