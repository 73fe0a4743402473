"""The command line. Results on stdout, progress on stderr and only on a terminal; exit code 2 for anything that went wrong."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from graphguard import __version__
from graphguard.errors import GraphGuardError, ProgramError, UsageError

if TYPE_CHECKING:
    from graphguard.checks.check import Outcome
    from graphguard.checks.discovery import Selection
    from graphguard.lemmas.user import Lemma
    from graphguard.pipeline import Job

_HELP = {"help_option_names": ["-h", "--help"]}


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Whoever read the results went away: not all was said. Exit code 1, which click has for it, means something else."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_HELP,
)


lemmas = typer.Typer(no_args_is_help=True, help="The rules that the prover has for operators.")
app.add_typer(lemmas, name="lemmas")
_INTERRUPTED = 130  # as shells have it for Ctrl-C
_MOST_SKIPPED = 3  # files that are named


class VerifyFormat(StrEnum):
    full = "full"
    concise = "concise"
    json = "json"
    junit = "junit"
    github = "github"
    sarif = "sarif"

    @property
    def is_text(self) -> bool:
        return self in (VerifyFormat.full, VerifyFormat.concise)


class HloFormat(StrEnum):
    full = "full"
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
    from graphguard.graph import json as graph_json

    if sequential and rank is not None:
        raise UsageError("give --rank or --sequential, not both")
    job = _job(target)
    world = job.front.mesh.size
    if rank is not None and not 0 <= rank < world:
        raise UsageError(f"there is no rank {rank}: the mesh {job.front.mesh} has ranks 0 to {world - 1}")
    with _stopping():
        captured = job.front.capture(_progress if sys.stderr.isatty() else None)
    _clear_progress()
    if rank is not None:
        graphs = [captured.ranks[rank]]
    else:
        graphs = [captured.sequential, *(() if sequential else captured.ranks)]
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
    output: Annotated[str | None, typer.Option(metavar="FILE", help="Write the reports to FILE.")] = None,
    html: Annotated[str | None, typer.Option(metavar="DIR", help="Write a page per check, and an index, to DIR.")] = None,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", metavar="N", help="Run checks in N processes.")] = None,
    executor: Annotated[
        str | None, typer.Option(metavar="dask://HOST:PORT", help="Run checks on a Dask cluster, by its scheduler.")
    ] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only checks whose verdict is not the expected one.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Everything that the reports have.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="A verdict that has conditions, or is along paths, is a failure.")
    ] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Prove everything, and keep nothing for the next run.")] = False,
    apart: Annotated[bool, typer.Option("--ranks-apart", help="Capture every rank by itself, not by classes.")] = False,
    limits: Annotated[str, typer.Option(metavar="NAME=N[,NAME=N]", help="Allow for more work where a report says so.")] = "",
) -> None:
    """Run checks. Exits with 0 if every verdict is the expected one, 1 if something was refuted, 2 on errors, 3 if something
    is unproven, or has conditions or paths with --strict, 130 after Ctrl-C."""
    if quiet and verbose:
        raise UsageError("give -q or -v, not both")
    if jobs is not None and executor is not None:
        raise UsageError("give -j or --executor, not both: the cluster has as many processes as it has workers")
    if jobs is not None and jobs < 1:
        raise UsageError(f"-j {jobs}: write how many processes run checks, from 1 on")
    from graphguard.capture.front import ranks_apart
    from graphguard.verdict.limits import parsed, stated

    with stated(parsed(limits)), ranks_apart(apart):
        how = _How(output_format, output, html, jobs or 1, executor, quiet, verbose, strict, not no_cache)
        raise typer.Exit(_Verification(how).run(paths))


@dataclass(frozen=True)
class _How:
    """The options of `graphguard verify`."""

    format: VerifyFormat
    output: str | None
    html: str | None
    jobs: int
    executor: str | None
    quiet: bool
    verbose: bool
    strict: bool
    keeps: bool


class _Verification:
    """One run of `graphguard verify`: text is printed as the outcomes come, other formats at the end."""

    def __init__(self, how: _How):
        self.how = how
        self.outcomes: list[Outcome] = []
        self.written: list[str] = []  # lines of text that go to a file

    def run(self, paths: list[str]) -> int:
        from graphguard.checks.check import exit_code
        from graphguard.checks.discovery import select
        from graphguard.checks.runner import run
        from graphguard.render.progress import Progress

        site = self._site()
        progress = Progress(sys.stderr, 0)
        try:
            selection = select(paths)
            how = self.how.jobs, progress, site is not None
            with self._crew() as crew, closing(run(selection.targets, *how, crew, self.how.keeps)) as outcomes:
                for outcome in (replace(each, strict=self.how.strict) for each in outcomes):
                    progress.clear()
                    self._take(outcome, site)
            for outcome in selection.bare(self.outcomes):
                self._take(outcome, site)
            if site is not None:
                site.finish()
        except KeyboardInterrupt:
            progress.clear()
            done = f"{len(self.outcomes)} of {progress.total} checks were done" if progress.total else "no check was begun"
            print(f"interrupted: {done}{f' ({_counted(self.outcomes)})' if self.outcomes else ''}", file=sys.stderr)
            _leave_at_once(_INTERRUPTED)
        finally:
            progress.clear()
        self._finish(selection)
        return exit_code(self.outcomes)

    def _crew(self) -> AbstractContextManager[Any]:
        """Who runs the checks; None for processes of this machine, if any are needed."""
        if self.how.executor is None:
            return nullcontext()
        from graphguard.checks.crew import crew_of

        return crew_of(self.how.executor, self.how.jobs)

    def _take(self, outcome: Outcome, site: Any) -> None:
        self.outcomes.append(outcome)
        if site is not None:
            site.add(outcome)
        self._show(outcome)

    def _site(self) -> Any:
        if self.how.html is None:
            return None
        from graphguard.render.html import Pages

        return Pages(self.how.html)

    def _show(self, outcome: Outcome) -> None:
        from graphguard.render.terminal import Look, concise_lines, outcome_lines

        if outcome.error is not None:
            _print_error(outcome.error, outcome.complaint)
        if self.how.quiet and outcome.as_expected:
            return
        lines_of = outcome_lines if self.how.format is VerifyFormat.full else concise_lines
        if self.how.output is not None:
            if self.how.format.is_text:
                self.written += lines_of(outcome, Look(verbose=self.how.verbose))
            lines_of = concise_lines
        if outcome.report is not None and (self.how.format.is_text or self.how.output is not None):
            _print_lines(lines_of(outcome, Look.of(sys.stdout, self.how.verbose)))

    def _finish(self, selection: Selection) -> None:
        text = "".join(f"{line}\n" for line in [*self.written, _summary(self.outcomes)])
        if not self.how.format.is_text:
            text = _projected(self.how.format, self.outcomes, selection)
        if self.how.output is not None:
            from graphguard.render.write import write_text

            write_text(self.how.output, text)
        elif not self.how.format.is_text:
            print(text, end="")
        if not self.how.quiet:
            _tell_of_skipped(selection, self.how.verbose)
        if not self.how.quiet and (self.how.format.is_text or self.how.output is not None):
            print(_summary(self.outcomes))
        sys.stdout.flush()  # what cannot be written is noticed here, while there is an exit code to choose


@contextmanager
def _stopping() -> Iterator[None]:
    """Ctrl-C ends a command at once, and with a code of its own: 1 would say that something is wrong."""
    try:
        yield
    except KeyboardInterrupt:
        _clear_progress()
        print("interrupted", file=sys.stderr)
        _leave_at_once(_INTERRUPTED)


def _leave_at_once(code: int) -> NoReturn:
    """Without unloading torch and all that was imported, which takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _projected(output_format: VerifyFormat, outcomes: Sequence[Outcome], selection: Selection) -> str:
    """The JSON of all checks, or what another format makes of it."""
    from graphguard.checks.check import to_plain

    plain = to_plain(outcomes)
    plain["skipped"] = [{"path": each.path, "why": each.why} for each in selection.skipped]
    if output_format is VerifyFormat.junit:
        from graphguard.render.junit import junit

        return junit(plain)
    if output_format is VerifyFormat.github:
        from graphguard.render.github import github

        return github(plain)
    if output_format is VerifyFormat.sarif:
        from graphguard.render.sarif import sarif

        plain = sarif(plain)
    return json.dumps(plain, indent=2) + "\n"


