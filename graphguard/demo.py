"""`graphguard demo`: the example gallery, verified, as one table."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from graphguard.checks import Outcome, exit_code, find_all_checks
from graphguard.errors import UsageError

GALLERY = Path(__file__).parent.parent / "examples"


def main() -> int:
    if not GALLERY.is_dir():
        raise UsageError(f"the example gallery is not installed ({GALLERY}); run this from a clone of the repository")
    outcomes = [check.outcome() for check in find_all_checks([str(GALLERY)])]
    console = Console()
    console.print(_table(outcomes))
    for outcome in outcomes:
        console.print(f"{outcome.check.name}: {_reason(outcome)}", highlight=False, markup=False, soft_wrap=True)
    return exit_code(outcomes)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="The gallery", box=SIMPLE_HEAD)
    for column in ("check", "ranks", "ops", "expected", "verdict", "seconds"):
        table.add_column(column, justify="right" if column in ("ranks", "ops", "seconds") else "left", no_wrap=True)
    for outcome in outcomes:
        report = outcome.report
        if report is None:
            table.add_row(outcome.check.name, "", "", outcome.check.expect, "error", "")
            continue
        stats = report.stats
        seconds = sum(value or 0.0 for value in stats["seconds"].values())
        numbers = str(stats["ranks"]), str(stats["ops"])
        table.add_row(outcome.check.name, *numbers, outcome.check.expect, report.verdict, f"{seconds:.2f}")
    return table


def _reason(outcome: Outcome) -> str:
    """One line on why the verdict is what it is."""
    if outcome.report is None:
        return str(outcome.error)
    if outcome.report.findings:
        return str(outcome.report.findings[0])
    return "; ".join(str(outcome.report.relation).splitlines())
