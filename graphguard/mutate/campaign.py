"""Many mutants and rewrites of many checks: `python -m graphguard.mutate.campaign`, from the root of the repository.

Which programs are drawn depends on the seed and on the number asked for, and on nothing else; cheap checks get more of them.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphguard.errors import GraphGuardError
from graphguard.mutate import table
from graphguard.mutate.mutant import Outcome, judged, mutants_of, rewrites_of
from graphguard.mutate.mutants import KINDS
from graphguard.mutate.page import page
from graphguard.mutate.rewrites import REWRITES
from graphguard.mutate.specimen import Specimen, specimen

Outcomes = tuple[list[Outcome], list[Outcome]]  # of mutants and of rewrites
LIMIT = 10.0  # seconds for one proof


@dataclass(frozen=True)
class Share:
    """How many programs of one check are drawn."""

    specimen: Specimen
    mutants: int
    rewrites: int


def run(share: Share, seed: int, limit: float = LIMIT) -> Outcomes:
    made, name = share.specimen, str(seed)
    return (
        [judged(made, mutant, limit) for mutant in mutants_of(made, name).several(share.mutants)],
        [judged(made, rewrite, limit) for rewrite in rewrites_of(made, name).several(share.rewrites)],
    )


def shares(specimens: Sequence[Specimen], mutants: int, rewrites: int) -> list[Share]:
    """More of what is cheap: as many as the check has few operations, and at least a few of each."""
    weights = [1 / (20 + specimen.operations) for specimen in specimens]
    total = sum(weights)
    return [
        Share(specimen, max(4, round(mutants * weight / total)), max(1, round(rewrites * weight / total)))
        for specimen, weight in zip(specimens, weights, strict=True)
    ]


# ---------------------------------------------------------------------- the proof cases
def specimens_of_cases(folder: str, most_ranks: int, only: str = "") -> Iterator[Specimen]:
    """The proof cases that verify."""
    import graphguard as gg
    from graphguard.api import collecting

    path = Path(folder).resolve()
    sys.path.insert(0, str(path.parent))
    for file in sorted(path.glob("*.py")):
        module = importlib.import_module(f"{path.name}.{file.stem}")
        for case in getattr(module, "CASES", ()):
            ranks = 1
            for size in case.mesh.values():
                ranks *= size
            if case.expect != "verified" or ranks > most_ranks or only not in case.name:
                continue
            with collecting() as jobs:
                gg.verify(case.sequential, case.distributed, **case.options)
            try:
                yield specimen(case.name, jobs[0])
            except GraphGuardError as error:
                print(f"left out: {error}", file=sys.stderr)


# ---------------------------------------------------------------------- running
def run_all(work: Sequence[Share], seed: int, limit: float, jobs: int, log: Path | None) -> Outcomes:
    mutants: list[Outcome] = []
    rewrites: list[Outcome] = []
    begun = time.time()
    for number, (share, (some, others)) in enumerate(_results(work, seed, limit, jobs), 1):
        mutants += some
        rewrites += others
        print(
            f"{time.time() - begun:7.0f} s  {number} of {len(work)}  {share.specimen.name}: {len(some)} mutants, "
            f"{len(others)} rewrites; {len(mutants)} and {len(rewrites)} so far, {len(table.unsound(mutants))} unsound",
            flush=True,
        )
        for line in table.unsound([*some, *others]):
            print(f"UNSOUND {line}", flush=True)
        if log is not None:
            log.write_bytes(pickle.dumps((mutants, rewrites)))
    return mutants, rewrites


def _results(work: Sequence[Share], seed: int, limit: float, jobs: int) -> Iterator[tuple[Share, Outcomes]]:
    if jobs == 1:
        for share in work:
            yield share, run(share, seed, limit)
        return
    global _WORK
    _WORK = (work, seed, limit)
    with multiprocessing.get_context("fork").Pool(jobs) as pool:  # the graphs are inherited, not sent
        for index, result in pool.imap_unordered(_run_number, range(len(work))):
            yield work[index], result


_WORK: tuple[Sequence[Share], int, float] = ([], 0, LIMIT)


def _run_number(index: int) -> tuple[int, Outcomes]:
    import torch

    torch.set_num_threads(1)
    work, seed, limit = _WORK
    return index, run(work[index], seed, limit)


# ---------------------------------------------------------------------- what is printed
def as_report(mutants: Sequence[Outcome], rewrites: Sequence[Outcome]) -> str:
    """The tables, as text."""
    parts = [table.as_text(table.MUTANTS, [table.mutant_cells(row) for row in table.rows(mutants, KINDS)])]
    if rewrites:
        parts.append(table.as_text(table.REWRITES, [table.rewrite_cells(row) for row in table.rows(rewrites, REWRITES)]))
    parts += [f"UNSOUND {line}" for line in table.unsound([*mutants, *rewrites])]
    why = table.reasons([*mutants, *rewrites])
    if why:
        parts.append("\n".join(["equal, but unproven:", *(f"  {count} times: {reason}" for count, reason, _ in why)]))
    return "\n\n".join(parts)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m graphguard.mutate.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=20000)
    parser.add_argument("--rewrites", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one proof")
    parser.add_argument("--ranks", type=int, default=4, help="leave out cases with more ranks")
    parser.add_argument("--cases", default="tests/cases", help="folder of proof cases")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--write", help="page to write, for example docs/soundness.md")
    parser.add_argument("--outcomes", type=Path, help="file that keeps all outcomes, as a pickle")
    options = parser.parse_args(None if arguments is None else list(arguments))
    begun = time.time()
    specimens = list(specimens_of_cases(options.cases, options.ranks, options.only))
    print(f"{len(specimens)} cases captured and proved in {time.time() - begun:.0f} s", flush=True)
    work = sorted(shares(specimens, options.mutants, options.rewrites), key=lambda share: share.specimen.operations)
    mutants, rewrites = run_all(work, options.seed, options.limit, options.jobs, options.outcomes)
    print(as_report(mutants, rewrites))
    if options.write:
        given = " ".join(sys.argv[1:] if arguments is None else arguments)
        text = page(mutants, rewrites, f"python -m graphguard.mutate.campaign {given}", time.time() - begun, len(specimens))
        Path(options.write).write_text(text, encoding="utf-8")
    return 1 if table.unsound([*mutants, *rewrites]) else 0


if __name__ == "__main__":
    sys.exit(main())
