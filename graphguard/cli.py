"""The command line. Results on stdout, progress on stderr and only on a terminal; exit code 2 for anything that went wrong."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphguard import __version__
from graphguard.errors import GraphGuardError, ProgramError

if TYPE_CHECKING:
    from graphguard.api import Job
    from graphguard.checks import Outcome

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


lemmas = typer.Typer(no_args_is_help=True, help="The rules that the prover has for operators.")
app.add_typer(lemmas, name="lemmas")
_COLOURS = {"verified": "green", "refuted": "red", "unproven": "yellow"}


class VerifyFormat(StrEnum):
    full = "full"
    concise = "concise"
    json = "json"


class CaptureFormat(StrEnum):
    text = "text"
    json = "json"


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """GraphGuard: a static verifier for distributed deep learning."""
    if version:
        print(f"graphguard {__version__}")
        raise typer.Exit


@app.command()
def capture(
    target: Annotated[str, typer.Argument(metavar="FILE.py::CHECK", help="The check whose programs are captured.")],
    rank: Annotated[int | None, typer.Option(help="Show this rank only.")] = None,
    sequential: Annotated[bool, typer.Option("--sequential", help="Show the sequential program only.")] = False,
    output_format: Annotated[CaptureFormat, typer.Option(help="How to print the graphs.")] = CaptureFormat.text,
) -> None:
    """Show the graphs of a check: the sequential program, and every rank. Exits with 1 if the ranks do not fit together."""
    from graphguard import graph_json
    from graphguard.capture.session import capture as capture_subject
    from graphguard.errors import UsageError

    if sequential and rank is not None:
        raise UsageError("give --rank or --sequential, not both")
    job = _job(target)
    world = job.subject.mesh.size
    if rank is not None and not 0 <= rank < world:
        raise UsageError(f"there is no rank {rank}: the mesh {job.subject.mesh} has ranks 0 to {world - 1}")
    captured = capture_subject(job.subject, progress=_progress if sys.stderr.isatty() else None)
    _clear_progress()
    graphs = [captured.sequential, *captured.ranks]
    if sequential:
        graphs = [captured.sequential]
    elif rank is not None:
        graphs = [captured.ranks[rank]]
    if output_format is CaptureFormat.json:
        print("[" + ",\n".join(graph_json.dumps(graph) for graph in graphs) + "]")
    else:
        print("\n\n".join(map(str, graphs)))
        for text in captured.assumptions:
            print(f"\nassumed: {text}")
    for finding in captured.joint.findings:
        print(f"\n{finding}", file=sys.stderr)
    if captured.joint.findings:
        raise typer.Exit(1)


@app.command()
def verify(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, folders, or FILE.py::CHECK.")],
    output_format: Annotated[VerifyFormat, typer.Option(help="How to print the reports.")] = VerifyFormat.full,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only checks whose verdict is not the expected one.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Everything that the reports have.")] = False,
) -> None:
    """Run checks. Exits with 0 if every verdict is the expected one, 1 if something was refuted, 2 on errors, 3 if something
    is unproven."""
    from graphguard.checks import exit_code, find_all_checks
    from graphguard.errors import UsageError

    if quiet and verbose:
        raise UsageError("give -q or -v, not both")
    outcomes = []
    with _progress_shown():
        for check in find_all_checks(paths):
            outcome = check.outcome()
            outcomes.append(outcome)
            _clear_progress()
            if outcome.error is not None:
                _print_error(outcome.error, f"{check}: ")
            if output_format is not VerifyFormat.json and not (quiet and outcome.as_expected):
                _show(outcome, output_format, verbose)
    if output_format is VerifyFormat.json:
        print(json.dumps({"version": 1, "checks": [outcome.to_plain() for outcome in outcomes]}, indent=2))
    elif not quiet:
        print(_summary(outcomes))
    raise typer.Exit(exit_code(outcomes))


@lemmas.command("ls")
def list_lemmas() -> None:
    """List the operators that the prover knows, with what it knows of them."""
    from graphguard.lemmas.registry import rows

    _print_columns(
        ("operator", "kind", "definition", "conditions"),
        [(row.operator, row.kind, row.definition, _joined(row.conditions)) for row in rows()],
    )


@app.command()
def bench(what: Annotated[str, typer.Argument(help="Which benchmark: capture or engine.")] = "capture") -> None:
    """Measure this machine."""
    from graphguard.errors import UsageError

    if what == "capture":
        from graphguard.bench.capture import main as run_benchmark
    elif what == "engine":
        from graphguard.bench.engine import main as run_benchmark
    else:
        raise UsageError(f"there is no benchmark {what!r}; there are: capture, engine")
    run_benchmark()


@app.command()
def demo() -> None:
    """Verify the example gallery."""
    from graphguard.demo import main as run_demo

    raise typer.Exit(run_demo())


def _job(target: str) -> Job:
    """The one job of a check."""
    from graphguard.api import collecting
    from graphguard.checks import find_checks
    from graphguard.errors import UsageError

    checks = find_checks(target)
    if len(checks) > 1:
        raise UsageError(f"{target} has {len(checks)} checks; choose one: {', '.join(f'::{c.name}' for c in checks)}")
    with collecting() as jobs:
        checks[0].run()
    if len(jobs) != 1:
        raise UsageError(f"the check {checks[0].name} calls gg.verify {len(jobs)} times; it must call it once")
    return jobs[0]


# ---------------------------------------------------------------------- printing
def _show(outcome: Outcome, output_format: VerifyFormat, verbose: bool) -> None:
    report, expect = outcome.report, outcome.check.expect
    if report is None:
        return
    aside = f" (expected {expect})" if not outcome.as_expected else " (as expected)" if expect != "verified" else ""
    print(f"{_coloured(report.verdict)}{aside}: {outcome.check}")
    if output_format is VerifyFormat.full:
        lines = report.lines(verbose)
    else:
        lines = [str(finding) for finding in report.findings[:1]] or str(report.relation).splitlines()
    for line in lines:
        print(f"  {line}")
    sys.stdout.flush()


def _summary(outcomes: Sequence[Outcome]) -> str:
    from graphguard.checks import VERDICTS

    counts = Counter("error" if outcome.report is None else outcome.report.verdict for outcome in outcomes)
    unexpected = sum(not outcome.as_expected for outcome in outcomes)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    if counts["error"]:
        said += f"{', ' if said else ''}{counts['error']} that could not run"
    return f"{said}; {'all as expected' if not unexpected else f'{unexpected} not as expected'}"


def _coloured(verdict: str) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return verdict
    return typer.style(verdict, fg=_COLOURS[verdict], bold=True)


def _print_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _joined(conditions: str | Sequence[str] | None) -> str:
    return conditions if isinstance(conditions, str) else "; ".join(map(str, conditions or ()))


@contextmanager
def _progress_shown() -> Iterator[None]:
    """Progress on stderr while checks run. Torch is loaded for it, which any check needs."""
    if not sys.stderr.isatty():
        yield
        return
    from graphguard.api import showing

    try:
        with showing(_progress):
            yield
    finally:
        _clear_progress()


def _progress(title: str, done: int, total: int) -> None:
    print(f"\r\x1b[Kcaptured {title} ({done} of {total})", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print_error(error: GraphGuardError, who: str = "") -> None:
    print(f"error: {who}{error}", file=sys.stderr)
    if isinstance(error, ProgramError):
        for file, line, function in error.frames:
            print(f'  File "{file}", line {line}, in {function}', file=sys.stderr)


def main(args: list[str] | None = None) -> Any:
    """Run the command line, and turn errors into one line on stderr and exit code 2."""
    try:
        return app(args)
    except GraphGuardError as error:
        _clear_progress()
        _print_error(error)
        sys.exit(2)
    except Exception as error:
        print(f"error: {type(error).__name__} in GraphGuard itself: {error}; please report it", file=sys.stderr)
        sys.exit(2)
