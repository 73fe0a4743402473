"""The page that random programs write: docs/random.md."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence

from graphguard.fuzz.trial import TRIALS, Result
from graphguard.mutate.page import commit
from graphguard.mutate.tally import as_markdown

_TEMPLATE = """\
# Random programs

This page is written by `make random`. Each program is grown from its number: a few inputs of random shapes and dtypes, whole
or cut over the ranks, and up to 14 steps of torch on them: functions, casts, comparisons, reductions, views, writes in place,
indices, orders, products, norms, losses, gradients, and forms that do nothing, or nothing where they are defined. The ranks
take the same steps with what they hold, and communicate and do things of their own in between.

Nobody knows whether such ranks refine their sequential program, and that is not asked. Both are run on {trials} sets of inputs:
random numbers, small whole numbers, zeros, ones, negative numbers, one-hot ones, the ends of declared ranges, every id once.
What the prover says is compared with what is there:

- **every description of every tensor**, of the sequential program and of every rank, with the tensor;
- **every relation that is proved** of an output, with what the ranks return.

A claim is made where the sequential program is defined, so inputs on which it raises, or holds a number that is not finite, are
passed over. So is what ranks hold that is not finite where numbers became too large for floats, or where the verdict has a
condition. A difference that noise of 1e-13 in every result makes as well is rounding.

| | |
|---|---|
| command | `{command}` |
| date, commit | {date}, {commit} |
| time | {minutes} minutes |
| programs | {programs} |
| claims compared | {compared} |
| relations proved, and compared | {proved} |
| false claims, false proofs | **{wrong}**, **{false}** |
| crashes | {crashes} |
| programs left out | {left_out} |

## By number of ranks

{table}

## Left out

{reasons}
{false_lines}
## One of them again

`python -m graphguard.fuzz.campaign --show SEED` prints the program of a number, its graphs, and what does not hold.
"""


def page(results: Sequence[Result], crashes: Sequence[str], command: str, seconds: float) -> str:
    there = [each for each in results if each.left_out is None]
    reasons = Counter(each.left_out.split(":")[0] for each in results if each.left_out is not None)
    lines = [f"- seed {each.seed}: {text}" for each in there for text in [*each.false_proofs, *each.wrong][:1]]
    lines += [f"- {each}" for each in crashes]
    return _TEMPLATE.format(
        trials=TRIALS,
        command=command.strip(),
        date=datetime.date.today().isoformat(),
        commit=commit(),
        minutes=f"{seconds / 60:.0f}",
        programs=f"{len(results):,}",
        compared=f"{sum(each.compared for each in there):,}",
        proved=f"{sum(each.proved for each in there):,}",
        wrong=sum(bool(each.wrong) for each in there),
        false=sum(bool(each.false_proofs) for each in there),
        crashes=len(crashes),
        left_out=f"{sum(reasons.values()):,}",
        table=as_markdown(
            ("ranks", "programs", "trials", "claims", "no description", "proved", "not proved"), list(_rows(there))
        ),
        reasons=as_markdown(("why", "programs"), [(why, f"{count:,}") for why, count in reasons.most_common()]),
        false_lines="\n".join(["", "## What does not hold", "", *lines, ""]) if lines else "",
    )


def _rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    for ranks in sorted({each.ranks for each in results}):
        some = [each for each in results if each.ranks == ranks]
        counts = [(e.trials, e.compared, e.undescribed, e.proved, e.unproved) for e in some]
        yield str(ranks), f"{len(some):,}", *(f"{sum(column):,}" for column in zip(*counts, strict=True))
