"""What one description asked of the table and told it, as steps that can be taken again for other atoms.

The describing code itself is a function of its operands and of these answers. So for operands that are alike but for their
atoms, and if every step gives the like answer, it would do the like: the steps say which atoms stand for which.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from graphguard.engine.store.arguments import Arguments
from graphguard.engine.terms.term import FIRST_ID, Atom

Images = dict[int, Atom]  # the atoms that now stand for those of the trace, by the ids of those
Step = Callable[[Images], bool]
Facts = tuple[Hashable, ...]
Split = Callable[[Any], tuple[Any, Sequence[Atom]]]  # an answer in two parts: all but its atoms, and those


def facts_of(atom: Atom) -> Facts:
    return atom.kind, atom.positive, atom.nonnegative, atom.indicator, atom.number


class Trace:
    """The steps of one description. It is of no use once something was done that cannot be done again."""

    def __init__(self, atoms: Iterable[Atom]):
        self.usable = True
        self.steps: list[Step] = []
        self.asking = 0  # steps before the first that changes something
        self._changes = False
        self._known = {atom.id for atom in atoms}
        self._answered: set[Hashable] = set()  # questions whose answers hold until something changes

    def knows(self, ids: Iterable[int]) -> bool:
        """Whether all atoms came to the description by its operands or by an answer."""
        return all(each in self._known or each < FIRST_ID for each in ids)

    def _take(self, step: Step, given: Iterable[int], found: Iterable[Atom] = ()) -> None:
        if not self.knows(given):
            self.usable = False
        self.steps.append(step)
        if not self._changes:
            self.asking = len(self.steps)
        self._known.update(atom.id for atom in found)

    def _change(self, step: Step, given: Iterable[int], found: Iterable[Atom] = ()) -> None:
        self._changes = True
        self._answered.clear()
        self._take(step, given, found)

    # ------------------------------------------------------------------ steps
    def fixed(self, atom: Atom) -> None:
        """An atom that is the same everywhere, such as a number."""

        def again(images: Images) -> bool:
            images[atom.id] = atom
            return True

        self._take(again, (), [atom])

    def asked(self, question: Callable[..., Any], asked: Any, given: Arguments, answer: Any) -> None:
        """A question about atoms whose answer has none."""
        if not self._is_answered(question, given):
            self._take(lambda images: bool(question(asked, *given.of(images)) == answer), given.ids)

    def found(self, question: Callable[..., Any], asked: Any, given: Arguments, answer: Any, split: Split) -> None:
        """A question whose answer has atoms."""
        if self._is_answered(question, given):
            return
        form, atoms = split(answer)
        held = [(atom.id, facts_of(atom)) for atom in atoms]

        def again(images: Images) -> bool:
            now, others = split(question(asked, *given.of(images)))
            return bool(now == form) and _extended(images, held, others)

        self._take(again, given.ids, atoms)

    def told(self, effect: Callable[..., Any], told: Any, given: Arguments) -> None:
        """A note about atoms."""

        def again(images: Images) -> bool:
            effect(told, *given.of(images))
            return True

        self._change(again, given.ids)

    def made(self, make: Callable[..., Atom | None], maker: Any, given: Arguments, atom: Atom) -> None:
        """A new atom. There must not be one already that is made of the others in the same way."""

        def again(images: Images) -> bool:
            now = make(maker, *given.of(images))
            if now is None:
                return False
            images[atom.id] = now
            return True

        self._change(again, given.ids, [atom])

    def _is_answered(self, question: Callable[..., Any], given: Arguments) -> bool:
        asked = question, given.key
        known = asked in self._answered
        self._answered.add(asked)
        return known


def _extended(images: Images, held: Sequence[tuple[int, Facts]], now: Sequence[Atom]) -> bool:
    """Let new atoms stand for those of the trace, if they are of the same kind and none stands for another."""
    if len(held) != len(now):
        return False
    for (old, facts), atom in zip(held, now, strict=True):
        known = images.get(old)
        if known is None:
            if facts_of(atom) != facts:
                return False
            images[old] = atom
        elif known is not atom:
            return False
    return True
