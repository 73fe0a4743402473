"""The example gallery: every check has its verdict, the page of bugs says what they give, and `graphguard demo` shows it."""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap

import pytest
from harness import command

from graphguard.checks.discovery import find_checks
from graphguard.gallery import bugs, demo
from graphguard.gallery.rows import GALLERY, GalleryRow, fault_line, fault_lines, headline, issues, reporters, row_of

BUGS = sorted((GALLERY / "bugs").glob("*.py"))
STRATEGIES = sorted(GALLERY.glob("*.py"))
ALL = os.environ.get("GRAPHGUARD_TEST_CASES") == "all"
RUN = BUGS if ALL else BUGS[::10]  # `make demo` runs them all, too
LONGEST = 92
LOCATED = {"1st": 61, "2nd": 15}  # of the faulty lines: named first, named second
REPORTS = 119  # pairs of a public report and a program that has its fault


SEEDED = {  # faults of each family of strategies: at least four, each with the line that is to be named for it
    "context_parallel": 5,
    "expert_parallel": 5,
    "pipeline_two_stages": 4,
    "sync_batch_norm": 4,
    "zero_sharded_step": 5,
    "low_rank_adapters": 4,
    "matrix_products": 4,
    "uneven_sizes": 5,
    "three_axes": 4,
    "dropout": 4,
    "inference_cache": 5,
    "ring_attention": 1,
}
NAMED_LATER = {
    "new_token_sees_the_first_key_alone", "layers_that_are_not_summed", "padding_counts_in_the_softmax",
    "second_step_sees_old_parameters",
}  # fmt: skip


# ---------------------------------------------------------------------- the gallery itself
@pytest.mark.parametrize("file", STRATEGIES, ids=lambda file: file.stem)
def test_a_strategy_has_its_verdicts_and_the_faulty_lines_are_named(file):
    checks = find_checks(str(file))
    proved, wrong = ([check for check in checks if (check.expect == "refuted") is fault] for fault in (False, True))
    for check in proved + (wrong if ALL else wrong[::4]):
        done = row_of(check.outcome())
        assert done.as_expected, f"{check}: {done.verdict}: {done.found}"
        if fault_lines(str(file), check.name):
            assert (done.place is None) == (check.name in NAMED_LATER), f"{check}: {done.named}"


def test_every_family_has_its_seeded_faults():
    faults = {file.stem: [check for check in find_checks(str(file)) if check.expect == "refuted"] for file in STRATEGIES}
    marked = {stem: [each.name for each in found if fault_lines(each.file, each.name)] for stem, found in faults.items()}
    assert {stem: len(names) for stem, names in marked.items() if names} == SEEDED
    assert {name for names in marked.values() for name in names} >= NAMED_LATER


@pytest.mark.parametrize("file", RUN, ids=lambda file: file.stem)
def test_a_bug_has_its_verdicts_and_its_line_of_the_page(file, monkeypatch):
    monkeypatch.chdir(GALLERY.parent)
    done = [row_of(check.outcome()) for check in find_checks(str(file))]
    for each in done:
        assert each.as_expected, f"{each.stem}::{each.name}: {each.verdict}: {each.found}"
    (line,) = (line for line in page_table("Faults") if f"(../{file.relative_to(GALLERY.parent)})" in line)
    assert line == bugs.fault_line_of(str(file), done).rstrip("\n"), "run `python -m graphguard.gallery.bugs`"


def page_table(title):
    """The rows of the table below that head."""
    (part,) = (part for part in bugs.PAGE.read_text().split("\n## ") if part.startswith(f"{title}\n"))
    return [line for line in part.splitlines() if line.startswith("| ")][1:]


def test_the_page_has_every_bug_and_says_how_many_are_located():
    faults = page_table("Faults")
    assert len(faults) == len(BUGS)
    assert {place: sum(line.endswith(f"| {place} |") for line in faults) for place in LOCATED} == LOCATED
    undecided = sum("| refuted |" not in line for line in faults)
    later = len(BUGS) - sum(LOCATED.values()) - undecided
    text = bugs.PAGE.read_text()
    assert f"\n| {len(BUGS)} faults | {LOCATED['1st']} | {LOCATED['2nd']} | {later} | {undecided} |\n" in text
    assert text.startswith(bugs.HEAD)


def test_the_page_has_every_report_with_its_programs():
    lines = page_table("Reports")
    reports = {(issue, file.stem) for file in BUGS for issue in issues(reporters(str(file)))}
    assert len(lines) == len(reports) == REPORTS
    for (repository, number), stem in reports:
        report = f"[{repository} #{number}](https://github.com/{repository}/issues/{number})"
        start = f"| {report} | [{stem}](../examples/bugs/{stem}.py) |"
        assert any(line.startswith(start) for line in lines)


def test_reports_without_a_program_have_a_reason():
    lines = bugs.NOT_SHOWN.read_text().splitlines()
    assert [line.count("|") for line in lines] == [4] * len(lines) and bugs.PAGE.read_text().endswith(bugs.not_shown())
    assert all(issues(line.split("|")[1].strip()) for line in lines[2:])


