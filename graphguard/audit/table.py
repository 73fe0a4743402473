"""`graphguard lemmas audit`: which lemmas are meant, and what was found of them, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from graphguard.audit.dtypes import examine, sample_calls
from graphguard.audit.rows import Ledger, Line, audit, audit_lemmas, rows_named, samples_of
from graphguard.audit.samples import SAMPLES, Sample
from graphguard.lemmas import known
from graphguard.lemmas.user import Lemma

HEAD = ("operator", "cases", "wrong", "could be weaker", "seconds", "")


def audited(
    operators: Sequence[str],
    own: Sequence[Lemma],
    everything: bool,
    examples: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Line]:
    """Lines of the lemmas that names of operators mean; without names, those of the user's own, and all others if
    `everything` is wanted."""
    by_name = {name: lemma for lemma in own for name in (lemma.name, lemma.operator)}
    mine = [by_name[name] for name in operators if name in by_name] if operators else list(own)
    rows = None if everything else rows_named(name for name in operators if name not in by_name)
    built_in = [] if rows == [] else audit_rows(rows, examples=examples, seed=seed, progress=progress)
    return [*built_in, *audit_lemmas(mine, examples=max(examples, 1) * 8, seed=seed)]


def audit_rows(
    operators: Iterable[str] | None = None,
    *,
    examples: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Line]:
    """A line for each row, of all rows or of some."""
    wanted = [row for row in known.rows() if operators is None or row.operator in operators]
    samples = SAMPLES.values() if operators is None else samples_of(row.operator for row in wanted)
    samples = list(samples)
    ledger = audit(samples, examples=examples, seed=seed, progress=progress)
    _add_dtypes(ledger, samples, seed)
    for row in wanted:
        if row.kind == "random":
            ledger[row.operator].note = "random: nothing is claimed"
        elif not ledger[row.operator].cases:
            ledger[row.operator].note = "no sample"
    return [ledger[row.operator] for row in wanted]


def _add_dtypes(ledger: Ledger, samples: Sequence[Sample], seed: int) -> None:
    """The same calls in other dtypes, in place, into `out=` and of lists."""
    found = examine(sample_calls(samples), seed=seed)
    for operator, counts in found.right.items():
        ledger[operator].cases += sum(counts.values())
    for operator, texts in found.wrong.items():
        ledger[operator].wrong += texts.values()
        ledger[operator].cases += len(texts)


def lines_of(found: Sequence[Line]) -> Iterator[str]:
    rows = [
        (line.operator, str(line.cases), str(len(line.wrong)), str(len(line.weaker)), f"{line.seconds:.2f}", line.note)
        for line in found
    ]
    widths = [max(len(row[column]) for row in [HEAD, *rows]) for column in range(len(HEAD))]
    for row in [HEAD, *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:5], widths[1:5], strict=True)),
            row[5],
        ]
        yield "  ".join(cells).rstrip()
    for line in found:
        yield from (f"wrong: {line.operator}: {text}" for text in line.wrong[:2])
        yield from (f"could be weaker: {line.operator}: {text}" for text in line.weaker[:1])
    wrong, weaker, without = (sum(map(bool, each)) for each in zip(*map(_marks, found), strict=True)) if found else (0, 0, 0)
    yield (
        f"{len(found)} lemmas, {sum(line.cases for line in found)} cases: {wrong} wrong, {weaker} could be weaker, "
        f"{without} without a sample"
    )


def _marks(line: Line) -> tuple[bool, bool, bool]:
    return bool(line.wrong), bool(line.weaker), line.note == "no sample"
