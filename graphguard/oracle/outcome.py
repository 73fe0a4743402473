"""What the trials say of one output: which relation explains it, or which element is wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from graphguard.engine.proof import Relation
from graphguard.graph.ir import Graph, Mesh
from graphguard.graph.limits import Stops
from graphguard.graph.placement import REPLICATE, Partial, Placements, has_partial, on_mesh
from graphguard.oracle.clean import Clean, Observed, are_shares, holds, padded, placed, reshaped, scattered, worst
from graphguard.oracle.difference import Element, Number
from graphguard.oracle.grid import Grid, cut, grid_of
from graphguard.oracle.limits import Limits
from graphguard.oracle.reference import Reference, Slack, is_real
from graphguard.oracle.reordered import reordered
from graphguard.oracle.replay import run
from graphguard.oracle.trial import Trial
from graphguard.relation.arrangement import Arrangement, Tile
from graphguard.relation.expectation import FULL, LOCAL, Expectation

_MOST_CANDIDATES = 512
PATIENCE = 1e3  # with rounding, where a proof is checked: an unsound one is off by far more


@dataclass(frozen=True)
class Evidence:
    """kind: of the finding that suits, None if the numbers are explained. clean: the relation that they show."""

    kind: str | None = None
    clean: Clean | None = None


class Output:
    """One output of all trials in which something is claimed of it."""

    def __init__(
        self,
        path: str,
        dtype: str,
        mesh: Mesh,
        trials: Sequence[Trial],
        no_parts: str | None = None,
        stops: Stops | None = None,
    ):
        self.path, self.dtype, self.mesh = path, dtype, mesh
        self.stops = Stops(Limits()) if stops is None else stops
        self.no_parts = no_parts  # the kind of finding, where a sum over ranks is known to be none of true parts
        self.trials = [trial for trial in trials if path in trial.references and _claims(trial.references[path])]
        self.ranks = tuple(trials[0].values(path))
        self.grid = grid_of(mesh, self.ranks)

    @property
    def claimed(self) -> bool:
        return bool(self.trials)

    def samples(self) -> list[Observed]:
        return [self.sample(trial) for trial in self.trials]

    def sample(self, trial: Trial) -> Observed:
        return Observed(trial.references[self.path], list(trial.values(self.path).values()), trial.doubts(self.path))

    # ------------------------------------------------------------------ verdicts
    def free(self) -> Evidence:
        """Any clean relation will do."""
        grid, samples = self._ranks_as_grid(), self.samples()
        stops = Stops(self.stops.limits)
        clean, shares = self._clean(samples, stops)
        if clean is not None:
            return Evidence(clean=clean)
        stops.over("placements", grid.count(samples[0].reference.whole.shape))
        if stops.reached():
            self.stops.note_all(stops)
            return Evidence()  # one that was not tried may explain the numbers
        return Evidence(self.no_parts or ("scaled-copies" if shares else "unexplained-output"))

    def _clean(self, samples: Sequence[Observed], stops: Stops) -> tuple[Clean | None, bool]:
        """A clean relation that holds in every trial, and whether there were such as hold for shares only."""
        grid, sums, most = self._ranks_as_grid(), self.no_parts is None, self.stops.limits.placements
        clean, shares = placed(self.path, grid, samples, self.dtype, most, sums)
        clean = clean or scattered(self.path, grid, samples, stops, sums) or reshaped(self.path, grid, samples, most)
        return clean or padded(self.path, grid, samples), shares

    def expected(self, expectation: Expectation) -> Evidence:
        """The stated relation must hold."""
        if self.grid is None:
            return self.free()
        if expectation.graphs is not None:
            agrees = all(self._follows(trial, expectation.graphs) for trial in self.trials)
        else:
            placements = self.on_grid(expectation)
            samples = self.samples()
            agrees = holds(self.grid, placements, samples)
            if agrees and has_partial(placements) and self.no_parts is not None:
                return Evidence(self.no_parts)
            if agrees and are_shares(self.grid, placements, samples, stated=True):
                return Evidence("scaled-copies")
        if agrees:
            return Evidence(clean=Clean(f"{self.path} is as stated: {expectation.text}"))
        free = self.free()
        return Evidence("unexpected-relation" if free.clean else free.kind or "unexplained-output", free.clean)

    def reordered(self) -> str | None:
        """Who holds which slices, where all are there in another order."""
        return reordered(self.path, self.ranks, self.samples())

    def averaged_over(self) -> tuple[str, ...]:
        """The axes over which the mean of what the ranks hold is the sequential value; none if there are no such."""
        grid, samples = self.grid, self.samples()
        if grid is None or not samples[0].reference.whole.is_floating_point():
            return ()
        chosen = itertools.product(*((False, True) if size > 1 else (False,) for size in grid.mesh.shape))
        for axes in sorted(chosen, key=sum):
            if any(axes) and holds(grid, tuple(Partial("avg") if each else REPLICATE for each in axes), samples):
                return tuple(name for name, each in zip(grid.mesh.names, axes, strict=True) if each)
        return ()

    def contradicting(self, proved: Relation, expectation: Expectation | None) -> Trial | None:
        """The first trial whose numbers do not show a proved relation."""
        return next((trial for trial in self.trials if self._contradicts(trial, proved, expectation)), None)

    def _contradicts(self, trial: Trial, proved: Relation, expectation: Expectation | None) -> bool:
        if proved.placed is not None:
            return worst(self._ranks_as_grid(), proved.placed, self.sample(trial)) > PATIENCE
        if proved.arrangement is not None:
            return not self._is_arranged(trial, proved.arrangement)
        if expectation is not None and expectation.graphs is not None:
            return not self._follows(trial, expectation.graphs, PATIENCE)
        return False

    def on_grid(self, expectation: Expectation) -> Placements:
        assert self.grid is not None and expectation.placements is not None
        return on_mesh(expectation.placements, self.grid.mesh)

    def _ranks_as_grid(self) -> Grid:
        return self.grid or Grid(Mesh.of({"rank": len(self.ranks)}), self.ranks)

    def _is_arranged(self, trial: Trial, arrangement: Arrangement) -> bool:
        for rank, tensor in trial.values(self.path).items():
            slack = trial.doubt(self.path, rank)
            for tile in arrangement.tiles[rank]:
                if tuple(tensor.shape) != tile.shape:
                    return False
                local = trial.references[self.path].at(partial(_cutout, tile=tile))
                room = _kept(slack, tile) if isinstance(slack, torch.Tensor) else slack
                if bool((local.excess(_kept(tensor, tile), room) > PATIENCE).any()):
                    return False
        return True

    def _follows(self, trial: Trial, graphs: Sequence[Graph | None], patience: float = 1.0) -> bool:
        for rank, tensor in trial.values(self.path).items():
            local = local_reference(trial.references[self.path], graphs[rank])
            slack = trial.doubt(self.path, rank)
            if tensor.shape != local.whole.shape or bool((local.excess(tensor, slack) > patience).any()):
                return False
        return True

    # ------------------------------------------------------------------ the element that is wrong
    def reduction(self, expectation: Expectation | None) -> tuple[Grid, Placements] | None:
        """Over which ranks numbers are reduced before they are compared with what is expected."""
        if expectation is None or expectation.placements is None or self.grid is None:
            return None
        placements = self.on_grid(expectation)
        return (self.grid, placements) if has_partial(placements) else None

    def difference(self, expectation: Expectation | None) -> tuple[Trial, Element, float]:
        """One number that differs, where it does so most, and how far from it still counts as equal."""
        trials = self.trials
        if expectation is not None and expectation.graphs is not None:
            found = [self._against_code(trial, expectation.graphs) for trial in trials]
        elif expectation is not None and self.grid is not None:
            placements = self.on_grid(expectation)
            found = [self._against(trial, self.grid, placements) for trial in trials]
        else:
            trials = [*self.trials[self._first_unexplained() :], *self.trials]
            found = [self._nearest(trial) for trial in trials]
        for trial, difference in zip(trials, found, strict=True):
            if difference is not None:
                return trial, *difference
        return self.trials[0], *self._misshapen(self.trials[0], expectation)

    def _first_unexplained(self) -> int:
        """The first trial whose numbers are not explained by what explains those before it."""
        samples = self.samples()
        counts = range(1, len(samples) + 1)
        return next((n - 1 for n in counts if self._clean(samples[:n], Stops(self.stops.limits))[0] is None), 0)

    def _nearest(self, trial: Trial) -> tuple[Element, float] | None:
        """Against the placements without sums that fit best; None if one of them holds in this trial."""
        grid = self._ranks_as_grid()
        sample = self.sample(trial)
        best: tuple[int, Placements] | None = None
        for placements in grid.candidates(sample.reference.whole.shape, sums=False)[:_MOST_CANDIDATES]:
            wrong = _wrong(grid, placements, sample)
            if wrong == 0:
                return None
            if wrong is not None and (best is None or wrong < best[0]):
                best = wrong, placements
        return None if best is None else self._against(trial, grid, best[1])

    def _against(self, trial: Trial, grid: Grid, placements: Placements) -> tuple[Element, float] | None:
        sample = self.sample(trial)
        tensors = grid.reduced(sample.tensors, placements)
        if tensors is None:
            return None
        reduced = next((p.reduce for p in placements if isinstance(p, Partial)), None)
        slack = sample.slack(grid, placements)
        for lane, tensor in enumerate(tensors):
            spans = grid.spans(sample.reference.whole.shape, placements, lane)
            part = sample.reference.at(lambda t, spans=spans: cut(t, spans))  # type: ignore[misc]
            found = _largest(part, tensor, slack[lane])
            if found is not None:
                index, allowed = found
                within = tuple(place + low for place, (low, _) in zip(index, spans, strict=True))
                numbers = _number(part.whole[index]), _number(tensor[index])
                return Element(self.path, self.ranks[lane], index, *numbers, within, reduced), allowed
        return None

    def _against_code(self, trial: Trial, graphs: Sequence[Graph | None]) -> tuple[Element, float] | None:
        for rank, tensor in trial.values(self.path).items():
            local = local_reference(trial.references[self.path], graphs[rank])
            found = _largest(local, tensor, trial.doubt(self.path, rank))
            if found is not None:
                index, allowed = found
                return Element(self.path, rank, index, _number(local.whole[index]), _number(tensor[index])), allowed
        return None

    def _misshapen(self, trial: Trial, expectation: Expectation | None) -> tuple[Element, float]:
        """Where the shapes do not fit: a number that is another one, else one that a rank should have or should not."""
        others = []
        for lane, (rank, tensor) in enumerate(trial.values(self.path).items()):
            part, corner = self._wanted(trial, expectation, lane, rank)
            for index in _places(part.whole.shape, tensor.shape):
                wanted, held = _at(part.whole, index), _at(tensor, index)
                allowed = float(part.tolerance[index]) if _is_inside(part.whole, index) else 0.0
                allowed += _of(trial.doubt(self.path, rank), index)
                if abs(wanted - held) <= allowed or (_is_inside(part.claimed, index) and not bool(part.claimed[index])):
                    continue
                apart = corner is None or len(corner) != len(index)
                within = None if apart else tuple(a + b for a, b in zip(index, corner or (), strict=True))
                both = _is_inside(part.whole, index) and _is_inside(tensor, index)
                found = Element(self.path, rank, index, wanted, held, within, shape=None if both else tuple(tensor.shape))
                if both:
                    return found, allowed
                others.append((found, allowed))
                break
        assert others, f"{self.path} differs, but no element of it does"
        return others[0]

    def _wanted(
        self, trial: Trial, expectation: Expectation | None, lane: int, rank: int
    ) -> tuple[Reference, tuple[int, ...] | None]:
        """What a rank should hold, the whole if nothing is stated, and where in the output that begins."""
        whole = trial.references[self.path]
        if expectation is not None and expectation.graphs is not None:
            return local_reference(whole, expectation.graphs[rank]), None
        if expectation is None or self.grid is None:
            return whole, (0,) * whole.whole.dim()
        spans = self.grid.spans(whole.whole.shape, self.on_grid(expectation), lane)
        return whole.at(partial(cut, spans=spans)), tuple(low for low, _ in spans)


def _places(wanted: Sequence[int], held: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All that one of two tensors has; of another number of dims, those of the wanted one, unless it has none."""
    if len(wanted) == len(held):
        sizes = [max(a, b) for a, b in zip(wanted, held, strict=True)]
    else:
        sizes = list(wanted if math.prod(wanted) else held)
    return itertools.product(*map(range, sizes))


