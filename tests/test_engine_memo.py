"""Layers that are alike are described once: what is taken from memory is what would be described anew."""

import pytest
from cases import decoders, rope

from graphguard.api import capture_function
from graphguard.engine.memo import Memo
from graphguard.engine.prove import interpret
from graphguard.engine.value import same

CASES = [decoders.CASES[0], next(case for case in decoders.CASES if "llama" in case.name), rope.CASES[0]]


@pytest.fixture
def remembered(monkeypatch):
    """Counts the descriptions that are taken from memory; each is also made anew and compared."""
    seen = []
    describe = Memo.describe

    def compared(memo, what, operands, make):
        before = memo.again
        results = describe(memo, what, operands, make)
        if memo.again > before:
            atoms = next(memo._table._ids)
            anew = make()
            assert len(anew) == len(results)
            assert all(same(a, b) for a, b in zip(anew, results, strict=True)), what
            assert next(memo._table._ids) == atoms + 1, f"{what} anew made atoms that its memory had not made"
            seen.append(what)
        return results

    monkeypatch.setattr(Memo, "describe", compared)
    return seen


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_remembered_is_what_would_be_described(case, remembered):
    captured = capture_function(
        case.sequential, case.distributed, mesh=case.mesh, inputs=case.inputs, local_inputs=case.local_inputs
    )
    interpret(captured.sequential, captured.joint, captured.relations, {})
    assert len(remembered) > 10
