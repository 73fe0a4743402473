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
