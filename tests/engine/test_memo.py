"""Layers that are alike are described once: what is taken from memory is what would be described anew."""

import importlib
import math
import pkgutil

import cases
import pytest
from cases import decoders, rope

from graphguard.api import capture_function
from graphguard.capture.torch import session
from graphguard.engine.algebra.value import same
from graphguard.engine.prove import interpret, prove
from graphguard.engine.store.atoms import Atoms
from graphguard.engine.store.definitions import Definitions
from graphguard.engine.store.facts import Facts
from graphguard.engine.store.filed import Filed
from graphguard.engine.store.interval import Interval
from graphguard.engine.store.journal import Journal, Recorded, asked, told
from graphguard.engine.store.memo import Memo
from graphguard.engine.store.need import NeedList
from graphguard.engine.store.table import Table
from graphguard.engine.terms.term import ONE, Factor, Index, Term, Value
from graphguard.graph.exposure import Shown
from graphguard.lemmas.known import all_lemmas

CASES = [decoders.CASES[0], next(case for case in decoders.CASES if "llama" in case.name), rope.CASES[0]]
FAMILIES = [module for each in pkgutil.iter_modules(cases.__path__)
            if hasattr(module := importlib.import_module(f"cases.{each.name}"), "CASES")]  # fmt: skip


# ---------------------------------------------------------------------- what is remembered
@pytest.fixture
def remembered(monkeypatch):
    """Counts the descriptions that are taken from memory; each is also made anew and compared."""
    seen = []
    describe = Memo.describe

    def compared(memo, what, operands, make):
        before = memo.again
        results = describe(memo, what, operands, make)
        if memo.again > before:
            atoms = next(memo._table.store._ids)
            anew = make()
            assert len(anew) == len(results)
            assert all(same(a, b) for a, b in zip(anew, results, strict=True)), what
            assert next(memo._table.store._ids) == atoms + 1, f"{what} anew made atoms that its memory had not made"
            seen.append(what)
        return results

    monkeypatch.setattr(Memo, "describe", compared)
    return seen


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_remembered_is_what_would_be_described(case, remembered):
    captured = graphs_of(case)
    interpret(captured.sequential, captured.world(), {}, all_lemmas())
    assert len(remembered) > 10


def graphs_of(case):
    return capture_function(
        case.sequential, case.distributed, mesh=case.mesh, inputs=case.inputs, local_inputs=case.local_inputs
    )


def cheapest(cases):
    return min(cases, key=lambda case: (math.prod(case.mesh.values()), sum(math.prod(s.shape) for s in case.inputs.values())))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__.removeprefix("cases."))
def test_a_proof_without_memory_finds_the_same(family, monkeypatch):
    monkeypatch.setattr(session, "CAPTURED_TWICE", ())
    for fault in (False, True):
        case = cheapest([each for each in family.CASES if bool(each.fault) == fault])
        captured = graphs_of(case)
        graphs = captured.sequential, captured.world()
        ranges = {name: (s.low, s.high) for name, s in case.inputs.items() if (s.low, s.high) != (None, None)}
        with_memory = prove(*graphs, ranges=ranges, lemmas=all_lemmas())
        with monkeypatch.context() as patch:
            patch.setattr(Memo, "describe", lambda memo, what, operands, make: make())
            without = prove(*graphs, ranges=ranges, lemmas=all_lemmas())
        for part in ("relations", "findings", "assumptions", "conditions", "opaque", "no_parts"):
            assert getattr(with_memory, part) == getattr(without, part), f"{case.name}: {part}"


# ---------------------------------------------------------------------- what is asked
def test_a_class_with_a_public_method_that_has_no_record_cannot_be_made():
    with pytest.raises(TypeError, match=r"Loose\.question has no record"):
        type("Loose", (Recorded,), {"question": lambda self, atom: atom.id})
    with pytest.raises(TypeError, match=r"Loose\.__contains__ has no record"):
        type("Loose", (Recorded,), {"__contains__": lambda self, atom: True})
    with pytest.raises(TypeError, match=r"Loose\.names has no record"):
        type("Loose", (Recorded,), {"names": property(lambda self: [])})


