"""Which random numbers are the same. A generator in the same state gives the same numbers: activation checkpointing puts the
state back before it computes a dropout again, and programs seed twice to get equal weights. Only equal calls are told to be
equal: different calls from one state share bits too, but no program can mean to use that."""

from __future__ import annotations

from typing import Any

import torch

from graphguard.aten.operators import Operator
from graphguard.errors import CaptureError
from graphguard.ir import Arg, Value, values_in

# These overwrite the tensor that they are called on, whatever it held.
_OVERWRITES = {"aten.bernoulli_.float", "aten.bernoulli_.Tensor", "aten.uniform_.default", "aten.normal_.default",
               "aten.exponential_.default", "aten.random_.default", "aten.random_.from", "aten.random_.to",
               "aten.geometric_.default", "aten.cauchy_.default", "aten.log_normal_.default"}  # fmt: skip
_ONLY_FORM = ("aten.rand_like.", "aten.randn_like.", "aten.randint_like.")


class RandomState:
    """The state of the default generator, as the history of draws since it was seeded."""

    def __init__(self) -> None:
        self._ids: dict[object, int] = {}
        self._drawn: dict[int, tuple[tuple[Value, ...], tuple[Value, ...]]] = {}
        self._saved: dict[int, tuple[torch.Tensor, int]] = {}
        self._state = self._id("start")

    def _id(self, key: object) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def seed(self, seed: object) -> None:
        self._state = self._id(("seed", seed))

    def save(self, token: torch.Tensor) -> torch.Tensor:
        self._saved[id(token)] = token, self._state
        return token

    def restore(self, token: torch.Tensor) -> None:
        if id(token) not in self._saved:
            raise CaptureError(
                "torch.set_rng_state is given a state that torch.get_rng_state did not return; pass that on as it is"
            )
        self._state = self._saved[id(token)][1]

    def draw(
        self, info: Operator, args: tuple[Arg, ...], keywords: dict[str, Arg], outputs: list[Any]
    ) -> tuple[Value, ...] | None:
        """Move on by one draw. The values drawn before in this very state, if it was so; else `remember` is to be told."""
        content: tuple[Arg, ...] = () if info.name.startswith(_ONLY_FORM) else (*args, *keywords.values())
        if info.name in _OVERWRITES:
            content = content[1:]
        reads = tuple(values_in(content))
        forms = tuple((tuple(t.shape), t.stride(), t.dtype) for t in outputs)
        scalars = repr([_form(arg) for arg in (*args, *keywords.items())])
        self._state = self._id((self._state, info.name, forms, scalars))
        before = self._drawn.get(self._state)
        if before is None:
            self._reads = reads
            return None
        if before[0] != reads:
            raise CaptureError(
                f"{info.name} draws the random numbers of an earlier call again, with other tensors; draw once, and keep them"
            )
        return before[1]

    def remember(self, values: tuple[Value, ...]) -> None:
        self._drawn[self._state] = self._reads, values


def _form(arg: Any) -> object:
    if isinstance(arg, Value):
        return arg.shape, arg.dtype
    return tuple(_form(item) for item in arg) if isinstance(arg, tuple) else arg