def _cutout(whole: torch.Tensor, tile: Tile) -> torch.Tensor:
    found = cut(whole.reshape(-1) if tile.flat else whole, tile.spans).permute(tile.order)
    return found.reshape(tile.shape) if tile.within is None else found


def _kept(tensor: torch.Tensor, tile: Tile) -> torch.Tensor:
    """What a rank holds, without other tiles and padding."""
    return tensor if tile.within is None else cut(tensor.reshape(-1) if tile.flat else tensor, tile.within)


def _claims(reference: Reference) -> bool:
    return reference.whole.numel() == 0 or bool(reference.claimed.any())


def local_reference(reference: Reference, graph: Graph | None) -> Reference:
    """What code makes of the sequential output for a rank."""
    assert graph is not None
    whole = reference.whole
    if not is_real(whole):
        local = _applied(graph, whole)
        every = torch.ones(local.shape, dtype=torch.bool)
        claimed = every if bool(reference.claimed.all()) else _applied(graph, reference.claimed.to(whole.dtype)) != 0
        return Reference(local, torch.full(local.shape, 0.5, dtype=torch.float64), claimed)
    marked = torch.where(reference.claimed, whole, math.nan)
    local = _applied(graph, marked)
    tolerance = _applied(graph, reference.tolerance.to(whole.dtype)).abs() + float(reference.tolerance.min())
    return Reference(local, tolerance, torch.isfinite(local.abs()), reference.lenient)


