"""The page that a campaign writes: docs/campaign.md."""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Mapping, Sequence

from graphguard.mutate import tally
from graphguard.mutate.mutant import Judged
from graphguard.mutate.mutants import KINDS
from graphguard.mutate.rewrites import REWRITES

_TEMPLATE = """\
# Mutants

This page is written by `make campaign`. It takes the proof cases of `tests/cases` that verify, changes the graphs of their
ranks, and compares two verdicts on each changed program: that of the prover, and that of running it.

- A **mutant** has one fault: a collective that is dropped, duplicated, replaced, or run with another operation or group;
  shards, operands or offsets that are swapped or shifted; a number, a constant or an operator that is another one; an addend
  that is left out; a value that is stale; an operation on the wrong side of a collective; an output that a rank does not
  return, or returns at another path; another dtype, another range, another label that is ignored; a result that is not
  defined everywhere. Most are made on all ranks alike, some on one.
- A **rewrite** is a change that should not matter.
- **Running** means: all ranks in lockstep in float64, on {trials} sets of inputs (random ones, whole numbers, zeros, all
  equal, negative, one-hot), each output compared with the sequential one under the relation that was proved before the
  change. The prover is held to the same relation; what it proves under a condition counts as not proved. What is equal on
  these and not proved is run on {further} more. A difference is not counted in a run in which floats overflow, if there are
  others.
- *Caught*: different, and not verified. *UNSOUND*: different, but verified, a false proof; **there must be none**. *Equal,
  verified*: the change did no harm, and the prover sees it. *Equal, unproven*: the prover is too weak, or the numbers do not
  show the difference (a mask of -10000 in place of -20000, a branch that no input took). *Gave up*: equal, but the proof took
  longer than its limit. *Not equal*: the rewrite itself is wrong.
- *Located*: one of the first two lines that the findings name is the line of the change, or one that uses its result. Where
  something is left out and the result is returned as it is, it is the line that makes what is returned. A change is made in one
  run of an operation: in a function that the sequential program runs as well, or that the ranks call from several lines, only
  that call is wrong, and the line that makes it counts, too. Of a finding, its own line and one inside of the function that it
  calls are one place. With `--locate-every N` one of N mutants is scored.

| | |
|---|---|
| command | `{command}` |
| date, commit | {date}, {commit} |
| time | {minutes} minutes |
| checks changed | {checks} |
| mutants | {mutants} |
| false proofs | **{unsound}** |
| crashes | {crashes} |
| equal mutants that are unproven | {unproven} |
| faults located | {located} |
| rewrites | {rewrites} |
| rewrites still proved | {proved} |

## Mutants

{mutant_table}

## Mutants by family

{family_table}

## Rewrites

{rewrite_table}

## Equal, but unproven

{reasons}

## Doing it with a check of your own

`graphguard mutate FILE.py::CHECK -n 200` mutates one check that verifies, and prints the same tables: what the check would
catch if somebody broke the program. It exits with 1 if a false proof is found; please report it.
"""


def page(
    mutants: Sequence[Judged],
    rewrites: Sequence[Judged],
    command: str,
    seconds: float,
    families: Mapping[str, str],
    asked: int = 0,
) -> str:
    """`families` has the family of each check. `asked` is how many mutants there should have been: where there are fewer, the
    page says so."""
    from graphguard.mutate.specimen import FURTHER, TRIALS

    rows, others = tally.rows(mutants, KINDS), tally.rows(rewrites, REWRITES)
    every, rewritten = rows[-1], others[-1]
    by_family = tally.rows(mutants, sorted(set(families.values())), lambda outcome: families[outcome.specimen])
    equal = every.verified + every.incomplete + every.gave_up
    return _TEMPLATE.format(
        trials=TRIALS,
        further=FURTHER,
        command=command.strip(),
        date=datetime.date.today().isoformat(),
        commit=commit(),
        minutes=f"{seconds / 60:.0f}",
        checks=len({outcome.specimen for outcome in mutants}),
        mutants=f"{every.total:,}" + (f", of {asked:,} that were asked for" if every.total < asked else ""),
        rewrites=f"{rewritten.total:,}",
        unsound=every.unsound + rewritten.unsound,
        crashes=len(tally.crashes([*mutants, *rewrites])),
        unproven=tally.share(every.incomplete, equal),
        located=tally.share(*every.located),
        proved=tally.share(rewritten.verified, rewritten.total),
        mutant_table=tally.as_markdown(tally.MUTANTS, [tally.mutant_cells(row) for row in rows]),
        family_table=tally.as_markdown(("family", *tally.MUTANTS[1:]), [tally.mutant_cells(row) for row in by_family]),
        rewrite_table=tally.as_markdown(tally.REWRITES, [tally.rewrite_cells(row) for row in others]),
        reasons=_reasons([*mutants, *rewrites]),
    )


def _reasons(outcomes: Sequence[Judged]) -> str:
    found = tally.reasons(outcomes)
    if not found:
        return "None."
    body = [(reason.replace("|", "\\|"), str(count)) for count, reason, _ in found]
    return tally.as_markdown(("why the proof stopped", "programs"), body)


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return os.environ.get("GRAPHGUARD_COMMIT") or asked.stdout.strip() or "unknown"