@app.command()
def explain(
    name: Annotated[str, typer.Argument(metavar="CODE|KIND|LEMMA", help="GG104, race, aten.mm.default, mm.")],
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE.py]...", help="Files that have lemmas of your own.")
    ] = None,
) -> None:
    """Print the page of a finding or of a lemma."""
    from graphguard.render.explain import explain as page_of

    print(page_of(name, partial(_lemmas_of, files) if files else None))


@lemmas.command("ls")
def list_lemmas(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE.py]...", help="Files whose own lemmas are listed too.")
    ] = None,
) -> None:
    """List the operators that the prover knows, with what it knows of them."""
    from graphguard.lemmas.known import rows

    listed = [(row.operator, row.kind, row.definition, _joined(row.conditions)) for row in rows()]
    if files:
        listed += [(lemma.operator, "yours", str(lemma.meaning), lemma.untested or "") for lemma in _lemmas_of(files)]
    _print_columns(("operator", "kind", "definition", "conditions"), listed)


@lemmas.command("audit")
def audit_lemmas(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Operators or families of lemmas; FILE.py for the lemmas of your own in it."),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="How many sizes, numbers and shards for each sample.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same examples.")] = 0,
) -> None:
    """Compare lemmas with torch's own execution, on whole tensors and on random shards. Exits with 1 if one is wrong."""
    from graphguard.audit.table import audited, lines_of

    files = [name for name in names or () if name.endswith(".py")]
    operators = [name for name in names or () if name not in files]
    with _stopping():
        own, progress = _lemmas_of(files), _audit_progress if sys.stderr.isatty() else None
        found = audited(operators, own, not names, examples, seed, progress)
    _clear_progress()
    for line in lines_of(found):
        print(line)
    raise typer.Exit(1 if any(line.wrong for line in found) else 0)


