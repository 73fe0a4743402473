"""What one description asked of the table and told it, as steps that can be taken again for other atoms.

The describing code itself is a function of its operands and of these answers. So for operands that are alike but for their
atoms, and if every step gives the like answer, it would do the like: the steps say which atoms stand for which.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphguard.engine.term import FIRST_ID, Atom

if TYPE_CHECKING:
    from graphguard.engine.table import Table

Images = dict[int, Atom]  # the atoms that now stand for those of the trace, by the ids of those
Step = Callable[["Table", Images], bool]
Facts = tuple[Hashable, ...]


def facts_of(atom: Atom) -> Facts:
    return atom.kind, atom.positive, atom.nonnegative, atom.indicator, atom.number


class Trace:
    """The steps of one description. It is spoilt by whatever cannot be taken again."""

    def __init__(self, atoms: Iterable[Atom]):
        self.usable = True
        self.steps: list[Step] = []
        self.asking = 0  # steps before the first new atom
        self._makes_atoms = False
        self._known = {atom.id for atom in atoms}
        self._answered: set[Hashable] = set()  # questions whose answers hold until something is told or added

    def spoil(self) -> None:
        self.usable = False

    def knows(self, ids: Iterable[int]) -> bool:
        """Whether all atoms came to the description by its operands or by an answer."""
        return all(each in self._known or each < FIRST_ID for each in ids)

    def _take(self, step: Step, ids: Sequence[int], found: Iterable[Atom] = ()) -> None:
        if not self.knows(ids):
            self.usable = False
        self.steps.append(step)
        if not self._makes_atoms:
            self.asking = len(self.steps)
        self._known.update(atom.id for atom in found)

    def _is_answered(self, *question: Hashable) -> bool:
        known = question in self._answered
        self._answered.add(question)
        return known

    # ------------------------------------------------------------------ steps
    def fixed(self, atom: Atom) -> None:
        """An atom that is the same everywhere, such as a number."""

        def again(table: Table, images: Images) -> bool:
            images[atom.id] = atom
            return True

        self._take(again, (), [atom])

    def asked(self, question: Callable[..., Any], ids: tuple[int, ...], answer: Any, *rest: Any) -> None:
        """A question about atoms whose answer has none."""
        if self._is_answered(question, ids, *rest):
            return
        self._take(lambda table, images: bool(question(table, _ids(images, ids), *rest) == answer), ids)

    def told(self, effect: Callable[..., Any], atoms: tuple[Atom, ...], *rest: Any) -> None:
        """A note about atoms."""
        ids = tuple(atom.id for atom in atoms)

        def again(table: Table, images: Images) -> bool:
            effect(table, tuple([images[each] for each in ids]), *rest)
            return True

        self._answered.clear()
        self._take(again, ids)

    def found(self, question: Callable[..., Sequence[Atom]], ids: tuple[int, ...], answer: Sequence[Atom]) -> None:
        """A question whose answer is a row of atoms."""
        if self._is_answered(question, ids):
            return
        held = [(atom.id, facts_of(atom)) for atom in answer]

        def again(table: Table, images: Images) -> bool:
            return _extended(images, held, question(table, _ids(images, ids)))

        self._take(again, ids, answer)

    def looked_up(self, shape: int, ids: tuple[int, ...], atoms: Mapping[Any, Atom] | None) -> None:
        """A look-up of all atoms that are put together in one way."""
        if self._is_answered(shape, ids):
            return
        patterns = tuple(atoms or ())
        held = [(atom.id, facts_of(atom)) for atom in (atoms or {}).values()]

        def again(table: Table, images: Images) -> bool:
            now = table.defined(shape, _ids(images, ids))
            if not now or not patterns:
                return not now and not patterns
            return tuple(now) == patterns and _extended(images, held, list(now.values()))

        self._take(again, ids, (atoms or {}).values())

    def added(self, shape: int, ids: tuple[int, ...], pattern: Hashable, atom: Atom, make: Callable[..., Atom]) -> None:
        """A new atom; `make` makes the like one, of other atoms."""

        def again(table: Table, images: Images) -> bool:
            now = _ids(images, ids)
            known = table.defined(shape, now)
            if known and pattern in known:
                return False
            images[atom.id] = make(shape, now, pattern, {each: images[each] for each in ids})
            return True

        self._makes_atoms = True
        self._answered.clear()
        self._take(again, ids, [atom])


def _ids(images: Images, ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([images[each].id for each in ids])


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
