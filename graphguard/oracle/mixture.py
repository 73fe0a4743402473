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
    shape: tuple[int, ...], low: float | None, high: float | None, few: tuple[float, ...], kind: str, *, generator: torch.Generator
) -> torch.Tensor:
    """Real numbers, `low <= v < high`. few: the numbers that are taken for ties."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    random = normal if low is None or high is None else low + (high - low) * torch.sigmoid(normal)
    among = torch.tensor(few, dtype=torch.float64)[torch.randint(0, len(few), shape, generator=generator)]
    zero, ones = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    hot = zero
    if zero.dim():
        hot = zero.scatter(-1, torch.randint(0, max(1, shape[-1]), (*shape[:-1], min(1, shape[-1])), generator=generator), 1.0)
    ends = among.sign() if low is None or high is None else torch.where(normal > 0, low * ones, high * ones)
    equal = ones * (random.reshape(-1)[0] if random.numel() else 0.0)
    kinds = {"random": random, "few": among, "zero": zero, "one-hot": hot, "equal": equal, "ends": ends}
    chosen = kinds.get(kind, random)
    if kind == "rows":
        rows = torch.randint(0, len(kinds), (*shape[:1], *(1 for _ in shape[1:])), generator=generator)
        for number, each in enumerate(kinds.values()):
            chosen = torch.where(rows == number, each, chosen)
    if low is not None:
        chosen = chosen.clamp(min=low)
    return chosen if high is None else chosen.clamp(max=high - 1e-6 * (1.0 if low is None else high - low))


def mixed_whole(
    shape: tuple[int, ...], low: int, high: int, few: tuple[int, ...], kind: str, *, generator: torch.Generator
) -> torch.Tensor:
    """Whole numbers, `low <= v < high`, or among `few`."""
    random = torch.randint(low, high, shape, generator=generator)
    among = torch.tensor(few)[torch.randint(0, len(few), shape, generator=generator)]
    ends = torch.where(torch.rand(shape, generator=generator, dtype=torch.float64) < 0.5, low, high - 1)
    each = ((torch.randperm(random.numel(), generator=generator) % (high - low)) + low).reshape(shape)
    equal = torch.full(shape, int(torch.randint(low, high, (), generator=generator)))
    kinds = {"random": random, "few": among, "ends": ends, "each": each, "equal": equal}
    chosen = kinds.get(kind, random)
    if kind == "rows":
        rows = torch.randint(0, 4, (*shape[:1], *(1 for _ in shape[1:])), generator=generator)
        for number, numbers in enumerate((among, ends, each)):
            chosen = torch.where(rows == number, numbers, chosen)
    return chosen


def mixed_truth(shape: tuple[int, ...], kind: str, *, generator: torch.Generator) -> torch.Tensor:
    random = torch.rand(shape, generator=generator, dtype=torch.float64)
    hot = random == (random.amax(-1, keepdim=True) if random.numel() and random.dim() else random)
    rows = torch.randint(0, 3, (*shape[:1], *(1 for _ in shape[1:])), generator=generator)
    by_row = torch.where(rows == 0, random < 0.5, rows == 1)
    return {"true": random >= 0, "false": random < 0, "one-hot": hot}.get(kind, by_row).clone()
