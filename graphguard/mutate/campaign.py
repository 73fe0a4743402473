"""Many mutants and rewrites of many checks: `python -m graphguard.mutate.campaign`, from the root of the repository.

The checks take turns, in an order that the seed decides, until there are enough. Cheap checks get more in each turn.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from graphguard.api import verify
from graphguard.errors import GraphGuardError, InternalError, ReadsValuesError
from graphguard.mutate import tally
from graphguard.mutate.mutant import Breeder, DrawingError, Judged, judged, mutants_of, rewrites_of, unmade
from graphguard.mutate.mutants import KINDS
from graphguard.mutate.page import page
from graphguard.mutate.path_specimen import path_specimens
from graphguard.mutate.processes import Begin, Died, in_processes
from graphguard.mutate.rewrites import REWRITES
from graphguard.mutate.specimen import Specimen, specimen
from graphguard.pipeline import Job, collecting

LIMIT = 10.0  # seconds for one proof
_OPERATIONS = 4000  # that are proved in one turn of a check, about


@dataclass(frozen=True)
class Turn:
    """What came of one turn of a check. failure: why there are none of it, where that is an error of ours."""

    check: str
    mutants: Sequence[Judged] = ()
    rewrites: Sequence[Judged] = ()
    failure: str | None = None


@dataclass
class Herd:
    """What is drawn from one check, turn by turn. begin: told of each change before it is judged."""

    specimen: Specimen
    seed: int
    begin: Begin = lambda words: None
    mutants: Breeder = field(init=False)
    rewrites: Breeder = field(init=False)
    turns: int = 0

    def __post_init__(self) -> None:
        self.mutants, self.rewrites = mutants_of(self.specimen, str(self.seed)), rewrites_of(self.specimen, str(self.seed))

    @property
    def quota(self) -> int:
        """Mutants in one turn."""
        return 1 + _OPERATIONS // (20 + self.specimen.operations)

    def turn(self, plan: Plan) -> Turn:
        self.turns += 1
        share = plan.rewrites / max(1, plan.mutants)
        before, after = (int(turns * self.quota * share) for turns in (self.turns - 1, self.turns))
        return Turn(self.specimen.name, *self.some(self.quota, after - before, plan.limit, plan.locate_every))

    def some(
        self, mutants: int, rewrites: int, limit: float = LIMIT, locate_every: int = 1
    ) -> tuple[list[Judged], list[Judged]]:
        return (
            list(self._outcomes(self.mutants, mutants, limit, locate_every)),
            list(self._outcomes(self.rewrites, rewrites, limit, 1)),
        )

    def _outcomes(self, breeder: Breeder, count: int, limit: float, locate_every: int) -> Iterator[Judged]:
        for number in range(self.turns, self.turns + count):
            try:
                mutant = breeder.draw()
            except DrawingError as error:
                yield unmade(self.specimen, error)
                continue
            if mutant is None:
                return
            self.begin(f"{self.specimen.name}: {mutant}")
            yield judged(self.specimen, mutant, limit, number % locate_every == 0)


@dataclass(frozen=True)
class Plan:
    """What one process does."""

    mutants: int
    rewrites: int
    seed: int
    limit: float
    until: float  # when it stops in any case
    locate_every: int = 1  # mutants, one is located: that takes longer than to catch it
    paths: int = 3  # of a check whose programs read values


@dataclass
class Result:
    """failures: what went wrong, and not with a single mutant."""

    mutants: list[Judged] = field(default_factory=list)
    rewrites: list[Judged] = field(default_factory=list)
    checks: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """1 if something wrong was verified, 2 if something was not judged."""
        outcomes = [*self.mutants, *self.rewrites]
        return 1 if tally.unsound(outcomes) else 2 if self.failures or tally.crashes(outcomes) else 0


def turns(cases: Sequence[Any], plan: Plan, begin: Begin) -> Iterator[Turn]:
    """Turns of all cases, until there are enough mutants and rewrites, or nothing new is found."""
    mutants = rewrites = 0
    herds: dict[str, list[Herd]] = {}
    left = list(cases)
    found = True
    while found:
        found = False
        for case in list(left):
            if (mutants >= plan.mutants and rewrites >= plan.rewrites) or time.time() >= plan.until:
                return
            begin(case.name)
            try:
                if case.name not in herds:
                    found_here = specimens(case.name, job_of(case), plan.paths)
                    herds[case.name] = [Herd(each, plan.seed, begin) for each in found_here]
                herds[case.name].append(herd := herds[case.name].pop(0))  # its paths take turns, too
                turn = herd.turn(plan)
            except GraphGuardError as error:
                print(f"left out: {error}", flush=True)
                left.remove(case)
                if isinstance(error, InternalError):
                    yield Turn(case.name, failure=str(error))
                continue
            except Exception as error:  # the other checks can be changed
                left.remove(case)
                yield Turn(case.name, failure=f"{case.name}: {type(error).__name__}: {error}")
                continue
            mutants, rewrites = mutants + len(turn.mutants), rewrites + len(turn.rewrites)
            found = found or bool(turn.mutants or turn.rewrites)
            yield turn


def gathered(found: Iterable[Turn | Died], keep: Path | None = None) -> Result:
    """All turns together; each is told when it is there. keep: a file for what there is."""
    result, begun, checks = Result(), time.time(), set[str]()
    for turn in found:
        failure = turn.words if isinstance(turn, Died) else turn.failure
        if failure is not None:
            result.failures.append(failure)
            print(f"FAILURE {failure}", flush=True)
            continue
        assert isinstance(turn, Turn)
        checks.add(turn.check)
        result.mutants += turn.mutants
        result.rewrites += turn.rewrites
        result.checks = len(checks)
        _tell(result, turn, begun)
        if keep is not None:
            keep.write_bytes(pickle.dumps(result))
    return result


def _tell(result: Result, turn: Turn, begun: float) -> None:
    unsound = len(tally.unsound([*result.mutants, *result.rewrites]))
    counts = f"{len(result.mutants)} mutants and {len(result.rewrites)} rewrites of {result.checks} checks, {unsound} unsound"
    print(f"{time.time() - begun:6.0f} s: {counts}; {turn.check}", flush=True)
    new = [*turn.mutants, *turn.rewrites]
    for word, lines in (("UNSOUND", tally.unsound(new)), ("CRASH", tally.crashes(new))):
        for line in lines:
            print(f"{word} {line}", flush=True)


def specimens(name: str, job: Job, paths: int) -> list[Specimen]:
    """The check; or, of programs that read values, some of its paths."""
    try:
        return [specimen(name, job)]
    except ReadsValuesError:
        return list(path_specimens(name, job, paths))


# ---------------------------------------------------------------------- the proof cases
def families_below(folder: str) -> dict[str, list[Any]]:
    """The proof cases of each file."""
    path = Path(folder).resolve()
    sys.path.insert(0, str(path.parent))
    files = sorted(path.glob("*.py"))
    return {file.stem: list(getattr(importlib.import_module(f"{path.name}.{file.stem}"), "CASES", ())) for file in files}


def cases_below(folder: str, most_ranks: int, only: str, seed: int) -> list[Any]:
    """The proof cases that should verify, in an order that the seed decides."""
    cases = [
        case
        for family in families_below(folder).values()
        for case in family
        if case.expect == "verified" and prod(case.mesh.values()) <= most_ranks and only in case.name
    ]
    Random(seed).shuffle(cases)
    return cases


def job_of(case: Any) -> Job:
    with collecting() as jobs:
        verify(case.sequential, case.distributed, **case.options)
    return jobs[0]


# ---------------------------------------------------------------------- the command
def as_report(mutants: Sequence[Judged], rewrites: Sequence[Judged]) -> str:
    """The tables, as text."""
    parts = [tally.as_text(tally.MUTANTS, [tally.mutant_cells(row) for row in tally.rows(mutants, KINDS)])]
    if rewrites:
        parts.append(tally.as_text(tally.REWRITES, [tally.rewrite_cells(row) for row in tally.rows(rewrites, REWRITES)]))
    parts += [f"UNSOUND {line}" for line in tally.unsound([*mutants, *rewrites])]
    parts += [f"CRASH {line}; please report it" for line in tally.crashes([*mutants, *rewrites])]
    why = tally.reasons([*mutants, *rewrites])
    if why:
        parts.append("\n".join(["equal, but unproven:", *(f"  {count} times: {reason}" for count, reason, _ in why)]))
    return "\n\n".join(parts)


def run(cases: Sequence[Any], plan: Plan, jobs: int = 1, keep: Path | None = None) -> Result:
    """Each of several processes has its own part of the cases, and does what is planned."""
    if jobs == 1:
        return gathered(turns(cases, plan, lambda words: None), keep)

    def part(number: int, begin: Begin) -> Iterator[Turn]:
        import torch

        torch.set_num_threads(1)
        return turns(cases[number::jobs], plan, begin)

    return gathered(in_processes(part, jobs), keep)


def main(arguments: Iterable[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _options(given)
    begun = time.time()
    plan = Plan(
        -(-options.mutants // options.jobs),
        -(-options.rewrites // options.jobs),
        options.seed,
        options.limit,
        begun + 60 * options.minutes,
        options.locate_every,
    )
    cases = cases_below(options.cases, options.ranks, options.only, options.seed)
    result = run(cases, plan, options.jobs, options.keep)
    if not result.mutants:
        print(f"error: no case below {options.cases} could be mutated", file=sys.stderr)
        return 2
    print(as_report(result.mutants, result.rewrites))
    for line in result.failures:
        print(f"FAILURE {line}; please report it")
    if options.write:
        command = f"python -m graphguard.mutate.campaign {' '.join(given)}"
        seconds = time.time() - begun
        families = {case.name: family for family, cases in families_below(options.cases).items() for case in cases}
        text = page(result.mutants, result.rewrites, command, seconds, families, options.mutants)
        Path(options.write).write_text(text, encoding="utf-8")
    return result.exit_code


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m graphguard.mutate.campaign", description="Many mutants of many checks.")
    parser.add_argument("--mutants", type=int, default=20000)
    parser.add_argument("--rewrites", type=int, default=2000)
    parser.add_argument(
        "--locate-every", type=int, default=1, choices=range(1, 101), metavar="N", help="mutants, one is located"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, choices=range(1, 257), metavar="N", help="processes")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one proof")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="stop after so long, with what there is")
    parser.add_argument("--ranks", type=int, default=4, help="leave out cases with more ranks")
    parser.add_argument("--cases", default="tests/cases", help="folder of proof cases")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--write", help="page to write, for example docs/campaign.md")
    parser.add_argument("--keep", type=Path, help="file that keeps all outcomes, as a pickle")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
