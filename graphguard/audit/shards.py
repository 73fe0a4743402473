"""A sample of the lemma audit with random sizes and random numbers, and the ways in which its inputs are cut into shards."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphguard.audit.samples import Sample

Tensors = dict[str, torch.Tensor]
Dims = dict[str, int]  # the dim along which each input is cut
MOST_CUTS = 10
_SIZES = (2, 3, 4, 5, 6, 8)
_ATTEMPTS = 3


class Window(NamedTuple):
    """What each lane has of a dim: so many elements, from these positions on."""

    starts: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Cut:
    """Some inputs in shards, one per lane. `tiles` if the lanes' parts make up the whole, in order."""

    lanes: int
    dims: Dims
    windows: Mapping[str, Window]
    tiles: bool

    def local(self, full: Tensors, lane: int) -> Tensors:
        given = {}
        for name, tensor in full.items():
            if name in self.dims:
                starts, size = self.windows[name]
                tensor = tensor.narrow(self.dims[name], starts[lane], size)
            given[name] = tensor.clone(memory_format=torch.contiguous_format)
        return given

    def __str__(self) -> str:
        how = "in tiles" if self.tiles else "in windows"
        return f"{', '.join(f'{name} along dim {dim}' for name, dim in self.dims.items())} {how} on {self.lanes} lanes"


class Example:
    """A sample with certain sizes. The first of a run has the sizes that the sample states, the others have random ones."""

    def __init__(self, sample: Sample, seed: int, number: int):
        self.dice = random.Random(f"{seed} {sample.name} {number}")
        self.stated, self.sample = sample, self._resized(sample) if number else sample
        self.full = self.tensors()
        self.cuts = list(self._cuts(number))

    def restated(self) -> None:
        """Take the sizes that the sample states, as others did not do."""
        self.sample = self.stated
        self.full = self.tensors()
        self.cuts = list(self._cuts(0))

    def tensors(self) -> Tensors:
        """Random inputs; floats in 64 bits."""
        generator = torch.Generator().manual_seed(self.dice.randrange(1 << 40))
        return {name: spec.tensor(generator) for name, spec in self.sample.inputs.items()}

    def _resized(self, sample: Sample) -> Sample:
        if sample.only is not None:  # sizes that a kernel does not look at are not played with
            return sample
        sizes = sorted({size for spec in sample.inputs.values() for size in spec.shape if size > 1})
        for _ in range(_ATTEMPTS):
            other = sample.resized({size: self.dice.choice(_SIZES) for size in sizes})
            self.sample = other
            given = self.tensors()
            if self._runs(given, "meta") and self._runs(given):
                return other
        return sample

    def _runs(self, given: Tensors, device: str = "cpu") -> bool:
        specs = self.sample.inputs
        try:
            with torch.device(device), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.sample.program(**{name: tensor.to(device, specs[name].dtype) for name, tensor in given.items()})
        except Exception:  # what a kernel raises for shapes that it does not take, nobody knows
            return False
        return True

    # ------------------------------------------------------------------ shards
    def _cuts(self, number: int) -> Iterator[Cut]:
        """One way to cut for each choice of dims. Tiles and other windows take turns."""
        found = 0
        for turn, dims in enumerate(self._dims()):
            lanes = self.dice.choice((2, 3))
            ways = [self._tiles(dims, lanes), self._tiles(dims, 5 - lanes), self._windows(dims, lanes)]
            if (turn + number) % 3 == 2:
                ways = ways[::-1]
            usable = (cut for cut in ways if cut is not None and self._takes(cut))
            cut = next(usable, None)
            if cut is not None:
                yield cut
                found += 1
            if found == MOST_CUTS:
                return

    def _takes(self, cut: Cut) -> bool:
        """Whether the program accepts the shards. Meta kernels look at shapes where others do not; but at no positions."""
        lanes = [cut.local(self.full, lane) for lane in range(cut.lanes)]
        has_positions = any(spec.dtype in (torch.int64, torch.int32) for spec in self.sample.inputs.values())
        return self._runs(lanes[0], "meta") and (not has_positions or all(map(self._runs, lanes)))

    def _dims(self) -> list[Dims]:
        """Each input along each dim, alone and together with all others that have the dim, counted from either end."""
        inputs = self.sample.inputs
        rank = max(len(spec.shape) for spec in inputs.values())
        left: list[Dims] = [{n: d for n, s in inputs.items() if len(s.shape) > d} for d in range(rank)]
        right: list[Dims] = [{n: len(s.shape) - 1 - d for n, s in inputs.items() if len(s.shape) > d} for d in range(rank)]
        alone: list[Dims] = [{name: dim} for name, spec in inputs.items() for dim in range(len(spec.shape))]
        wanted = [*left, *right, *alone] if self.sample.only is None else [left[dim] for dim in self.sample.only]
        result: list[Dims] = []
        for each in wanted:
            dims = {name: dim for name, dim in each.items() if inputs[name].shape[dim] > 1}
            if dims and dims not in result:
                result.append(dims)
        return result

    def _tiles(self, dims: Dims, lanes: int) -> Cut | None:
        windows = {}
        for name, dim in dims.items():
            size, rest = divmod(self.sample.inputs[name].shape[dim], lanes)
            if not rest:
                windows[name] = Window(tuple(lane * size for lane in range(lanes)), size)
        return Cut(lanes, {name: dims[name] for name in windows}, windows, True) if windows else None

    def _windows(self, dims: Dims, lanes: int) -> Cut:
        """Parts of random size at random places, the same ones for dims of one size."""
        of_size: dict[int, Window] = {}
        for name, dim in dims.items():
            size = self.sample.inputs[name].shape[dim]
            if size not in of_size:
                part = self.dice.randint(1, size)
                of_size[size] = Window(tuple(self.dice.randint(0, size - part) for _ in range(lanes)), part)
        return Cut(lanes, dims, {n: of_size[self.sample.inputs[n].shape[d]] for n, d in dims.items()}, False)