def _lemmas_of(files: Sequence[str]) -> list[Lemma]:
    from graphguard.checks.own_lemmas import registered_by

    return registered_by(files)


def _audit_progress(done: int, total: int) -> None:
    print(f"\r\x1b[Kexamined {done} of {total} samples", end="", file=sys.stderr, flush=True)


@app.command("verify-hlo")
def verify_hlo(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="The dump before SPMD partitioning.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The dump after it.")],
    mesh: Annotated[str, typer.Option(metavar="AXIS=N[,AXIS=N]", help="The mesh of the devices, for the report.")] = "",
    ranges: Annotated[
        list[str] | None, typer.Option("--range", metavar="NAME=LOW:HIGH", help="low <= v < high, of an argument.")
    ] = None,
    output_format: Annotated[HloFormat, typer.Option(help="How to print the report.")] = HloFormat.full,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Everything that the report has.")] = False,
) -> None:
    """Whether what XLA's partitioner wrote computes what it was given: two files of --xla_dump_hlo_pass_re=spmd.*, as text.
    Exits with 0 if that is verified, 1 if it is refuted, 2 on errors, 3 if it is unproven."""
    from graphguard import jax
    from graphguard.checks.check import Check, Outcome, to_plain
    from graphguard.render.terminal import Look, outcome_lines

    axes = {name: _whole(size, f"--mesh {mesh}") for name, size in map(_halves, filter(None, mesh.split(",")))}
    bounds = {}
    for name, span in map(_halves, ranges or []):
        low, _, high = span.partition(":")
        bounds[name] = (_whole(low, f"--range {name}={span}"), _whole(high, f"--range {name}={span}"))
    with _stopping():
        report = jax.verify_hlo(before, after, mesh=axes or None, ranges=bounds)
    outcome = Outcome(Check("partitioning", after, None, "verified"), report, None)
    if output_format is HloFormat.json:
        print(json.dumps(to_plain([outcome]), indent=2))
    else:
        _print_lines(outcome_lines(outcome, Look.of(sys.stdout, verbose)))
    raise typer.Exit(outcome.exit_code)


def _halves(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _whole(text: str, option: str) -> int:
    if not text.removeprefix("-").isdigit():
        raise UsageError(f"{option}: {text!r} is no whole number")
    return int(text)


@app.command()
def mutate(
    target: Annotated[str, typer.Argument(metavar="FILE.py::CHECK", help="A check that verifies.")],
    count: Annotated[int, typer.Option("-n", help="How many mutants.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed gives the same mutants.")] = 0,
) -> None:
    """Put faults into the ranks of a check that verifies, and show which of them it catches. Exits with 1 if a program that
    computes something else is verified."""
    from graphguard.mutate.command import mutate as run_mutants

    with _stopping():
        raise typer.Exit(run_mutants(target, _job(target), count, seed))


_BENCHMARKS = ("capture", "engine", "faults", "jax", "end-to-end", "scaling")


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help=f"Which benchmark: {', '.join(_BENCHMARKS)}.")] = "capture",
    only: Annotated[str, typer.Option(help="Of end-to-end and scaling, the rows whose title has this text.")] = "",
    write: Annotated[Path | None, typer.Option(help="Of end-to-end and scaling, a JSON file to keep results in.")] = None,
) -> None:
    """Measure this machine."""
    if what not in _BENCHMARKS:
        raise UsageError(f"there is no benchmark {what!r}; there are: {', '.join(_BENCHMARKS)}")
    with _stopping():
        if what in ("end-to-end", "scaling"):
            from graphguard.bench.end_to_end import main as run_suite

            run_suite(what, only, write)
        else:
            importlib.import_module(f"graphguard.bench.{'jax_decoders' if what == 'jax' else what}").main()