def test_what_descriptions_may_look_at_is_recorded_or_part_of_the_mode():
    """A new field of the table stands here, with why it may be looked at without a record."""
    table = Table()
    for name, part in vars(table).items():
        if isinstance(part, Recorded):
            assert not [each for each in vars(part) if not each.startswith("_") and each != "journal"], name
            assert part.journal is table.journal
    parts = {name: type(part) for name, part in vars(table).items() if not name.startswith("_")}
    recorded = {"store": Atoms, "facts": Facts, "sums": Filed, "needs": NeedList}
    assert {name: kind for name, kind in parts.items() if issubclass(kind, Recorded)} == recorded
    modes = {"run", "folding", "ignores_by_default", "shown"}
    # what is recorded itself; new numbers; functions of definitions; the same for all of a proof, and told by `over`; a count
    # that only what stands between two descriptions looks at
    free = {"journal", "definitions", "names", "answers", "limits", "stops", "work"}
    assert parts.keys() == recorded.keys() | modes | free
    assert isinstance(table.definitions, Definitions)


@pytest.mark.parametrize(
    "change", [{"shown": Shown.NAN}, {"folding": False}, {"recording": False}, {"ignores_by_default": False}]
)
def test_the_mode_tells_what_is_described(change):
    table = Table()
    before = table.mode
    for name, value in change.items():
        setattr(table, name, value)
    assert table.mode != before


def described(question, change):
    """How often one of two alike operands is described anew, if the answer to a question about the second is changed."""
    table, anew = Table(), []
    memo = Memo(table)
    for name in ("x", "y"):
        atom = table.atom("input", name)
        value = Value((4,), (Term(ONE, (Factor(atom, (Index(((0, 1),)),)),), {0: (0, 4)}, ((0,),), ((0, 4),)),))
        if name == "y":
            change(table, atom)
        memo.describe("same", [value], lambda value=value: anew.append(question(table, value.terms[0])) or (value,))
    return anew


def note(table, atom):
    table.facts.note("nonzero", Factor(atom, (Index(((0, 1),)),)), {0: (0, 4)}, Shown.ALL)


ATOM = {
    "is_filed": (lambda table, term: table.sums.is_filed(term.factors[0].atom), lambda table, atom: table.sums.file(atom)),
    "sums_with": (lambda table, term: table.sums.sums_with(term.factors[0].atom),
                  lambda table, atom: table.sums.note_sum(atom, atom)),
    "stated": (lambda table, term: table.facts.stated(term.factors[0].atom),
               lambda table, atom: table.facts.state(atom, Interval())),
    "is_infinite": (lambda table, term: table.facts.is_infinite(term.factors[0].atom),
                    lambda table, atom: table.facts.note_infinite(atom)),
    "numbers": (lambda table, term: table.facts.numbers(term.factors[0], term.ranges),
                lambda table, atom: table.facts.declare(atom, 0, 4)),
    "span": (lambda table, term: table.facts.span(term.factors[0], term.ranges),
             lambda table, atom: table.facts.declare(atom, 0, 4)),
    "holds": (lambda table, term: table.facts.holds("nonzero", term.factors[0], term.ranges), note),
}  # fmt: skip


@pytest.mark.parametrize("name", ATOM)
def test_another_answer_is_described_anew(name):
    question, change = ATOM[name]
    assert len(described(question, lambda table, atom: None)) == 1
    assert len(described(question, change)) == 2


def test_what_is_spoilt_is_described_anew():
    assert len(described(lambda table, term: table.sums.operands(), lambda table, atom: None)) == 2


def test_a_question_that_tells_something_is_stopped():
    class Chatty(Recorded):
        @told
        def note(self, atom):
            pass

        @asked
        def question(self, atom):
            self.note(atom)

    chatty = Chatty(Journal())
    with chatty.journal.tracing([]), pytest.raises(AssertionError, match="may not tell note"):
        chatty.question(None)


def test_one_description_within_another_is_stopped():
    journal = Journal()
    with journal.tracing([]), pytest.raises(AssertionError), journal.tracing([]):
        pass


def test_a_limit_that_was_reached_is_reached_again_by_what_is_remembered():
    table, anew = Table(), []
    memo = Memo(table)
    for name in ("x", "y"):
        table.stops.at = name
        atom = table.atom("input", name)
        value = Value((4,), (Term(ONE, (Factor(atom, (Index(((0, 1),)),)),), {0: (0, 4)}, ((0,),), ((0, 4),)),))
        memo.describe("same", [value], lambda name=name, value=value: anew.append(table.over("factors", 25)) or (value,))
    assert anew == [True] and memo.again == 1
    assert [(stop.limit, stop.outputs) for stop in table.stops.on_the_way_to(["x", "y"])] == [("factors", ("x", "y"))]
