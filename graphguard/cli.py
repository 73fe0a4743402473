"""The command line. Results on stdout, progress on stderr and only on a terminal; exit code 2 for anything that went wrong."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphguard import __version__
from graphguard.errors import GraphGuardError, ProgramError

if TYPE_CHECKING:
    from graphguard.api import Job

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


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
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
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


@app.command(hidden=True)
def verify(paths: Annotated[list[str], typer.Argument(metavar="PATH...")]) -> None:
    """Not there yet: says so."""
    raise GraphGuardError("this version has no prover yet, so it gives no verdicts; `graphguard capture FILE.py::CHECK` "
                          "shows the graphs of a check and whether its ranks agree")  # fmt: skip


@app.command()
def bench(what: Annotated[str, typer.Argument(help="Which benchmark: capture.")] = "capture") -> None:
    """Measure this machine."""
    from graphguard.errors import UsageError

    if what != "capture":
        raise UsageError(f"there is no benchmark {what!r}; there is: capture")
    from graphguard.bench.capture import main as bench_capture

    bench_capture()


@app.command()
def demo() -> None:
    """Capture the example gallery, match its ranks, and replay it."""
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


def _progress(title: str, done: int, total: int) -> None:
    print(f"\r\x1b[Kcaptured {title} ({done} of {total})", end="", file=sys.stderr, flush=True)


def main(args: list[str] | None = None) -> Any:
    """Run the command line, and turn errors into one line on stderr and exit code 2."""
    try:
        return app(args)
    except GraphGuardError as error:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, ProgramError):
            for file, line, function in error.frames:
                print(f'  File "{file}", line {line}, in {function}', file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        print(f"error: {type(error).__name__} in GraphGuard itself: {error}; please report it", file=sys.stderr)
        sys.exit(2)
