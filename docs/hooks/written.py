"""Texts in README and docs that follow from the code or from other pages: tables, numbers, and the map of the rooms.

`python docs/hooks/written.py` writes them, and a test compares.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent)]

import covered  # noqa: E402
import rooms  # noqa: E402

from graphguard.sweep.ledger import Ledger  # noqa: E402
from graphguard.sweep.page import page  # noqa: E402
from graphguard.verdict.limits import limits_of  # noqa: E402

README, DOCS = ROOT / "README.md", ROOT / "docs"
FRONT_PAGE = (  # bugs that stand for the others: of several projects and strategies
    "mean_of_means", "final_norm_gradient", "pipeline_unscaled", "norm_gradient_mesh", "row_bias_before_sum",
    "sync_batch_norm_unequal", "expert_norm_averaged", "shared_expert_twice", "ring_attention_stale_kv",
    "sliding_window_dropped",
)  # fmt: skip


def written():
    """Each file that has such texts, as it should be."""
    pages = {DOCS / "inside" / "rooms.md": rooms.page(), DOCS / "inside" / "rooms.svg": rooms.picture()}
    for file, pattern, number in numbers():
        text = pages.get(file) or file.read_text()
        (match,) = re.finditer(pattern, text)
        pages[file] = text[: match.start(1)] + str(number) + text[match.end(1) :]
    tables = [
        (README, "bugs", ten_bugs()),
        (README, "coverage", covered.areas()),
        (DOCS / "capture.md", "findings", findings(of_communication=True)),
        (DOCS / "verify.md", "findings", findings(of_communication=False)),
        *((DOCS / "sweeps.md", file.stem, swept(file)) for file in sorted((DOCS / "sweeps").glob("*.jsonl"))),
    ]
    for file, name, lines in tables:
        pages[file] = with_table(pages.get(file) or file.read_text(), name, lines)
    return pages


def with_table(text, name, lines, hook="written.py"):
    """The page with the table between the comments that have its name."""
    begin, end = f"<!-- {name}: python docs/hooks/{hook} -->\n", f"\n<!-- end of {name} -->"
    before, rest = text.split(begin)
    return before + begin + "\n" + "\n".join(lines) + "\n" + rest[rest.index(end) :]


def numbers():
    """Pages, patterns whose one group has the number, and what it is."""
    limits = limits_of()
    gigabytes, seconds = limits.oracle.trial_bytes >> 30, limits.oracle.trial_seconds
    millions = constant("coverage", "MOST_ELEMENTS") // 10**6
    refuted, repaired, named = score()
    return [
        (DOCS / "lemmas.md", r"one for each of (\d+) operators of torch", len(constant("known", "rows")())),
        (DOCS / "verify.md", r"Above (\d+ GB, or \d+) s for a trial", f"{gigabytes} GB, or {seconds}"),
        (DOCS / "verify.md", r"Beyond (\d+ GB or \d+) seconds", f"{gigabytes} GB or {seconds}"),
        (DOCS / "verify.md", r"executes both programs, (\d+) if left out", constant("judge", "TRIALS")),
        (DOCS / "verify.md", r"more than (\d+) million elements", millions),
        (DOCS / "soundness.md", r"more than (\d+) million elements", millions),
        (DOCS / "semantics.md", r"up to (\d+) ranks are described one by one", limits.engine.ranks_apart),
        (README, r"\*\*(\d+ of \d+)\*\* programs are refuted", refuted),
        (README, r"\*\*(\d+ of \d+)\*\* repairs verified", repaired),
        (README, r"first two that the report names in \*\*(\d+)\*\*", named),
        (
            README,
            r"\[(\d+) silent faults\]",
            re.search(r"^(\d+) silent faults; ", (DOCS / "found.md").read_text(), re.MULTILINE)[1],
        ),
        (README, r"([\d,]+) mutants of the proof cases", stated("campaign.md", "mutants")),
        (README, r"([\d,]+) random programs", stated("random.md", "programs")),
        (
            README,
            r"(\d+) false\s+proofs",
            int(stated("campaign.md", "false proofs")) + int(stated("random.md", "false claims, false proofs")),
        ),
    ]


def findings(of_communication):
    """The table of kinds: those of the ranks among themselves, or the others."""
    kinds = [kind for kind in constant("findings", "KINDS").values() if kind.of_communication is of_communication]
    return ["| code | finding | what it says |", "|---|---|---|", *(f"| {k.code} | `{k.name}` | {k.meaning} |" for k in kinds)]


def swept(file):
    """The table of a sweep whose rows were kept in this file."""
    return page(list(Ledger(file).rows.values())).splitlines()


def constant(file, name):
    """What the code calls so, in whichever room the file stands."""
    (path,) = rooms.PACKAGE.rglob(f"{file}.py")
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return getattr(importlib.import_module(module), name)


def stated(page, row):
    """A number of the table at the head of a page that a campaign wrote; of several, the first one."""
    return re.search(rf"^\| {row} \|\D*([\d,]*\d)", (DOCS / page).read_text(), re.MULTILINE)[1]


# ---------------------------------------------------------------------- from the page of bugs
def ten_bugs():
    """The bugs of the front page: who reported it, what was wrong, and the line that the report names first."""
    lines = ["| reported in | what was wrong | the line that the report names first |", "|---|---|---|"]
    for stem in FRONT_PAGE:
        (cells,) = (line.strip("| ").split(" | ") for line in fault_lines() if f"/{stem}.py)" in line)
        report, line = re.match(r"\[[^]]*\]\([^)]*\)", cells[0])[0], re.search(r"<br>line \d+: (`.*`)$", cells[4])[1]
        lines.append(f"| {report} | [{cells[1]}](examples/bugs/{stem}.py) | {line} |")
    return lines


def fault_lines():
    return [line for line in bugs().split("## Reports")[0].splitlines() if "](../examples/bugs/" in line]


def score():
    """Refuted faults, verified repairs, and faults whose line is one of the first two."""
    faults = fault_lines()
    refuted = sum("| refuted |" in line for line in faults)
    named = sum(line.endswith(("| 1st |", "| 2nd |")) for line in faults)
    return f"{refuted} of {len(faults)}", re.search(r"^(\d+ of \d+) repairs", bugs(), re.MULTILINE)[1], named


def bugs():
    return (DOCS / "bugs.md").read_text()


if __name__ == "__main__":
    for file, text in written().items():
        file.write_text(text)
