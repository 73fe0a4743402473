"""Many mutants and rewrites of many checks: `python -m graphguard.mutate.campaign`, from the root of the repository.

The checks take turns, in an order that the seed decides, until there are enough mutants. Cheap checks get more in each turn.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from graphguard.errors import GraphGuardError
from graphguard.mutate import table
from graphguard.mutate.mutant import Breeder, Outcome, judged, mutants_of, rewrites_of
from graphguard.mutate.mutants import KINDS
from graphguard.mutate.page import page
from graphguard.mutate.rewrites import REWRITES
from graphguard.mutate.specimen import Specimen, specimen

if TYPE_CHECKING:
    from graphguard.api import Job

LIMIT = 10.0  # seconds for one proof
_OPERATIONS = 4000  # that are proved in one turn of a check, about
Outcomes = tuple[list[Outcome], list[Outcome]]  # of mutants and of rewrites


@dataclass
class Herd:
    """What is drawn from one check, turn by turn."""

    specimen: Specimen
    seed: int
    mutants: Breeder = field(init=False)
    rewrites: Breeder = field(init=False)
    turns: int = 0

    def __post_init__(self) -> None:
        self.mutants, self.rewrites = mutants_of(self.specimen, str(self.seed)), rewrites_of(self.specimen, str(self.seed))

    @property
    def quota(self) -> int:
        """Mutants in one turn."""
        return 1 + _OPERATIONS // (20 + self.specimen.operations)

    def turn(self, plan: Plan) -> Outcomes:
        self.turns += 1
        share = plan.rewrites / max(1, plan.mutants)
        before, after = (int(turns * self.quota * share) for turns in (self.turns - 1, self.turns))
        return self.some(self.quota, after - before, plan.limit, plan.locate_every)

    def some(self, mutants: int, rewrites: int, limit: float = LIMIT, locate_every: int = 1) -> Outcomes:
        drawn = list(enumerate(self.mutants.several(mutants), self.turns))
        return (
            [judged(self.specimen, mutant, limit, number % locate_every == 0) for number, mutant in drawn],
            [judged(self.specimen, rewrite, limit) for rewrite in self.rewrites.several(rewrites)],
        )


@dataclass(frozen=True)
class Plan:
    """What one process does."""

    mutants: int
    rewrites: int
    seed: int
    limit: float
    until: float  # when it stops in any case
    keep: Path | None = None  # where its outcomes are kept on the way
    locate_every: int = 1  # mutants, one is located: that takes longer than to catch it


@dataclass
class Result:
    mutants: list[Outcome] = field(default_factory=list)
    rewrites: list[Outcome] = field(default_factory=list)
    checks: int = 0


def run(cases: Sequence[Any], plan: Plan) -> Result:
    """Turns of all cases, until there are enough mutants or nothing new is found."""
    result, begun = Result(), time.time()
    herds: dict[str, Herd | None] = {}
    found = True
    while found and len(result.mutants) < plan.mutants and time.time() < plan.until:
        found = False
        for case in cases:
            if len(result.mutants) >= plan.mutants or time.time() >= plan.until:
                break
            if case.name not in herds:
                herds[case.name] = _herd(case, plan.seed)
                result.checks += herds[case.name] is not None
            herd = herds[case.name]
            if herd is None:
                continue
            mutants, rewrites = herd.turn(plan)
            found = found or bool(mutants)
            result.mutants += mutants
            result.rewrites += rewrites
            _tell(result, [*mutants, *rewrites], herd, begun)
            if plan.keep is not None:
                plan.keep.write_bytes(pickle.dumps(result))
    return result


def _tell(result: Result, new: Sequence[Outcome], herd: Herd, begun: float) -> None:
    unsound = len(table.unsound([*result.mutants, *result.rewrites]))
    counts = f"{len(result.mutants)} mutants and {len(result.rewrites)} rewrites of {result.checks} checks, {unsound} unsound"
    print(f"{time.time() - begun:6.0f} s: {counts}; {herd.specimen.name}", flush=True)
    for word, lines in (("UNSOUND", table.unsound(new)), ("CRASH", table.crashes(new))):
        for line in lines:
            print(f"{word} {line}", flush=True)


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


def _herd(case: Any, seed: int) -> Herd | None:
    try:
        return Herd(specimen(case.name, job_of(case)), seed)
    except GraphGuardError as error:
        print(f"left out: {error}", flush=True)
        return None


def job_of(case: Any) -> Job:
    import graphguard as gg
    from graphguard.api import collecting

    with collecting() as jobs:
        gg.verify(case.sequential, case.distributed, **case.options)
    return jobs[0]


# ---------------------------------------------------------------------- the command
def as_report(mutants: Sequence[Outcome], rewrites: Sequence[Outcome]) -> str:
    """The tables, as text."""
    parts = [table.as_text(table.MUTANTS, [table.mutant_cells(row) for row in table.rows(mutants, KINDS)])]
    if rewrites:
        parts.append(table.as_text(table.REWRITES, [table.rewrite_cells(row) for row in table.rows(rewrites, REWRITES)]))
    parts += [f"UNSOUND {line}" for line in table.unsound([*mutants, *rewrites])]
    parts += [f"CRASH {line}; please report it" for line in table.crashes([*mutants, *rewrites])]
    why = table.reasons([*mutants, *rewrites])
    if why:
        parts.append("\n".join(["equal, but unproven:", *(f"  {count} times: {reason}" for count, reason, _ in why)]))
    return "\n\n".join(parts)


def in_processes(cases: Sequence[Any], plans: Sequence[Plan]) -> Result:
    """Each process has its own part of the cases."""
    if len(plans) == 1:
        return run(cases, plans[0])
    with ProcessPoolExecutor(len(plans), get_context("fork")) as pool:  # cases cannot be sent, so they are inherited
        global _CASES
        _CASES = cases
        results = list(pool.map(_run_part, range(len(plans)), [len(plans)] * len(plans), plans))
    return Result(
        [outcome for result in results for outcome in result.mutants],
        [outcome for result in results for outcome in result.rewrites],
        sum(result.checks for result in results),
    )


_CASES: Sequence[Any] = ()


def _run_part(number: int, count: int, plan: Plan) -> Result:
    import torch

    torch.set_num_threads(1)
    kept = plan.keep and plan.keep.with_stem(f"{plan.keep.stem}-{number}")
    return run(_CASES[number::count], replace(plan, keep=kept))


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
        options.keep,
        options.locate_every,
    )
    cases = cases_below(options.cases, options.ranks, options.only, options.seed)
    result = in_processes(cases, [plan] * options.jobs)
    if not result.mutants:
        print(f"error: no case below {options.cases} could be mutated", file=sys.stderr)
        return 2
    print(as_report(result.mutants, result.rewrites))
    if options.write:
        command = f"python -m graphguard.mutate.campaign {' '.join(given)}"
        seconds = time.time() - begun
        families = {case.name: family for family, cases in families_below(options.cases).items() for case in cases}
        text = page(result.mutants, result.rewrites, command, seconds, families, options.mutants)
        Path(options.write).write_text(text, encoding="utf-8")
    return 1 if table.unsound([*result.mutants, *result.rewrites]) else 0


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
    parser.add_argument("--write", help="page to write, for example docs/soundness.md")
    parser.add_argument(
        "--keep", type=Path, help="file that keeps all outcomes, as a pickle; one for each process, with its number in the name"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
