"""Pages that are made from the code when the site is built, so that they say what the code says.

A page per finding and per family of lemmas (`graphguard explain` prints the same), a page per example, the changes, and the
tables of coverage.md and of the front page.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import textwrap
from pathlib import Path

from mkdocs.structure.files import File

from graphguard.graph.findings import KINDS
from graphguard.lemmas.known import rows
from graphguard.render.explain import PAGES

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent)]

import covered  # noqa: E402
import written  # noqa: E402

TABLES = {  # by their marks in the pages
    "<!-- strategies -->": covered.strategies,
    "<!-- areas -->": covered.areas,
    "<!-- cases -->": covered.cases,
    "<!-- ten bugs -->": written.ten_bugs,
}
PROGRAM = re.compile(r"\]\((?:\.\./)?examples/(\S+?)\.py\)")


def on_config(config):
    """Put the pages below the index that lists them."""
    for section in config.nav:
        (title, pages), *_ = section.items()
        section[title] = [entry for page in pages for entry in below(page)]
    return config


def below(page):
    if page == "findings/index.md":
        return [{"Findings": [page, *({f"{kind.code} {kind.name}": f"findings/{kind.code}.md"} for kind in KINDS.values())]}]
    if page == "operators/index.md":
        return [{"Operators": [page, *({name: family_page(name)} for name in sorted({row.kind for row in rows()}))]}]
    if page == "gallery/index.md":
        strategies, bugs, found = ([page_of(file) for file in files] for files in examples())
        return [{"Examples": [page, {"Strategies": strategies}, {"Faults": bugs}, {"Found in libraries": found}]}]
    if page == "inside/rooms.md":
        others = sorted(file.name for file in (ROOT / "docs" / "inside").glob("*.md") if file.name != "rooms.md")
        return [page, *(f"inside/{name}" for name in others)]
    return [page]


def on_files(files, config):
    for path, text in {**findings(), **operators(), **gallery(), "changelog.md": (ROOT / "CHANGELOG.md").read_text()}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown, page, **_):
    """Tables in the place of their marks, and the pages of examples in the place of their files."""
    for mark, lines in TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(lines()))
    return PROGRAM.sub(r"](gallery/\1.md)", markdown) if "/" not in page.file.src_uri else markdown


# ---------------------------------------------------------------------- findings
def findings():
    pages = {f"findings/{kind.code}.md": finding(kind, PAGES[kind.name]) for kind in KINDS.values()}
    lines = [
        "# Findings",
        "",
        "A finding is one fault, or the place where a proof stopped. The kinds are a closed list. `graphguard explain GG205` "
        "prints the page of one. Codes from GG101 on are faults of the ranks among themselves, seen without the sequential "
        "program; codes from GG201 on compare the ranks with it.",
        "",
        *table(
            ("code", "finding", "what it says"),
            [(f"[{kind.code}]({kind.code}.md)", f"`{kind.name}`", kind.meaning) for kind in KINDS.values()],
        ),
    ]
    return {"findings/index.md": "\n".join(lines), **pages}


def finding(kind, page):
    code = page.program.strip()
    return "\n".join([
        f"# {kind.code} {kind.name}", "", kind.meaning, "",
        "## Why it is a law", "", f"{kind.law} {page.law}", "",
        "## Example", "", "```python", code, "```", "",
        "## What to do", "", page.advice,
    ])  # fmt: skip


# ---------------------------------------------------------------------- lemmas
def operators():
    families = {}
    for row in rows():
        families.setdefault(row.kind, []).append(row)
    pages = {family_page(name): family(name, members) for name, members in families.items()}
    listed = [(f"[{name}](lemmas-{name}.md)", title_of(name), str(len(members))) for name, members in sorted(families.items())]
    lines = [
        "# Operators by family",
        "",
        f"The prover knows {len(rows())} operators of torch. In-place, `out=` and `_foreach_` variants follow from them. "
        "`graphguard explain aten.mm` prints one row, `graphguard lemmas ls` prints them all, and `graphguard lemmas audit` "
        "compares them with torch.",
        "",
        *table(("family", "what is in it", "operators"), listed),
    ]
    return {"operators/index.md": "\n".join(lines), **pages}


def family_page(name):
    """One of the families is called index."""
    return f"operators/lemmas-{name}.md"


def family(name, members):
    listed = [(f"`{row.operator}`", cell(row.definition), cell(conditions(row)) or "always") for row in members]
    lines = [
        f"# Lemmas: {name}",
        "",
        title_of(name),
        "",
        "Where the last column does not hold, the operator is opaque: equal whole operands give equal results, no more.",
        "",
        *table(("operator", "it computes", "the lemma is used where"), listed),
        "",
        f"`graphguard lemmas audit {name}` compares these with torch.",
    ]
    return "\n".join(lines)


def title_of(name):
    return importlib.import_module(f"graphguard.lemmas.rows.{name}").__doc__.strip().split("\n\n")[0].replace("\n", " ")


def conditions(row):
    return row.conditions if isinstance(row.conditions, str) else "; ".join(row.conditions)


# ---------------------------------------------------------------------- examples
def gallery():
    strategies, bugs, found = examples()
    pages = {page_of(file): example(file) for file in [*strategies, *bugs, *found]}
    lines = [
        "# Examples",
        "",
        "Each file is a check that you can copy. `graphguard demo` runs them all. [Bugs](../bugs.md) has a table of the faulty "
        "ones, with what is found.",
        "",
        "## Strategies",
        "",
        *table(("file", "what it shows"), [linked(file) for file in strategies]),
        "",
        "## Bugs",
        "",
        *table(("file", "what it shows"), [linked(file) for file in bugs]),
        "",
        "## Found in libraries",
        "",
        "With what they share: [the page of findings](../found.md) has the numbers.",
        "",
        *table(("file", "what it shows"), [linked(file) for file in found]),
    ]
    return {"gallery/index.md": "\n".join(lines), **pages}


def examples():
    return [sorted((ROOT / "examples" / folder).glob("*.py")) for folder in ("", "bugs", "found")]


def page_of(file):
    return f"gallery/{file.relative_to(ROOT / 'examples').with_suffix('.md').as_posix()}"


def linked(file):
    target = page_of(file).removeprefix("gallery/")
    return f"[{file.stem}]({target})", cell(docstring(file).split("\n")[0])


def example(file):
    path, code = file.relative_to(ROOT).as_posix(), file.read_text()
    fence = f'```python title="{path}"'
    return "\n".join([f"# {file.stem}", "", fence, code.rstrip(), "```", "", f"Run it with `graphguard verify {path}`."])


def docstring(file):
    return ast.get_docstring(ast.parse(file.read_text())) or ""


# ---------------------------------------------------------------------- Markdown
def table(head, listed):
    lines = [head, tuple("---" for _ in head), *listed]
    return [f"| {' | '.join(line)} |" for line in lines]


def cell(text):
    return textwrap.dedent(text).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("\n", " ")
