"""The examples in JAX: each verdict is the expected one, and the line of a fault is one of the first two that are named."""

import os
import re

import pytest
from harness import ROOT

from graphguard.checks.discovery import find_checks
from graphguard.gallery.rows import row_of

FOLDER = ROOT / "examples" / "jax"
FILES = sorted(FOLDER.glob("*.py"))
CHECKS = [f"{file.stem}::{name}" for file in FILES for name in re.findall(r"@gg\.check[^\n]*\ndef (\w+)", file.read_text())]
NOT_LOCATED = {
    "ring_attention::other_way_round",
    "pipeline::one_step_early",
}  # lines near it


@pytest.mark.parametrize("name", CHECKS)
def test_an_example_has_its_verdict(name):
    stem, _, wanted = name.partition("::")
    (check,) = [each for each in find_checks(os.path.relpath(FOLDER / f"{stem}.py")) if each.name == wanted]
    row = row_of(check.outcome())
    assert row.as_expected, row
    if row.is_bug:
        assert (row.place is None) == (name in NOT_LOCATED), row
