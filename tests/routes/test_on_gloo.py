"""What is verified along paths is what real ranks compute, on inputs of many paths; and the faults differ there."""

from __future__ import annotations

import sys

import pytest
import torch
from harness import ROOT, run_on_gloo

SHAPES = {"x": (8, 4), "router": (4, 4), "up": (4, 4, 6), "down": (4, 6, 4), "dy": (8, 4)}
REPLICATED = ("router",)


@pytest.fixture
def experts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import dropless_experts

    yield dropless_experts
    sys.modules.pop("dropless_experts", None)


def outputs_of(experts, fault, seed):
    """Of the sequential program, and of two real ranks put together."""
    generator = torch.Generator().manual_seed(seed)
    full = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    parts = [{n: t.clone() if n in REPLICATED else t.chunk(2)[rank].clone() for n, t in full.items()} for rank in range(2)]
    ranks = run_on_gloo(experts.dropless(fault), {"ep": 2}, parts)
    alone = experts.moe(**{name: tensor.clone() for name, tensor in full.items()})
    together = {"y": torch.cat([rank["y"] for rank in ranks])}
    together |= {name: torch.cat([rank[f"grads.{name}"] for rank in ranks]) for name in ("x", "up", "down")}
    return {"y": alone["y"], **{name: alone["grads"][name] for name in ("x", "up", "down")}}, together


@pytest.mark.parametrize("fault, right", [(None, True), ("not put back", False), ("gates of other rows", False)])
def test_dropless_experts_on_real_ranks(experts, fault, right):
    pairs = [outputs_of(experts, fault, seed) for seed in range(3)]
    equal = [all(torch.allclose(alone[name], together[name]) for name in alone) for alone, together in pairs]
    assert all(equal) is right