@pytest.mark.parametrize("file", BUGS, ids=lambda file: file.stem)
def test_a_bug_is_a_short_file_with_a_fixed_and_a_buggy_check_its_source_and_its_line(file):
    checks = {check.name: check.expect for check in find_checks(str(file))}
    assert next(iter(checks)) == "fixed" and checks.pop("buggy") in ("refuted", "unproven") and "refuted" not in checks.values()
    assert fault_line(str(file)) is not None
    who, what = headline(str(file))
    assert what and (
        re.search(r"/[\w.-]+ #\d+", who) or who.startswith(("Published with GraphGuard", "TrainVerify", "A common mistake"))
    )
    assert len(file.read_text().splitlines()) <= LONGEST


def test_the_published_bugs_are_there():
    sources = [headline(str(file))[0] for file in BUGS]
    assert sum(who.startswith("Published with GraphGuard") for who in sources) == 6
    assert sum(who.startswith("TrainVerify") for who in sources) == 14


# ---------------------------------------------------------------------- the table
CHECKS = """
    import graphguard as gg
    from graphguard import Shard

    BUG_LINE = "return y * 3"

    def seq(x):
        return x * 2

    def good(x):
        return x * 2

    def bad(x):
        y = x + 0
        return y * 3

    def verify(program):
        return gg.verify(seq, program, mesh={"tp": 2}, inputs={"x": gg.Input((4,), Shard(0))})
"""
PASSES = """
    @gg.check
    def passes():
        return verify(good)
"""
CAUGHT = """
    @gg.check(expect="refuted")
    def caught():
        return verify(bad)
"""
MISSED = """
    @gg.check
    def missed():
        return verify(bad)
"""
BROKEN = """
    @gg.check
    def broken():
        return 1
"""
STOPPED = """
    @gg.check
    def stopped():
        raise KeyboardInterrupt
"""


def gallery(folder, monkeypatch, **files):
    (folder / "bugs").mkdir()
    for name, parts in files.items():
        file = folder / ("bugs" if name.startswith("bug") else "") / f"{name}.py"
        file.write_text("".join(map(textwrap.dedent, (CHECKS, *parts))))
    monkeypatch.setattr(demo, "GALLERY", folder)
    monkeypatch.setattr(demo, "_PROCESSES", 1)
    monkeypatch.setenv("COLUMNS", "100")


def shown(capsys):
    code, out, _ = command(capsys, "demo")
    return code, out.splitlines()


def test_the_demo_is_a_table_of_strategies_and_bugs(tmp_path, capsys, monkeypatch):
    gallery(tmp_path, monkeypatch, strategy=[PASSES], bug=[PASSES, CAUGHT])
    code, lines = shown(capsys)
    assert code == 0 and all(len(line) <= 100 for line in lines)
    assert lines[0] == "Verifying the gallery: 3 checks"
    heads = [line.split() for line in lines if line.endswith("seconds")]
    assert heads == [[title, "verdict", "what", "was", "found", "line", "seconds"] for title in ("Strategies", "Bugs")]
    (strategy,) = (line for line in lines if line.startswith("strategy "))
    assert strategy.split()[1:5] == ["verified", "out", "=", "concat(rank0.out,"]
    (number,) = (number for number, line in enumerate(lines) if line.startswith("bug::caught"))
    assert re.fullmatch(r"bug::caught +refuted +GG202 .* 15 +\d+\.\d\d", lines[number])
    assert "> return y * 3" in [line.strip() for line in lines[number + 1 : number + 4]]
    assert re.fullmatch(r"2 verified, 1 refuted; all as expected \(\d+ s\)", lines[-3])
    assert lines[-2] == "1 of 1 bugs refuted; the faulty line is the first or second one named in 1"


def test_the_demo_has_faults_of_installed_libraries_and_does_not_count_their_lines(tmp_path, capsys, monkeypatch):
    gallery(tmp_path, monkeypatch, bug=[PASSES, CAUGHT])
    (tmp_path / "found").mkdir()
    for name in ("torch_fault", "megatron_fault"):
        (tmp_path / "found" / f"{name}.py").write_text((tmp_path / "bugs" / "bug.py").read_text())
    monkeypatch.setattr(demo, "_is_installed", lambda module: module == "torch")
    code, lines = shown(capsys)
    assert code == 0 and lines[0] == "Verifying the gallery: 4 checks"
    assert [line for line in lines if line.startswith("Found in libraries")] and "megatron" not in "".join(lines)
    assert lines[-2] == "1 of 1 bugs refuted; the faulty line is the first or second one named in 1"


def test_the_demo_marks_what_is_not_as_expected(tmp_path, capsys, monkeypatch):
    gallery(tmp_path, monkeypatch, strategy=[PASSES, MISSED])
    code, lines = shown(capsys)
    assert code == 1
    (missed,) = (line for line in lines if line.startswith("strategy::missed"))
    assert missed.split()[1] == "refuted!"
    assert re.fullmatch(r"1 verified, 1 refuted; 1 not as expected, marked ! \(\d+ s\)", lines[-1])


