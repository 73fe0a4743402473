"""What `graphguard mutate` does with one check."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from graphguard.errors import UsageError
from graphguard.mutate import tally
from graphguard.mutate.campaign import LIMIT, Result, as_report, specimens
from graphguard.mutate.mutant import Judged, Mutant, judged, mutants_of, rewrites_of
from graphguard.pipeline import Job

_REWRITES = 10  # one rewrite for so many mutants


def mutate(name: str, job: Job, count: int, seed: int) -> int:
    """Print the tables of a check's mutants and rewrites. The exit code: 1 if something wrong was verified, 2 for a crash."""
    if count < 1:
        raise UsageError(f"-n {count}: write how many mutants are made, from 1 on")
    subjects = specimens(name, job, job.paths)
    outcomes: list[list[Judged]] = [[], []]
    for subject in subjects:
        share = -(-count // len(subjects))
        for found, breed, number in zip(outcomes, (mutants_of, rewrites_of), (share, -(-share // _REWRITES)), strict=True):
            found += [judged(subject, mutant, LIMIT) for mutant in _shown(breed(subject, str(seed)).several(number), number)]
    _clear()
    mutants, rewrites = outcomes
    if not mutants:
        raise UsageError(f"{name} has nothing that could be mutated")
    print(as_report(mutants, rewrites))
    print(f"\n{_summary(mutants)}")
    return Result(mutants, rewrites).exit_code


def _shown(mutants: Iterator[Mutant], count: int) -> Iterator[Mutant]:
    for number, mutant in enumerate(mutants, 1):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{mutant.kind} ({number} of {count})", end="", file=sys.stderr, flush=True)
        yield mutant


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _summary(mutants: list[Judged]) -> str:
    every = tally.Tally("all", mutants)
    faults = every.refused + every.unsound
    text = f"{len(mutants)} mutants: {faults} compute something else, of which {every.refused} do not verify"
    if every.unsound:
        text += f" and {every.unsound} do, which is an error in GraphGuard; please report it"
    return text
