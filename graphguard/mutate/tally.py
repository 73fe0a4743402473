"""What came of many changes: counted by kind, as text for a terminal or for a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from graphguard.mutate.mutant import Judged

MUTANTS = ("mutation", "mutants", "caught", "UNSOUND", "equal, verified", "equal, unproven", "gave up", "located")
REWRITES = ("rewrite", "programs", "verified", "unproven", "gave up", "not equal")
MOST_REASONS = 12


@dataclass(frozen=True)
class Tally:
    name: str
    outcomes: Sequence[Judged]

    @property
    def total(self) -> int:
        return len(self.outcomes)

    @property
    def unsound(self) -> int:
        return sum(o.unsound for o in self.outcomes)

    @property
    def refused(self) -> int:
        return sum(o.difference is not None and not o.proved for o in self.outcomes)

    @property
    def verified(self) -> int:
        return sum(o.difference is None and o.proved for o in self.outcomes)

    @property
    def incomplete(self) -> int:
        return sum(o.incomplete for o in self.outcomes)

    @property
    def gave_up(self) -> int:
        """The prover was stopped on a program that is equal; one that is different is refused either way."""
        return sum(o.difference is None and o.gave_up for o in self.outcomes)

    @property
    def located(self) -> tuple[int, int]:
        """Of the different ones that have findings, and whose place was asked for, how many are located."""
        found = [o for o in self.outcomes if o.difference is not None and not o.proved and not o.gave_up]
        asked = [o.located for o in found if o.located is not None]
        return sum(asked), len(asked)

    @property
    def broken(self) -> int:
        return sum(o.difference is not None for o in self.outcomes)


def rows(outcomes: Iterable[Judged], order: Iterable[str], key: Callable[[Judged], str] = attrgetter("kind")) -> list[Tally]:
    """One row for each kind, or whatever the key is, in the given order, and one for all."""
    by_key: dict[str, list[Judged]] = {each: [] for each in order}
    for outcome in outcomes:
        by_key.setdefault(key(outcome), []).append(outcome)
    found = [Tally(each, list(those)) for each, those in by_key.items() if those]
    return [*found, Tally("all", [outcome for row in found for outcome in row.outcomes])]


def mutant_cells(row: Tally) -> tuple[str, ...]:
    numbers = (row.total, row.refused, row.unsound, row.verified, row.incomplete, row.gave_up)
    return (row.name, *map(str, numbers), share(*row.located))


def rewrite_cells(row: Tally) -> tuple[str, ...]:
    numbers = (row.total, row.verified, row.incomplete, row.gave_up, row.broken)
    return (row.name, *map(str, numbers))


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "-"


def as_text(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be."""
    widths = [max(len(row[column]) for row in [head, *body]) for column in range(len(head))]
    lines = []
    for row in [head, *body]:
        first, *rest = (cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def as_markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in body]
    return "\n".join(lines)


def reasons(outcomes: Collection[Judged]) -> list[tuple[int, str, str]]:
    """Why equal programs are unproven: how many, the reason, and one of them; the most frequent first."""
    counts = Counter(o.reason for o in outcomes if o.incomplete)
    examples = {o.reason: f"{o.specimen}: {o.words}" for o in reversed(list(outcomes)) if o.incomplete}
    return [(count, str(reason), examples[reason]) for reason, count in counts.most_common(MOST_REASONS)]


def unsound(outcomes: Iterable[Judged]) -> list[str]:
    return [f"{o.specimen}: {o.words}: verified, but {o.difference}" for o in outcomes if o.unsound]


def crashes(outcomes: Iterable[Judged]) -> list[str]:
    return [f"{o.specimen}: {o.words}: {o.crash}" for o in outcomes if o.crash is not None]
