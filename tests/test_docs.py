"""The pages of docs/ are true: their code runs, commands print what the pages show, and the tables name what there is."""

import re
from pathlib import Path

import pytest
import snippets

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
WITH_CODE = [page for page in PAGES if re.search(r"^```(python|console)", page.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.setattr("graphguard.lemmas.user._REGISTERED", {})
    monkeypatch.setenv("COLUMNS", "80")
    snippets.run_page(page, tmp_path)


def test_recipes_are_yaml():
    yaml = pytest.importorskip("yaml")
    recipes = [block for page in PAGES for block in snippets.blocks(page.read_text()) if block.language == "yaml"]
    assert recipes
    for recipe in recipes:
        assert yaml.safe_load(recipe.code)


def test_what_a_page_shows_is_compared_but_for_seconds_and_what_was_left_out():
    printed = "verified: a\n  out = rank0.out\n  proof 0.12 s\n1 verified\n"
    assert snippets.matches(printed, "verified: a\n...\n  proof 3.40 s\n1 verified\n")
    assert snippets.matches(printed, "...\n1 verified\n")
    assert not snippets.matches(printed, "verified: a\n...\n  proof 3.40 s\n")
    assert not snippets.matches(printed, printed.replace("rank0", "rank1"))


def test_a_change_must_fit_the_file(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("a = 1\nb = 2\n")
    snippets.change(file, " a = 1\n-b = 2\n+b = 3\n")
    assert file.read_text() == "a = 1\nb = 3\n"
    with pytest.raises(AssertionError, match=r"model.py does not have exactly one"):
        snippets.change(file, "-b = 2\n+b = 4\n")


def test_a_block_that_is_not_run_says_why():
    run, left = snippets.blocks("```python\na\n```\n\n<!-- not run: slow -->\n```python\nb\n```\n")
    assert (run.skipped, left.skipped, left.line) == (False, True, 7)
