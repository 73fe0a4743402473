"""A lowered program against the raw one, executed on a sample of the inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphguard.graph.ir import Graph
from graphguard.graph.matching import Joint
from graphguard.oracle.replay import Tensors, replay, replay_joint

_CLOSE = 1e-6  # of numbers in float64, relative to the largest


def same_on(raw: Graph, made: Graph, sample: Tensors) -> bool:
    """Whether a lowered graph that does not communicate computes the outputs of the raw one."""
    return _same(replay(raw, sample, wide=True), replay(made, sample, wide=True))


def same_ranks_on(raw: Joint, made: Joint, samples: Sequence[Tensors]) -> bool:
    """Whether lowered ranks compute, together, the outputs of the raw ones."""
    pairs = zip(replay_joint(raw, samples, wide=True), replay_joint(made, samples, wide=True), strict=True)
    return all(_same(*pair) for pair in pairs)


def _same(raw: dict[str, torch.Tensor | None], made: dict[str, torch.Tensor | None]) -> bool:
    return raw.keys() == made.keys() and all(_close(raw[path], made[path]) for path in raw)


def _close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point() and not a.is_complex():
        return bool(torch.equal(a, b))
    least = _CLOSE * (float(a.abs().nan_to_num().max()) if a.numel() else 0.0)
    return bool(torch.allclose(a, b, rtol=_CLOSE, atol=least, equal_nan=True))
