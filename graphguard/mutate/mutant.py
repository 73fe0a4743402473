"""A changed program: drawn from a specimen, judged by execution and by the prover."""

from __future__ import annotations

import re
import signal
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType

from graphguard.graph.findings import Finding
from graphguard.graph.ir import Graph, Node, Source
from graphguard.graph.matching import Joint, join
from graphguard.graph.wellformed import require_wellformed
from graphguard.mutate.changed_lines import Place, Places
from graphguard.mutate.mutants import KINDS, ON_ONE_RANK, TOGETHER
from graphguard.mutate.rewrites import REWRITES
from graphguard.mutate.site import Change, Site
from graphguard.mutate.specimen import Specimen

_TRIES = 40  # to draw a change that can be made


@dataclass(frozen=True)
class Mutant:
    """One change, made on some ranks. `places` are the lines that a report should name."""

    kind: str
    words: str
    ranks: tuple[int, ...]
    joint: Joint
    places: frozenset[Place]

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}, on ranks {list(self.ranks)}, at {sorted(self.places)[:1]}"


@dataclass(frozen=True)
class Judged:
    """What execution and the prover say of a mutant.

    difference: how it differs from the sequential program, or None. gave_up: the prover was stopped. crash: what was raised
    on the way, by the prover or by what runs the programs, which counts as not proved.
    reason: why it is not proved. located: whether one of the first two lines named is the right one; None where nobody asked.
    """

    kind: str
    specimen: str
    words: str
    difference: str | None
    proved: bool
    gave_up: bool
    reason: str | None
    located: bool | None
    seconds: float
    crash: str | None = None

    @property
    def unsound(self) -> bool:
        return self.proved and self.difference is not None

    @property
    def incomplete(self) -> bool:
        return self.difference is None and not self.proved and not self.gave_up


# ---------------------------------------------------------------------- drawing
class DrawingError(Exception):
    """A change that could not be made, though it should have been possible."""

    def __init__(self, kind: str, words: str):
        super().__init__(words)
        self.kind = kind


class Breeder:
    """Draws changes of one specimen. The same seed gives the same changes."""

    def __init__(self, specimen: Specimen, changes: Mapping[str, Change], random: Random):
        self.specimen, self.changes, self.random = specimen, changes, random
        self.graphs = list(specimen.joint.graphs)
        self.named = [_by_name(graph) for graph in self.graphs]
        self.names = [{position: name for name, position in named.items()} for named in self.named]
        self.sites = {kind: found for kind, change in changes.items() if (found := list(self._sites(change)))}
        self.places = Places(specimen.sequential, self.graphs)
        self.drawn: set[tuple[str, str, tuple[int, ...], int]] = set()

    def draw(self) -> Mutant | None:
        """A change that was not drawn before; None if none is found."""
        for _ in range(_TRIES if self.sites else 0):
            kind = self.random.choice(list(self.sites))
            rank, position = self.random.choice(self.sites[kind])
            node = self.graphs[rank].nodes[position]
            try:
                mutant = self._made(kind, rank, position, self.random.random() < _alike(kind, node))
            except Exception as error:
                raise DrawingError(kind, f"{kind} at {node}: {_crash(error)}") from error
            if mutant is not None:
                return mutant
        return None

    def several(self, count: int) -> Iterator[Mutant]:
        """So many changes, or as many as are found."""
        for _ in range(count):
            mutant = self.draw()
            if mutant is None:
                return
            yield mutant

    def _sites(self, change: Change) -> Iterator[tuple[int, int]]:
        seen: set[object] = set()
        for rank in range(len(self.graphs)):
            for position in range(len(self.graphs[rank].nodes)):
                name = self.names[rank][position]
                if name not in seen and change(self._site(rank, position, 0)) is not None:
                    seen.add(name)
                    yield rank, position

    def _site(self, rank: int, position: int, seed: int) -> Site:
        following = (rank + 1) % len(self.graphs)
        at = self.named[following].get(self.names[rank][position])
        peer = self.graphs[following].nodes[at] if at is not None else None
        return Site(self.graphs[rank], position, self.specimen.mesh, Random(seed), peer)

    def _made(self, kind: str, rank: int, position: int, alike: bool) -> Mutant | None:
        seed, name = self.random.randrange(1 << 30), self.names[rank][position]
        if not alike:
            rank = self.random.choice([r for r, named in enumerate(self.named) if name in named])
        graphs, words, places, ranks = list(self.graphs), None, set[Place](), []
        for number in range(len(graphs)) if alike else [rank]:
            at = self.named[number].get(name)
            if at is None:
                continue
            site = self._site(number, at, seed)
            said = self.changes[kind](site)
            if said is None:
                continue
            words = said if words is None or number == rank else words
            graphs[number] = site.done()
            require_wellformed(graphs[number])
            places.update(place for node in site.concerned() for place in self.places.of(node))
            ranks.append(number)
        if words is None:
            return None
        key = (kind, words, tuple(ranks), position)
        if key in self.drawn:
            return None
        self.drawn.add(key)
        return Mutant(kind, words, tuple(ranks), join(graphs), frozenset(places))


