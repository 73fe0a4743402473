"""A lowered program against the raw one, executed on a sample of the inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphguard.graph.ir import Graph
from graphguard.graph.matching import Joint
from graphguard.oracle.replay import Tensors, replay, replay_joint
from graphguard.oracle.trial import seeded

_CLOSE = 1e-6  # of numbers in float64, relative to the largest


def same_on(raw: Graph, made: Graph, sample: Tensors) -> bool:
    """Whether a lowered graph that does not communicate computes the outputs of the raw one."""
    with seeded(0):
        before = replay(raw, sample, wide=True)
    with seeded(0):
        return _same(before, replay(made, sample, wide=True))


def same_ranks_on(raw: Joint, made: Joint, samples: Sequence[Tensors]) -> bool:
    """Whether lowered ranks compute, together, the outputs of the raw ones."""
    with seeded(0):
        before = replay_joint(raw, samples, wide=True)
    with seeded(0):
        return all(map(_same, before, replay_joint(made, samples, wide=True)))


def _same(raw: dict[str, torch.Tensor | None], made: dict[str, torch.Tensor | None]) -> bool:
    return raw.keys() == made.keys() and all(_close(raw[path], made[path]) for path in raw)


def _close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point() and not a.is_complex():
        return bool(torch.equal(a, b))
    finite = a[a.isfinite()]
    least = _CLOSE * float(finite.abs().max()) if finite.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=_CLOSE, atol=least, equal_nan=True))
