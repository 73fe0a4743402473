"""Inputs at which programs part that agree on random ones: zeros, negatives, ties, all equal, one-hot, the ends of ranges.

The functions need torch alone, and no default dtype: a counterexample's script has their text.
"""

from __future__ import annotations

import torch

# What one input may be in a mixture: "rows" is some of each, along its first dim.
OF_REALS = ("rows", "few", "zero", "one-hot", "equal", "ends")
OF_WHOLE = ("rows", "each", "ends", "equal", "few")
OF_TRUTH = ("rows", "true", "one-hot", "false")


def mixed(
    shape: tuple[int, ...],
    low: float | None,
    high: float | None,
    few: tuple[float, ...],
    kind: str,
    *,
    generator: torch.Generator,
) -> torch.Tensor:
    """Real numbers, `low <= v < high`. few: the numbers that are taken for ties."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    zero, ones = torch.zeros_like(normal), torch.ones_like(normal)
    random, ends, size = normal, normal.sign(), 1.0
    if low is not None and high is not None:
        size = high - low
        random, ends = low + size * torch.sigmoid(normal), torch.where(normal > 0, low * ones, high * ones)
    among = torch.tensor(few, dtype=torch.float64)[torch.randint(0, len(few), shape, generator=generator)]
    hot = (normal == normal.amax(-1, keepdim=True)) * ones if normal.numel() and normal.dim() else ones
    equal = ones * (random.reshape(-1)[0] if normal.numel() else 0.0)
    kinds = {"zero": zero, "few": among, "random": random, "one-hot": hot, "equal": equal, "ends": ends}
    chosen = kinds.get(kind, random)
    if kind == "rows":
        rows = (*shape[:-1], 1) if shape and torch.Size(shape[:-1]).numel() >= len(kinds) else shape
        count = torch.Size(rows).numel()
        places = torch.randperm(count, generator=generator) if count != 1 else torch.randint(0, 6, (1,), generator=generator)
        places = places.reshape(rows) % len(kinds)
        for place, each in enumerate(kinds.values()):
            chosen = torch.where(places == place, each, chosen)
    if low is not None:
        chosen = chosen.clamp(min=low)
    return chosen if high is None else chosen.clamp(max=high - 1e-6 * size)


def mixed_whole(
    shape: tuple[int, ...], low: int, high: int, few: tuple[int, ...], kind: str, *, generator: torch.Generator
) -> torch.Tensor:
    """Whole numbers, `low <= v < high`, or among `few`."""
    random = torch.randint(low, high, shape, generator=generator)
    among = torch.tensor(few)[torch.randint(0, len(few), shape, generator=generator)]
    ends = torch.where(torch.rand(shape, generator=generator, dtype=torch.float64) < 0.5, low, high - 1)
    each = ((torch.randperm(random.numel(), generator=generator) % (high - low)) + low).reshape(shape)
    equal = torch.full(shape, int(torch.randint(low, high, (), generator=generator)))
    kinds = {"few": among, "ends": ends, "random": random, "each": each, "equal": equal}
    chosen = kinds.get(kind, random)
    if kind == "rows":
        places = torch.randperm(random.numel(), generator=generator).reshape(shape) % 4
        for place, numbers in enumerate((among, ends, each)):
            chosen = torch.where(places == place, numbers, chosen)
    return chosen


def mixed_truth(shape: tuple[int, ...], kind: str, *, generator: torch.Generator) -> torch.Tensor:
    """Truth values."""
    random = torch.rand(shape, generator=generator, dtype=torch.float64)
    hot = random == (random.amax(-1, keepdim=True) if random.numel() and random.dim() else random)
    rows = torch.randint(0, 3, (*shape[:-1], 1) if shape else (), generator=generator)
    by_row = torch.where(rows == 0, random < 0.5, rows == 1)
    return {"true": random >= 0, "false": random < 0, "one-hot": hot}.get(kind, by_row).clone()
