"""The pages of docs/ are true: their code runs, commands print what the pages show, and the tables name what there is."""

import re
import sys

import pytest
import snippets
from harness import ROOT

sys.path.insert(0, str(ROOT / "docs" / "hooks"))

import rooms
import written

PAGES = sorted((ROOT / "docs").rglob("*.md"))
WITH_CODE = [page for page in PAGES if re.search(r"^```(python|console)", page.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.setattr("graphguard.scope._OF_PROCESS", {})
    monkeypatch.setenv("COLUMNS", "80")
    snippets.run_page(page, tmp_path)


def test_tables_numbers_and_the_map_are_as_the_command_writes_them():
    stale = [str(file) for file, text in written.written().items() if file.read_text() != text]
    assert stale == [], "run `python docs/hooks/written.py`"


def test_the_map_has_every_room_once_below_those_that_use_it():
    layers = rooms.layers()
    folders = {folder.name for folder in rooms.PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    assert sorted(room for layer in layers for room in layer) == sorted(rooms.imports()) and folders <= rooms.imports().keys()
    depth = {room: number for number, layer in enumerate(layers) for room in layer}
    for room, others in rooms.imports().items():
        assert all(depth[room] < depth[other] or other in rooms.cycle_of(room) for other in others)


def test_every_room_says_what_it_holds():
    places = [*rooms.imports(), *rooms.inner()]
    assert [place for place in places if not rooms.title(rooms.PACKAGE / place)] == []


def test_files_that_pages_name_are_there():
    """By their path from the top, or from a folder that the page is about."""
    folders = [ROOT, ROOT / "graphguard", ROOT / "graphguard" / "engine", ROOT / "tests" / "soundness"]
    own = ("checks.py", "file.py", "setup.py", "__main__.py", "CHECK.py")  # stand for files of the reader's
    for page in [ROOT / "CONTRIBUTING.md", *PAGES]:
        text = snippets.FENCE.sub("", page.read_text())
        named = re.findall(r"`([\w/]+\.(?:py|md|txt|json)|(?:graphguard|tests|docs|examples)/[\w/]*)`", text)
        missing = [name for name in named if name not in own and not any((folder / name).exists() for folder in folders)]
        assert missing == [], f"{page} names files that are not there"


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