def test_the_demo_shows_a_check_that_cannot_run(tmp_path, capsys, monkeypatch):
    gallery(tmp_path, monkeypatch, strategy=[BROKEN, PASSES])
    code, lines = shown(capsys)
    assert code == 2
    (broken,) = (line for line in lines if line.startswith("strategy::broken"))
    assert broken.split()[1:6] == ["error!", "the", "check", "broken", "returned"]


def test_the_demo_says_what_was_done_when_it_is_interrupted(tmp_path, capsys, monkeypatch):
    gallery(tmp_path, monkeypatch, strategy=[PASSES, STOPPED])
    code, _, err = command(capsys, "demo")
    assert code == 130 and err == "interrupted: 1 of 2 checks were done\n"


def test_without_a_gallery_the_demo_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "GALLERY", tmp_path / "none")
    code, _, err = command(capsys, "demo")
    expected = f"error: the example gallery is not installed ({tmp_path / 'none'}); run this from a clone of the repository\n"
    assert code == 2 and err == expected


# ---------------------------------------------------------------------- the page
def bug(tmp_path, named, verdict="refuted"):
    file = tmp_path / "fault.py"
    file.write_text('"""some-org/repo.py #12, #34, other/one #5: a | sign.\n\nMore."""\n\nBUG_LINE = "x = 1"\n\nx = 1\n')
    found = GalleryRow(str(file), "buggy", "refuted", verdict, "GG205 out | in", tuple(named), 0.5, 0)
    return str(file), [GalleryRow(str(file), "fixed", "verified", "verified", "out = rank0.out", (), 0.5, 0), found]


@pytest.mark.parametrize(
    ("named", "place"),
    [
        ([("a/fault.py", 7)], "1st"),
        ([("a/other.py", 7), ("a/fault.py", 7)], "2nd"),
        ([("a/fault.py", 1), ("a/fault.py", 2), ("a/fault.py", 7)], "no"),
        ([], "no"),
    ],
)
def test_a_line_of_the_page_says_where_the_faulty_line_is_named(tmp_path, named, place):
    file, done = bug(tmp_path, named)
    assert bugs.fault_line_of(file, done) == (
        "| [some-org/repo.py #12](https://github.com/some-org/repo.py/issues/12), "
        "[#34](https://github.com/some-org/repo.py/issues/34), [other/one #5](https://github.com/other/one/issues/5) "
        "([fault](../examples/bugs/fault.py)) | a \\| sign | verified | refuted | "
        f"GG205 out \\| in | {place} |\n"
    )


def test_the_page_counts_faults_and_reports_and_leaves_strategies_out(tmp_path):
    file, done = bug(tmp_path, [("fault.py", 7)])
    strategy = GalleryRow("mlp.py", "mlp", "verified", "verified", "out = rank0.out", (), 0.5, 0)
    page = bugs.bugs_page([strategy, *done])
    assert "\n| 1 faults | 1 | 0 | 0 | 0 |\n| 3 public reports | 3 | 0 | 0 | 0 |\n\n1 of 1 repairs are verified.\n" in page
    assert bugs.FAULTS + bugs.fault_line_of(file, done) + bugs.REPORTS in page
    program = "[fault](../examples/bugs/fault.py) | verified | refuted | 1st |"
    assert page.split(bugs.REPORTS)[1].startswith(f"| [other/one #5](https://github.com/other/one/issues/5) | {program}\n")


def test_a_fault_that_no_verdict_catches_is_counted_as_not_decided(tmp_path):
    _, (repair, fault) = bug(tmp_path, [("fault.py", 7)], verdict="unproven")
    undecided = dataclasses.replace(fault, expect="unproven")
    assert "\n| 1 faults | 0 | 0 | 0 | 1 |\n" in bugs.bugs_page([repair, undecided])


def test_a_repair_that_is_not_proved_is_named(tmp_path):
    _, (repair, fault) = bug(tmp_path, [("fault.py", 7)])
    page = bugs.bugs_page([dataclasses.replace(repair, verdict="unproven"), fault])
    named = "These are not decided yet, and say why: [fault](../examples/bugs/fault.py).\n"
    assert f"\n0 of 1 repairs are verified. {named}" in page


def test_a_report_with_several_faults_counts_as_its_worst(tmp_path):
    _, first = bug(tmp_path, [("fault.py", 7)])
    (tmp_path / "other").mkdir()
    _, second = bug(tmp_path / "other", [("fault.py", 1)])
    assert "\n| 2 faults | 1 | 0 | 1 | 0 |\n| 3 public reports | 0 | 0 | 3 | 0 |\n" in bugs.bugs_page([*first, *second])


def test_reports_of_the_same_fault_are_named_in_the_last_paragraph(tmp_path):
    file = tmp_path / "fault.py"
    file.write_text('"""a/b #1: wrong.\n\nMore: of it.\n\nAlso: a/b #2,\nc/d #3.\n"""\n')
    assert reporters(str(file)) == "a/b #1, a/b #2, c/d #3"
    assert issues(reporters(str(file))) == [("a/b", 1), ("a/b", 2), ("c/d", 3)]
    assert issues("A common mistake") == []
