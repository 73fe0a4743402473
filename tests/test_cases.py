"""Every proof case: its verdict, the relations proved, and that nothing wrong is claimed about any tensor on the way."""

import importlib
import math
import os
from pathlib import Path

import cases
import pytest
from cases.case import Case
from cases.gaps import CONDITIONAL, NOT_YET

import graphguard as gg
from graphguard import pipeline
from graphguard.audit.claims import audit_claims
from graphguard.capture.torch import session
from graphguard.counterexample import shrinking
from graphguard.engine import prove as prover

MODULES = (
    "mlp",
    "attention",
    "fused_qkv",
    "rope",
    "vocabulary",
    "tables",
    "norms",
    "sequence",
    "data",
    "identities",
    "published",
    "zero",
    "step",
    "optimizers",
    "accumulated",
    "batch",
    "expert",
    "moe_training",
    "routes",
    "fixed_routes",
    "linear",
    "partial_gradients",
    "attention_variants",
    "padding",
    "context",
    "zigzag",
    "ulysses_ring",
    "ring_flash",
    "masked_rings",
    "dealt",
    "positions",
    "pipeline",
    "tied_stages",
    "meshes",
    "inference",
    "decoders",
    "reformulated",
    "flat",
    "formulas",
    "quantised",
    "convolution",
    "recurrent",
    "pieces",
    "windows",
)
LOADED = [importlib.import_module(f"cases.{name}") for name in MODULES]
CASES: list[Case] = [case for module in LOADED for case in module.CASES]
MOST_RANKS = 2  # of a case whose every tensor is compared with a run; `make test-all` compares up to 4 ranks
WHOLE = {"mlp", "attention", "fused_qkv", "rope", "vocabulary", "published"}  # families of which all small cases run
ALL = os.environ.get("GRAPHGUARD_TEST_CASES") == "all"


class NotProved(Exception):
    """A correct case that the engine does not prove."""


def world(case):
    return math.prod(case.mesh.values())


def cheapest(cases):
    """That on the fewest ranks, with the fewest numbers in its inputs. The time itself changes from machine to machine."""
    return min(cases, key=lambda case: (world(case), sum(math.prod(spec.shape) for spec in case.inputs.values()), case.name))


def chosen_of(family):
    """Of each family the cheapest correct and the cheapest faulty case; of some, all small ones; with ALL, every one."""
    name, cases = family.__name__.split(".")[1], family.CASES
    small = {case.name for case in cases if name in WHOLE and world(case) <= (4 if case.fault else 2)}
    proved = [case for case in cases if not case.fault and case.name not in NOT_YET]
    needed = {cheapest(proved).name, cheapest([case for case in cases if case.fault]).name}
    return [case for case in cases if ALL or case.name in small | needed]


def parameters():
    for case in (case for family in LOADED for case in chosen_of(family)):
        marks = [pytest.mark.xfail(strict=True, raises=NotProved)] if case.name in NOT_YET else []
        yield pytest.param(case, id=case.name, marks=marks)


def test_the_names_of_cases_are_unique_and_gaps_are_of_cases_that_exist():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    faulty = {case.name for case in CASES if case.fault}
    assert set(names) - faulty >= NOT_YET | CONDITIONAL and NOT_YET.isdisjoint(CONDITIONAL)


def test_every_family_runs_a_correct_and_a_faulty_case():
    files = {file.stem for file in Path(cases.__file__).parent.glob("*.py")} - {"__init__"}
    assert {name for name in files if hasattr(importlib.import_module(f"cases.{name}"), "CASES")} == set(MODULES)
    for family in LOADED:
        chosen = chosen_of(family)
        assert any(case.fault for case in chosen), family.__name__
        assert any(not case.fault and case.name not in NOT_YET for case in chosen), family.__name__


@pytest.mark.parametrize("case", parameters())
def test_case(case, monkeypatch):
    monkeypatch.setattr(shrinking, "MOST_RUNS", 0)  # tests/counterexample makes counterexamples small
    monkeypatch.setattr(session, "CAPTURED_TWICE", ())  # test_bad_input.py has programs that change from run to run
    monkeypatch.setattr(pipeline, "proved_repair", lambda *given: None)  # those are proofs of other programs
    captured, interpreted = recorded(monkeypatch)
    report = gg.verify(case.sequential, case.distributed, **case.options)
    if world(case) <= (4 if ALL else MOST_RANKS):
        for found in interpreted:
            audit = audit_claims(found, *form_of(found, captured), captured[0].relations)
            assert not audit.wrong, "\n".join(map(str, audit.wrong[:5]))
            assert audit.compared
    if case.expect == "refuted":
        assert report.verdict == "refuted"
        assert report.findings
    elif not report.verified:
        raise NotProved(report.findings[0].message)
    else:
        assert bool(report.conditions) == (case.name in CONDITIONAL), report.headline
        found = {path: relation.placements and dict(relation.placements) for path, relation in report.relation.items()}
        assert found == expected(case, captured[0].sequential)


def recorded(monkeypatch):
    """What is captured, and the descriptions, as they come."""
    captured, interpreted = [], []
    interpret, decide, spell_out = prover.interpret, pipeline.decide, pipeline.with_constant_positions

    def recording(*args):
        interpreted.append(interpret(*args))
        return interpreted[-1]

    def deciding(problem, *args, **options):
        captured.append(problem.captured)
        return decide(problem, *args, **options)

    def spelling_out(*args):
        made = spell_out(*args)
        captured.extend([] if made is None else [made])
        return made

    monkeypatch.setattr(prover, "interpret", recording)
    monkeypatch.setattr(pipeline, "with_constant_positions", spelling_out)
    monkeypatch.setattr(pipeline, "decide", deciding)
    return captured, interpreted


def form_of(found, captured):
    """The programs that were described: as they were captured, or with constant positions spelled out."""
    first, *spelled_out = captured
    forms = [(first.sequential, first.joint), *spelled_out]
    return next(form for form in forms if is_described(found, *form))


def is_described(found, sequential, joint):
    sizes = [(each.graph, joint.graphs[each.members[0]]) for each, _ in found.streams]
    alike = all(len([*mine.values()]) == len([*its.values()]) for mine, its in sizes)
    return alike and all(value in found.sequential for value in sequential.values())


def expected(case, sequential):
    """The relation of each output, one placement for each axis, as a proof states it; None for one that code states."""
    result = {}
    for path, relation in case.relation.items():
        if callable(relation):
            result[path] = None
            continue
        rank = len(sequential.outputs[path].shape)
        stated = {axis: relation.get(axis, gg.Replicate()) if size > 1 else gg.Replicate() for axis, size in case.mesh.items()}
        result[path] = {axis: named(placement, rank) for axis, placement in stated.items()}
    return result


def named(placement, rank):
    if placement.is_shard():
        return f"Shard({placement.dim % rank})"
    return f"Partial({placement.reduce_op})" if placement.is_partial() else "Replicate"