def _alike(kind: str, node: Node) -> float:
    """How likely all ranks are changed, not one."""
    if kind in ON_ONE_RANK:
        return 0.0
    if kind in REWRITES and node.communicates:
        return 1.0
    if kind in TOGETHER or node.communicates:
        return 0.95
    return 0.65


def _by_name(graph: Graph) -> dict[object, int]:
    """Positions by what names an operation on all ranks: the operator, its line, and the how manyeth it is there."""
    counts: dict[object, int] = {}
    named: dict[object, int] = {}
    for position, node in enumerate(graph.nodes):
        kind = (node.op, node.source, node.backward)
        counts[kind] = counts.get(kind, 0) + 1
        named[*kind, counts[kind]] = position
    return named


# ---------------------------------------------------------------------- judging
def unmade(specimen: Specimen, error: DrawingError) -> Judged:
    """What comes of a change that could not be made."""
    return Judged(error.kind, specimen.name, error.kind, None, False, False, str(error), None, 0.0, str(error))


def judged(specimen: Specimen, mutant: Mutant, limit: float, locate: bool = True) -> Judged:
    """Both verdicts on a mutant. The prover is stopped after `limit` seconds."""
    begun = time.perf_counter()
    findings, gave_up, crash = mutant.joint.findings, False, None
    difference: str | None = "the ranks do not fit together" if findings else None
    try:
        if not findings:
            difference = specimen.difference(mutant.joint)
            begun = time.perf_counter()
            with _limited(limit):
                findings = specimen.findings(mutant.joint, executed=difference is not None, locate=locate)
            if findings and difference is None:
                difference = specimen.difference(mutant.joint, further=True)
    except _TooLong:
        gave_up = True
    except Exception as error:  # whatever it is, the other mutants can be judged
        crash = _crash(error)
    return Judged(
        mutant.kind,
        specimen.name,
        str(mutant),
        difference,
        not findings and not gave_up and crash is None,
        gave_up,
        _reason(findings[0]) if findings else crash,
        is_located(findings, mutant.places) if locate else None,
        time.perf_counter() - begun,
        crash,
    )


def _crash(error: Exception) -> str:
    """What was raised, and where."""
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    where = "" if last is None else f" ({Path(last.filename).name}:{last.lineno})"
    return f"{type(error).__name__}: {error}{where}"


def is_located(findings: Collection[Finding], places: Collection[Place]) -> bool:
    """Whether one of the first two lines named is one of the places. A line that a finding has beside its own, in the function
    that its own calls, or the other way round, tells of the same place, and is none by itself."""
    named: list[Place] = []
    inner: dict[Place, Place] = {}
    for finding in findings:
        for source in _sources(finding):
            here = finding.distributed
            if here is not None and _is_called(source, here) and here.place not in inner:
                inner[here.place] = source.place
            elif source.place not in named:
                named.append(source.place)
    return any(each in places or inner.get(each) in places for each in named[:2])


def _sources(finding: Finding) -> list[Source]:
    return [*finding.lines, *finding.sources]


def _is_called(source: Source, here: Source) -> bool:
    """Whether one of two lines leads to the other."""
    if source.place == here.place:
        return False
    return any(each.place == here.place for each in source.outwards()) or any(
        each.place == source.place for each in here.outwards()
    )


def _reason(finding: Finding) -> str:
    """The finding without names and numbers, so that like ones can be counted."""
    message = re.sub(r"^[\w.]+(: | has | = )", "", finding.message)
    message = re.sub(r"%?\d+(\.\d+)?(e-?\d+)?", "#", message)
    return f"{finding.kind}: {message[:150]}"


class _TooLong(BaseException):
    """Passes through whatever catches exceptions."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Stops what runs inside after a while. Only a main thread can be stopped; elsewhere the limit does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def mutants_of(specimen: Specimen, seed: str) -> Breeder:
    return Breeder(specimen, KINDS, Random(f"{seed}/{specimen.name}/mutants"))


def rewrites_of(specimen: Specimen, seed: str) -> Breeder:
    return Breeder(specimen, REWRITES, Random(f"{seed}/{specimen.name}/rewrites"))
