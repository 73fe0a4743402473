"""The journal of a proof: every question that a description asks, and all that it notes, is a step of its trace.

Descriptions are reused for layers that are alike, so a question that is not recorded is an unsoundness. What descriptions may
ask therefore stands in classes of which every public method has a record, or else the class cannot be made:

    asked    a question whose answer has no atoms
    found    a question whose answer has atoms
    told     a note about atoms
    made     a new atom
    fixed    an atom that is the same for every description
    spoils   what cannot be done again by the trace alone

A question is one step: what it asks on its way is asked again with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, TypeVar, cast

from graphguard.engine.store.arguments import Arguments
from graphguard.engine.store.trace import Split, Trace
from graphguard.engine.terms.term import Atom


class Journal:
    def __init__(self) -> None:
        self.trace: Trace | None = None  # of the description that is being made
        self.answering = False  # a question that is itself a step

    @contextmanager
    def tracing(self, atoms: Iterable[Atom]) -> Iterator[Trace]:
        """The trace of a description of something that is made of these atoms."""
        assert self.trace is None, "one description within another would not be traced by the outer one"
        trace = self.trace = Trace(atoms)
        try:
            yield trace
        finally:
            self.trace = None

    def spoil(self) -> None:
        """What is done now cannot be done again by the trace alone."""
        if self.trace is not None:
            self.trace.usable = False
            self.trace = None


class Recorded:
    """The base of what descriptions may ask: all that is public has a record, and all state is private."""

    def __init__(self, journal: Journal):
        self.journal = journal

    def __init_subclass__(cls) -> None:
        for name, member in vars(cls).items():
            hidden = name.startswith("_") and not (name.startswith("__") and callable(member) and name != "__init__")
            if not hidden and name != "__init__" and not hasattr(member, "record"):
                raise TypeError(f"{cls.__name__}.{name} has no record in the journal")


M = TypeVar("M", bound=Callable[..., Any])  # of something that has a journal


def asked(question: M) -> M:
    """A question whose answer has no atoms and does not change later on."""

    def recorded(self: Any, *args: Any) -> Any:
        journal = self.journal
        trace = journal.trace
        if trace is None or journal.answering:
            return question(self, *args)
        journal.answering = True
        try:
            answer = question(self, *args)
        finally:
            journal.answering = False
        trace.asked(question, self, Arguments(args), answer)
        return answer

    return _marked("asked", question, recorded)


def found(split: Split) -> Callable[[M], M]:
    """A question whose answer has atoms; `split` tells them from the rest of it."""

    def decorate(question: M) -> M:
        def recorded(self: Any, *args: Any) -> Any:
            journal = self.journal
            trace = journal.trace
            if trace is None or journal.answering:
                return question(self, *args)
            journal.answering = True
            try:
                answer = question(self, *args)
            finally:
                journal.answering = False
            trace.found(question, self, Arguments(args), answer, split)
            return answer

        return _marked("found", question, recorded)

    return decorate


def told(effect: M) -> M:
    """A note about atoms."""

    def recorded(self: Any, *args: Any) -> None:
        journal = self.journal
        assert not journal.answering, f"a question may not tell {effect.__name__}"
        effect(self, *args)
        if journal.trace is not None:
            journal.trace.told(effect, self, Arguments(args))

    return _marked("told", effect, recorded)


def made(make: M) -> M:
    """A new atom; None if there is one already."""

    def recorded(self: Any, *args: Any) -> Any:
        journal = self.journal
        assert not journal.answering, "a question may not make an atom"
        atom = make(self, *args)
        if journal.trace is not None and atom is not None:
            journal.trace.made(make, self, Arguments(args), atom)
        return atom

    return _marked("made", make, recorded)


def fixed(make: M) -> M:
    """An atom that is the same for every description."""

    def recorded(self: Any, *args: Any) -> Any:
        atom = make(self, *args)
        if self.journal.trace is not None:
            self.journal.trace.fixed(atom)
        return atom

    return _marked("fixed", make, recorded)


def spoils(act: M) -> M:
    """What cannot be done again by the trace alone."""

    def recorded(self: Any, *args: Any) -> Any:
        self.journal.spoil()
        return act(self, *args)

    return _marked("spoils", act, recorded)


def _marked(record: str, method: M, recorded: Any) -> M:
    recorded.record = record
    return cast(M, update_wrapper(recorded, method))
