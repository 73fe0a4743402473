"""Inputs at which programs part that agree on random ones: zeros, negatives, ties, all equal, one-hot, the ends of ranges.

The functions need torch alone, and no default dtype: a counterexample's script has their text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# What one input may be in a mixture: "rows" is some of each, along its first dim.
OF_REALS = ("rows", "few", "zero", "one-hot", "equal", "ends")
PEAKS = ("peak0", "peak1", "peak2", "peak3")
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
    random = torch.randn(shape, generator=generator, dtype=torch.float64)
    among = torch.tensor(few, dtype=torch.float64)
    start, size = None, 1.0
    if low is not None and high is not None:
        start, size = low, high - low
        random = low + size * torch.sigmoid(random)
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "zero": lambda: torch.zeros_like(random),
        "few": lambda: among[torch.randint(0, len(few), shape, generator=generator)],
        "random": lambda: random,
        "one-hot": lambda: (random == (random.amax(-1, keepdim=True) if shape and random.numel() else random)).to(random.dtype),
        "equal": lambda: torch.full_like(random, float(random.reshape(-1)[0]) if random.numel() else 0.0),
        "ends": lambda: (
            random.sign() if start is None else start + size * torch.randint(0, 2, shape, generator=generator).double()
        ),
    }
    chosen = kinds.get(kind, kinds["random"])()
    if kind == "rows":
        rows = (*shape[:-1], 1) if shape and torch.Size(shape[:-1]).numel() >= len(kinds) else shape
        count = torch.Size(rows).numel()
        places = torch.randperm(count, generator=generator) if count != 1 else torch.randint(0, 6, (1,), generator=generator)
        for place, make in enumerate(kinds.values()):
            chosen = torch.where(places.reshape(rows) % len(kinds) == place, make(), chosen)
    if kind.startswith("peak") and chosen.numel():  # one number is by far the largest: in the first quarter, the second, ...
        place = (2 * int(kind[4:]) + 1) * chosen.numel() // 8
        chosen = torch.where(torch.arange(chosen.numel()).reshape(shape) == place, 1 + 4 * chosen.abs().amax(), chosen)
    if low is not None:
        chosen = chosen.clamp(min=low)
    return chosen if high is None else chosen.clamp(max=high - 1e-6 * size)


def mixed_whole(
    shape: tuple[int, ...], low: int, high: int, few: tuple[int, ...], kind: str, *, generator: torch.Generator
) -> torch.Tensor:
    """Whole numbers, `low <= v < high`, or among `few`."""
    random = torch.randint(low, high, shape, generator=generator)
    among = torch.tensor(few)[torch.randint(0, len(few), shape, generator=generator)]
    ends = torch.where(torch.rand(shape, generator=generator, dtype=torch.float64) < 0.25, low, high - 1)
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
