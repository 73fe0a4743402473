"""Every proof case: its verdict, the relations proved, and that nothing wrong is claimed about any tensor on the way."""

import importlib
import math
import os

import pytest
from cases.case import Case
from cases.gaps import CONDITIONAL, NOT_LOCATED, NOT_YET

import graphguard as gg
from graphguard.capture import session
from graphguard.engine import prove as prover
from graphguard.oracle import shrinking
from graphguard.oracle.claims import audit_claims

MODULES = (
    "mlp",
    "attention",
    "fused_qkv",
    "rope",
    "vocabulary",
    "norms",
    "sequence",
    "data",
    "identities",
    "published",
    "zero",
    "step",
    "optimizers",
    "batch",
    "expert",
    "expert_more",
    "routes",
    "tensor_more",
    "parts",
    "heads_more",
    "padding",
    "context",
    "zigzag",
    "ulysses_ring",
    "ring_flash",
    "dealt",
    "positions",
    "pipeline",
    "tied_stages",
    "meshes",
    "inference",
    "decoders",
    "forms",
    "flat",
    "formulas",
    "quantised",
    "convolution",
    "windows",
)
LOADED = [importlib.import_module(f"cases.{name}") for name in MODULES]
CASES: list[Case] = [case for module in LOADED for case in module.CASES]
MOST_RANKS = 2  # of a case whose every tensor is compared with a run
EVERY = 72  # of the larger correct cases, one in so many runs; `make test-all` runs them all, and compares up to 4 ranks
WHOLE = {"mlp", "attention", "fused_qkv", "rope", "vocabulary", "published"}  # of other families, one case in so many
SAMPLED = frozenset(case.name for module in LOADED if module.__name__.split(".")[1] not in WHOLE for case in module.CASES)
ALL = os.environ.get("GRAPHGUARD_TEST_CASES") == "all"


class NotProved(Exception):
    """A correct case that the engine does not prove."""


def is_chosen(number, case):
    if ALL or number % EVERY == 0:
        return True
    world = math.prod(case.mesh.values())
    return case.name not in SAMPLED and world <= (4 if case.fault else 2)


def parameters():
    for number, case in enumerate(CASES):
        if not is_chosen(number, case):
            continue
        marks = [pytest.mark.xfail(strict=True, raises=NotProved)] if case.name in NOT_YET else []
        yield pytest.param(case, id=case.name, marks=marks)


def test_the_names_of_cases_are_unique_and_those_not_proved_yet_exist():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) >= NOT_YET
    assert all(case.expect == "verified" for case in CASES if case.name in NOT_YET)


@pytest.mark.parametrize("case", parameters())
def test_case(case, monkeypatch):
    monkeypatch.setattr(shrinking, "MOST_RUNS", 0)  # tests/test_verdicts.py makes counterexamples small
    monkeypatch.setattr(session, "CAPTURED_TWICE", ())  # tests/test_bad_input.py has programs that change from run to run
    interpreted = recorded(monkeypatch)
    report = gg.verify(case.sequential, case.distributed, **case.options)
    if math.prod(case.mesh.values()) <= (4 if ALL else MOST_RANKS):
        for graphs, found in interpreted:
            audit = audit_claims(found, *graphs)
            assert not audit.wrong, "\n".join(map(str, audit.wrong[:5]))
            assert audit.compared
    if case.expect == "refuted":
        assert report.verdict == "refuted"
        assert is_located(case, report) or case.name in NOT_LOCATED
    elif not report.verified:
        raise NotProved(report.findings[0].message)
    else:
        assert bool(report.conditions) == (case.name in CONDITIONAL), report.headline
        found = {path: relation.placements and dict(relation.placements) for path, relation in report.relation.items()}
        assert found == expected(case, interpreted[-1][0][0])


def recorded(monkeypatch):
    """The graphs that are interpreted, and their descriptions, as they come."""
    interpreted = []
    interpret = prover.interpret

    def recording(*args):
        interpreted.append((args[:3], interpret(*args)))
        return interpreted[-1][1]

    monkeypatch.setattr(prover, "interpret", recording)
    return interpreted


def is_located(case, report):
    """Whether the guilty line is the first or the second one named."""
    named = list(dict.fromkeys(finding.distributed.place for finding in report.findings if finding.distributed is not None))
    file, line = case.fault_location
    return any(name.endswith(file.split("/")[-1]) and at == line for name, at in named[:2])


def test_most_faults_are_located():
    faults = [case.name for case in CASES if case.fault]
    assert set(faults) >= NOT_LOCATED
    assert 5 * len(NOT_LOCATED) < len(faults)


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
