"""The README is true: its code runs, commands print what it shows, and its links lead to files."""

import re
import sys

import snippets
from harness import ROOT

README = ROOT / "README.md"
sys.path.insert(0, str(ROOT / "docs" / "hooks"))

import covered  # noqa: E402


def test_the_code_runs_and_prints_what_is_shown(tmp_path):
    snippets.run_page(README, tmp_path)


def test_links_lead_to_files():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert links and [link for link in links if not (ROOT / link).is_file()] == []


def test_every_family_of_cases_belongs_to_a_strategy():
    named = [family for strategy in covered.STRATEGIES for family in strategy.families]
    assert sorted(named) == sorted(family.name for family in covered.counted())
