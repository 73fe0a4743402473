"""Which whole numbers an atom may hold: everywhere, as was declared or as it is made, and at the elements that index in the
sequential program, which is not defined elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from graphguard.engine.store.places import Box, Places, Reach, Run
from graphguard.engine.terms.term import Index, Range, Variable

Span = tuple[int, int]  # low <= number < high
Numbers = tuple[Span, ...]  # in order, apart from each other
BEYOND = 1 << 63  # no whole number of a tensor is as large


def declared_span(low: int | None, high: int | None) -> Span:
    return -BEYOND if low is None else low, BEYOND if high is None else high


def numbers_in(spans: Iterable[Span]) -> Numbers:
    """All numbers of some spans."""
    found: list[Span] = []
    for low, high in sorted(span for span in spans if span[0] < span[1]):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def common(a: Numbers, b: Numbers) -> Numbers:
    return numbers_in((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)


def lies_in(numbers: Numbers, others: Numbers) -> bool:
    return common(numbers, others) == numbers


def hull(numbers: Numbers) -> Span:
    """From the least to the greatest; of none, nothing."""
    return (numbers[0][0], numbers[-1][1]) if numbers else (0, 0)


class Ranges:
    """Of one atom."""

    def __init__(self) -> None:
        self.declared: Numbers | None = None
        self.inferred: dict[Numbers, Places] = {}

    def declare(self, numbers: Numbers) -> None:
        self.declared = numbers if self.declared is None else common(self.declared, numbers)

    def infer(self, box: Box, numbers: Numbers) -> None:
        self.inferred.setdefault(numbers, Places()).note(box)

    def at(self, at: Sequence[Index], ranges: Mapping[Variable, Range]) -> Numbers | None:
        """The numbers that may be at some elements; None if nothing is known of one of them."""
        known = [numbers for numbers, places in self.inferred.items() if places.covers(at, ranges)]
        if not known and len(self.inferred) > 1 and self._anywhere().covers(at, ranges):
            known = [numbers_in(span for numbers in self.inferred for span in numbers)]
        if self.declared is not None:
            known.append(self.declared)
        if not known:
            return None
        found = known[0]
        for other in known[1:]:
            found = common(found, other)
        return found

    def covers(self, shape: Sequence[int]) -> bool:
        """Whether something was inferred of every element."""
        return self._anywhere().covers_all([Reach(0, size - 1, 1) for size in shape])

    def _anywhere(self) -> Places:
        every = Places()
        for places in self.inferred.values():
            for box in places.boxes:
                every.note(box)
        return every

    def in_words(self, name: str, shape: Sequence[int]) -> list[str]:
        """What was declared of a tensor, and what its elements that index are besides."""
        found = [] if self.declared is None else [_in_words(name, self.declared)]
        for numbers, places in self.inferred.items():
            rest = numbers if self.declared is None else common(numbers, self.declared)
            if rest != self.declared:
                found += [_in_words(_part(name, box, shape), rest) for box in places.boxes]
        return found


def _in_words(name: str, numbers: Numbers) -> str:
    """As in `0 <= labels < 10 or labels = -100`: what is many first."""
    order = sorted(numbers, key=lambda span: span[0] - span[1])
    return " or ".join(_span_in_words(name, low, high, len(order) == 1) for low, high in order)


def _span_in_words(name: str, low: int, high: int, alone: bool) -> str:
    if low <= -BEYOND or high >= BEYOND:
        return f"{name} < {high}" if low <= -BEYOND else f"{name} >= {low}"
    return f"{low} <= {name} < {high}" if alone or high - low > 1 else f"{name} = {low}"


def _part(name: str, box: Box, shape: Sequence[int]) -> str:
    """Elements of a tensor, as in `ids[:, 0]`."""
    words = [_slice(run, size) for run, size in zip(box, shape, strict=True)]
    while words and words[-1] == ":":
        words.pop()
    return f"{name}[{', '.join(words)}]" if words else name


def _slice(run: Run, size: int) -> str:
    if run.first == run.last:
        return ":" if size == 1 else str(run.first)
    first, stop = str(run.first or ""), str(run.last + 1) if run.last + run.step < size else ""
    return f"{first}:{stop}" + (f":{run.step}" if run.step > 1 else "")
