"""Every proof case: its verdict, the relations proved, and that nothing wrong is claimed about any tensor on the way."""

import importlib
import math
import os

import pytest
from cases.case import Case

import graphguard as gg
from graphguard.api import _ranges
from graphguard.engine import prove as prover
from graphguard.expectation import expectations
from graphguard.oracle.claims import audit_claims
from graphguard.relation import mesh_of

MODULES = (
    "mlp",
    "attention",
    "fused_qkv",
    "rope",
    "vocabulary",
    "decoders",
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
    "heads_more",
    "padding",
    "context",
    "zigzag",
    "ulysses_ring",
    "positions",
    "pipeline",
    "tied_stages",
    "meshes",
    "inference",
)
LOADED = [importlib.import_module(f"cases.{name}") for name in MODULES]
CASES: list[Case] = [case for module in LOADED for case in module.CASES]
MOST_RANKS = 2  # of a case whose every tensor is compared with a run
EVERY = 5  # of the larger correct cases, one in so many runs; `make test-all` runs them all, and compares up to 4 ranks
FIRST = MODULES.index("zero")  # of the families from here on, one case in so many, whatever it is
SAMPLED = frozenset(case.name for module in LOADED[FIRST:] for case in module.CASES)
ALL = os.environ.get("GRAPHGUARD_TEST_CASES") == "all"

# Correct, but not proved so far; newer families name theirs beside their cases.
NOT_YET = frozenset({"fused-qkv-groups-tp8", "published-padded-behind-13-on-8"}).union(
    *(getattr(module, "NOT_YET", ()) for module in LOADED)
)

# Faults whose guilty line is not the first or the second location named so far; likewise.
NOT_LOCATED = frozenset({
    "mlp-swiglu-resharded-as-one",
    "mlp-local-mean",
    "mlp-wrong-group",
    "attention-scaled-by-ranks",
    "attention-repeated-in-turn",
    "attention-replicated-in-turn",
    "fused-qkv-swapped",
    "fused-qkv-resharded-as-one",
    "fused-qkv-read-as-blocks",
    "rope-keys-backwards",
    "rope-angles-of-the-other-form",
    "embedding-without-zeros",
    "embedding-first-token-lost",
    "cross-entropy-own-maximum",
    "cross-entropy-own-sum",
    "cross-entropy-unmasked-backward",
    "tied-in-one-direction",
    "tied-without-copy",
    "sequence-fault-bias-gradient",
    "sequence-fault-no-sum",
    "sequence-fault-order",
    "data-fault-unequal-means",
    "data-fault-last-microbatch",
    "data-fault-reduced-again",
    "identities-fault-total-again",
    "identities-fault-local-max",
    "identities-fault-other-shift",
    "identities-fault-unequal-means",
    "published-fault-rotary",
    "published-fault-auxiliary-loss",
    "published-fault-padding",
    "published-fault-accumulation",
}).union(*(getattr(module, "NOT_LOCATED", ()) for module in LOADED))  # fmt: skip


class NotProved(Exception):
    """A correct case that the engine does not prove."""


def is_chosen(number, case):
    if ALL or number % EVERY == 0:
        return True
    world = math.prod(case.mesh.values())
    return case.name not in SAMPLED and (case.name in NOT_YET or world <= (4 if case.expect == "unproven" else 2))


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
    captured = gg.capture_function(
        case.sequential, case.distributed, mesh=case.mesh, inputs=case.inputs, local_inputs=case.local_inputs
    )
    if captured.joint.findings:
        assert case.expect == "unproven"
        return
    proof, found = proved(case, captured, monkeypatch)
    if math.prod(case.mesh.values()) <= (4 if ALL else MOST_RANKS):
        audit = audit_claims(found, captured.sequential, captured.joint, captured.relations)
        assert not audit.wrong, "\n".join(map(str, audit.wrong[:5]))
        assert audit.compared
    if case.expect == "unproven":
        assert not proof.proved
        if not case.name.startswith(("gpt-", "llama-")):
            assert is_located(case, proof) == (case.name not in NOT_LOCATED)
    elif not proof.proved:
        raise NotProved(proof.findings[0].message)
    else:
        found = {path: relation.placements and dict(relation.placements) for path, relation in proof.relations.items()}
        assert found == expected(case, captured)


def is_located(case, proof):
    """Whether the guilty line is the first or the second one named."""
    named = []
    for finding in proof.findings:
        for source in [finding.distributed, *finding.sources][:3]:
            if source is not None and (source.file, source.line) not in named:
                named.append((source.file, source.line))
    file, line = case.fault_location
    return any(name.endswith(file.split("/")[-1]) and at == line for name, at in named[:2])


def test_most_faults_are_located():
    faults = [case.name for case in CASES if case.fault and not case.name.startswith(("gpt-", "llama-"))]
    assert set(faults) >= NOT_LOCATED
    assert 2 * len(NOT_LOCATED) < len(faults)


def proved(case, captured, monkeypatch):
    """The proof, and the descriptions that it rests on."""
    found = []
    interpret = prover.interpret

    def recording(*args):
        found.append(interpret(*args))
        return found[-1]

    monkeypatch.setattr(prover, "interpret", recording)
    proof = prover.prove(
        captured.sequential,
        captured.joint,
        captured.relations,
        expected=expectations(case.outputs, captured, mesh_of(case.mesh)),
        ranges=_ranges(case.inputs),
    )
    return proof, found[0]


def expected(case, captured):
    """The relation of each output, one placement for each axis, as a proof states it; None for one that code states."""
    result = {}
    for path, relation in case.relation.items():
        if callable(relation):
            result[path] = None
            continue
        rank = len(captured.sequential.outputs[path].shape)
        stated = {axis: relation.get(axis, gg.Replicate()) if size > 1 else gg.Replicate() for axis, size in case.mesh.items()}
        result[path] = {axis: named(placement, rank) for axis, placement in stated.items()}
    return result


def named(placement, rank):
    if placement.is_shard():
        return f"Shard({placement.dim % rank})"
    return f"Partial({placement.reduce_op})" if placement.is_partial() else "Replicate"