def _applied(graph: Graph, full: torch.Tensor) -> torch.Tensor:
    local = run(graph, {FULL: full}, wide=True).outputs()[LOCAL]
    assert local is not None
    return local


def _wrong(grid: Grid, placements: Placements, sample: Observed) -> int | None:
    """How many elements are not as placements say; None if the shapes are not."""
    count, slack = 0, sample.slack(grid, placements)
    for lane, tensor in enumerate(sample.tensors):
        spans = grid.spans(sample.reference.whole.shape, placements, lane)
        if tuple(tensor.shape) != tuple(high - low for low, high in spans):
            return None
        part = sample.reference.at(lambda t, spans=spans: cut(t, spans))  # type: ignore[misc]
        count += int((part.excess(tensor, slack[lane]) > 1).sum())
    return count


def _largest(part: Reference, tensor: torch.Tensor, slack: Slack) -> tuple[tuple[int, ...], float] | None:
    """Where a tensor is farthest from a reference, and the tolerance there."""
    if tensor.shape != part.whole.shape or not tensor.numel():
        return None
    excess = part.excess(tensor, slack)
    if not bool((excess > 1).any()):
        return None
    known = torch.where(torch.isfinite(excess), excess, 0.0)  # a number says more than nan
    chosen = known if bool((known > 1).any()) else excess
    index = tuple(int(i) for i in torch.unravel_index(chosen.argmax(), excess.shape))
    return index, float(part.tolerance[index])


def _of(slack: Slack, index: tuple[int, ...]) -> float:
    """What is allowed for at one place."""
    if isinstance(slack, torch.Tensor):
        return float(slack[index]) if _is_inside(slack, index) else 0.0
    return float(slack)


def _number(scalar: torch.Tensor) -> Number:
    number: Number = scalar.item()
    return number


def _at(tensor: torch.Tensor, index: tuple[int, ...]) -> Number:
    return _number(tensor[index]) if _is_inside(tensor, index) else math.nan


def _is_inside(tensor: torch.Tensor, index: tuple[int, ...]) -> bool:
    return len(index) == tensor.dim() and all(place < size for place, size in zip(index, tensor.shape, strict=True))