@app.command()
def sweep(
    library: Annotated[
        str, typer.Argument(metavar="LIBRARY", help="transformers, megatron, torchtitan, deepspeed, accelerate or dtensor.")
    ],
    tp: Annotated[str, typer.Option(metavar="N[,N]", help="Numbers of ranks.")] = "2",
    options: Annotated[bool, typer.Option("--options", help="Each once more with options that change gradients.")] = False,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Configurations whose name has this text.")] = "",
    write: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Keep results in this file, go on from them, and write FILE.md.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="The most that one configuration may take.")] = 120,
) -> None:
    """Verify everything that the installed version of a library ships, built small, in a train step. Exits with 0 if all is
    verified, 1 if something is refuted, 2 if something could not run, 3 if something is unproven."""
    from graphguard.sweep.run import LIBRARIES, sizes_of
    from graphguard.sweep.run import main as run_sweep

    if library not in LIBRARIES:
        raise UsageError(f"there is no sweep of {library!r}; there are: {', '.join(LIBRARIES)}")
    with _stopping():
        raise typer.Exit(run_sweep(library, sizes_of(tp), options, only, write, seconds))


@app.command()
def demo() -> None:
    """Verify the example gallery."""
    from graphguard.gallery.demo import main as run_demo

    raise typer.Exit(run_demo())


def _job(target: str) -> Job:
    """The one job of a check."""
    from graphguard.checks.discovery import find_checks
    from graphguard.pipeline import collecting

    checks = find_checks(target)
    if len(checks) > 1:
        raise UsageError(f"{target} has {len(checks)} checks; choose one: {', '.join(f'::{c.name}' for c in checks)}")
    with collecting() as jobs:
        checks[0].run()
    if len(jobs) != 1:
        raise UsageError(f"the check {checks[0].name} calls gg.verify {len(jobs)} times; it must call it once")
    return jobs[0]


# ---------------------------------------------------------------------- printing
def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(line)
    sys.stdout.flush()


def _summary(outcomes: Sequence[Outcome]) -> str:
    unexpected = sum(not outcome.as_expected for outcome in outcomes)
    reports = [outcome.report for outcome in outcomes if outcome.report is not None and outcome.report.verified]
    conditional = sum(bool(report.conditions) for report in reports)
    failed = ", which is a failure with --strict" if any(outcome.has_forbidden_conditions for outcome in outcomes) else ""
    along = sum(report.paths is not None for report in reports)
    told = [f"{conditional} under conditions"] * bool(conditional) + [f"{along} along paths"] * bool(along)
    aside = f"; {' and '.join(told)}{failed}" if told else ""
    return f"{_counted(outcomes)}{aside}; {'all as expected' if not unexpected else f'{unexpected} not as expected'}"


def _tell_of_skipped(selection: Selection, verbose: bool) -> None:
    """Files of folders that were not imported, as they cannot have checks; whoever thinks otherwise should see it."""
    skipped = [each for each in selection.skipped if verbose or each.telling]
    for each in skipped[: None if verbose else _MOST_SKIPPED]:
        print(f"skipped: {each.path} {each.why}", file=sys.stderr)
    if len(skipped) > _MOST_SKIPPED and not verbose:
        print(f"skipped: {len(skipped) - _MOST_SKIPPED} more; -v names them", file=sys.stderr)


def _counted(outcomes: Sequence[Outcome]) -> str:
    from graphguard.checks.check import VERDICTS

    counts = Counter("error" if outcome.report is None else outcome.report.verdict for outcome in outcomes)
    said = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
    return ", ".join(said + ([f"{counts['error']} that could not run"] if counts["error"] else []))


def _print_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _joined(conditions: str | Sequence[str] | None) -> str:
    return conditions if isinstance(conditions, str) else "; ".join(map(str, conditions or ()))


def _progress(title: str, done: int, total: int) -> None:
    print(f"\r\x1b[Kcaptured {title} ({done} of {total})", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print_error(error: GraphGuardError, text: str | None = None) -> None:
    print(f"error: {error if text is None else text}", file=sys.stderr)
    if isinstance(error, ProgramError):
        for (file, line, function), calls in groupby(error.frames):
            times = len(list(calls))
            aside = f"  (called by itself {times - 1} times or more)" if times > 1 else ""
            print(f'  File "{file}", line {line}, in {function}{aside}', file=sys.stderr)


def main(args: list[str] | None = None) -> Any:
    """Run the command line, and turn errors into one line on stderr and exit code 2."""
    if sys.stderr is None:  # it was closed; what would be said there is not heard
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        if sys.stdout is None:
            raise UsageError("stdout is closed, so there is no place for results; redirect it to /dev/null, and give --output")
        return app(args)
    except GraphGuardError as error:
        _clear_progress()
        _print_error(error)
        sys.exit(2)
    except OSError as error:
        print(f"error: the results cannot be written: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        print(f"error: {type(error).__name__} in GraphGuard itself: {error}; please report it", file=sys.stderr)
        sys.exit(2)
