"""The oracle on proof cases: every fault is seen to differ, and no correct program is."""

import importlib
import math

import pytest
from harness import fails, judged

MODULES = ("mlp", "attention", "fused_qkv", "rope", "vocabulary", "norms", "sequence", "data", "identities", "published")
SMALL = [
    case for name in MODULES for case in importlib.import_module(f"cases.{name}").CASES if math.prod(case.mesh.values()) <= 2
]
FAULTS = [case for case in SMALL if case.fault]
CORRECT = [case for case in SMALL if not case.fault]


def some(cases, count):
    """So many of them, at even distances."""
    return [cases[number * len(cases) // count] for number in range(count)]


@pytest.mark.parametrize("case", some(FAULTS, 25), ids=lambda case: case.name)
def test_faults_are_seen_to_differ(case):
    result = judged(case.sequential, case.distributed, **case.options)
    assert result.different and fails(result.counterexample.script)


@pytest.mark.parametrize("case", some(CORRECT, 8), ids=lambda case: case.name)
def test_correct_programs_are_never_different(case):
    result = judged(case.sequential, case.distributed, **case.options)
    assert not result.different and not result.skipped and not result.undecided
