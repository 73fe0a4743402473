"""The steps behind `verify`: a front end makes a problem; a proof and an execution decide it; what they say is the report."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from graphguard import __version__
from graphguard.capture.front import Along, Captured, FrontEnd, Problem, Progress
from graphguard.engine.limits import Limits as EngineLimits
from graphguard.engine.proof import Proof
from graphguard.engine.prove import prove
from graphguard.engine.second_attempt import proved_apart
from graphguard.errors import (
    CaptureError,
    GraphGuardError,
    InternalError,
    MismatchError,
    ReadsValuesError,
    UsageError,
    is_by_signal,
)
from graphguard.graph.class_matching import world_of
from graphguard.graph.expanded import ExpandedJoint
from graphguard.graph.ir import Graph, Mesh
from graphguard.graph.limits import Stops
from graphguard.graph.listing import without_relations
from graphguard.graph.masks import masks_by_numbers
from graphguard.graph.matching import Joint
from graphguard.graph.world import World
from graphguard.lemmas.known import all_lemmas
from graphguard.lemmas.user import Lemma, by_operator
from graphguard.report.report import Report
from graphguard.routes.programs import with_constant_positions
from graphguard.verdict.judge import Judgement, are_seen_to_differ, judge
from graphguard.verdict.limits import Limits, limits_of
from graphguard.verdict.paths import of_paths, without_decisions
from graphguard.verdict.repairs import proved_repair
from graphguard.verdict.siblings import odd_parameters
from graphguard.verdict.small_mesh import small_mesh, told
from graphguard.verdict.verdict import assumptions_of, report_of, unread_inputs

MOST_LAYOUTS = 16  # of parameters, that are tried in place of those that were guessed
PATHS = 5  # that are taken by programs that read values


@dataclass(frozen=True)
class Job:
    """One call of `verify` or `verify_model`: the programs with what is expected of them, and how that is looked at."""

    front: FrontEnd
    lemmas: Sequence[Any] = ()
    trials: int | None = None
    seed: int = 0
    limits: Mapping[str, int] | None = None
    paths: int = PATHS


@runtime_checkable
class TakesPaths(Protocol):
    """A front end of programs that may read values."""

    def problems_along(
        self, paths: int, seed: int, opaque: frozenset[str], progress: Progress | None = None
    ) -> Iterator[Problem]: ...


@runtime_checkable
class TakesMeshes(Protocol):
    """A front end of programs that may be written for any number of ranks."""

    def on(self, mesh: Mesh) -> FrontEnd: ...


@runtime_checkable
class Guesses(Protocol):
    """A front end that guesses how the ranks hold parameters."""

    def other_layouts(self, problem: Problem) -> Iterator[tuple[str, Problem]]: ...


@dataclass(frozen=True)
class Question:
    """All that `decide` is given."""

    problem: Problem
    lemmas: Mapping[str, Lemma]
    trials: int | None
    seed: int
    limits: Limits


class Memory(Protocol):
    """Answers to questions that were asked before, in whatever process."""

    def key(self, question: Question) -> str | None:
        """Under which its answer is kept; None if it is not."""

    def recall(self, key: str, problem: Problem) -> Report | None: ...
    def keep(self, key: str, problem: Problem, report: Report) -> None: ...


class Form(NamedTuple):
    """Both programs as a proof is given them. world: the ranks by classes; or, if it is told so, apart."""

    sequential: Graph
    world: Callable[[bool], World]
    limits: Callable[[EngineLimits], EngineLimits]


_COLLECTED: ContextVar[list[Job] | None] = ContextVar("collected", default=None)
_PROGRESS: ContextVar[Progress | None] = ContextVar("progress", default=None)
_MEMORY: ContextVar[Memory | None] = ContextVar("memory", default=None)


@contextmanager
def collecting() -> Iterator[list[Job]]:
    """Inside, `verify` and `verify_model` run nothing: they add the job to the list and return it."""
    jobs: list[Job] = []
    token = _COLLECTED.set(jobs)
    try:
        yield jobs
    finally:
        _COLLECTED.reset(token)


@contextmanager
def showing(progress: Progress | None) -> Iterator[None]:
    """Inside, `verify` and `verify_model` say how far they are."""
    token = _PROGRESS.set(progress)
    try:
        yield
    finally:
        _PROGRESS.reset(token)


@contextmanager
def keeping(memory: Memory | None) -> Iterator[None]:
    """Inside, what `verify` and `verify_model` answer is kept, and what was answered before is not proved again. The programs
    are captured all the same: only their graphs say whether the question is the same one."""
    token = _MEMORY.set(memory)
    try:
        yield
    finally:
        _MEMORY.reset(token)


def run(job: Job) -> Report:
    """The report of a job; inside of `collecting`, the job itself."""
    collected = _COLLECTED.get()
    if collected is not None:
        collected.append(job)
        return job  # type: ignore[return-value]
    try:
        return _report(job)
    except GraphGuardError:
        raise
    except Exception as error:
        if is_by_signal(error):  # a limit of time that the user set is no defect of ours
            raise
        raise InternalError(f"{type(error).__name__} in GraphGuard itself: {error}; please report it") from error


def _report(job: Job) -> Report:
    _check(job)
    lemmas, progress = by_operator(job.lemmas), _PROGRESS.get()
    begun = time.perf_counter()
    try:
        problem = job.front.problem(frozenset(lemmas), progress)
    except MismatchError as error:
        return _mismatched(job, error, begun)
    except ReadsValuesError:
        if not isinstance(job.front, TakesPaths):
            raise
        return _along_paths(job, job.front, lemmas, begun)
    return _answered(job, problem, lemmas)


def _answered(job: Job, problem: Problem, lemmas: Mapping[str, Lemma]) -> Report:
    """The report of a problem: what is kept of an earlier run, else what is found now, which is kept then."""
    memory = _MEMORY.get()
    question = Question(problem, lemmas, job.trials, job.seed, limits_of(job.limits))
    key = None if memory is None else memory.key(question)
    report = None if memory is None or key is None else memory.recall(key, problem)
    if report is None:
        report = decide(problem, lemmas, trials=job.trials, seed=job.seed, limits=job.limits, progress=_PROGRESS.get())
        report.guesses += _other_layout(job, problem, report, lemmas)
        if memory is not None and key is not None:
            memory.keep(key, problem, report)
    report.notes[:0] = _on_fewer_ranks(job, problem, report, lemmas)  # which is of other graphs than the key, so it is not kept
    return report


def _on_fewer_ranks(job: Job, problem: Problem, report: Report, lemmas: Mapping[str, Lemma]) -> list[str]:
    """What is known of the same programs on a mesh that is small enough to be executed, where this one is not."""
    if report.verdict == "refuted" or problem.along is not None or job.trials == 0 or not isinstance(job.front, TakesMeshes):
        return []
    small = small_mesh(problem.mesh, problem.captured, limits_of(job.limits).oracle)
    if small is None:
        return []
    try:
        fewer = job.front.on(small).problem(frozenset(lemmas))
        said = decide(fewer, lemmas, trials=job.trials, seed=job.seed, limits=job.limits)
    except InternalError:  # a defect of ours, whatever mesh shows it
        raise
    except GraphGuardError as error:
        return [f"the same programs could not be executed on the mesh {small} either: {error}"]
    was_executed = said.verdict == "refuted" or said.stats["seconds"]["oracle"] is not None
    return [told(small, said)] if was_executed else []


def _other_layout(job: Job, problem: Problem, report: Report, lemmas: Mapping[str, Lemma]) -> list[str]:
    """A layout of parameters, other than was guessed, with which nothing differs; in words."""
    if report.verdict != "refuted" or problem.along is not None or not isinstance(job.front, Guesses) or not problem.guesses:
        return []
    if problem.captured.joint.findings or problem.captured.matched is not None:
        return []
    for stated, other in islice(job.front.other_layouts(problem), MOST_LAYOUTS):
        captured = other.captured
        graphs = captured.sequential, captured.joint, captured.relations
        if are_seen_to_differ(*graphs, other.expected, other.bounds, seed=job.seed, limits=limits_of(job.limits)):
            continue
        found = decide(other, lemmas, seed=job.seed, limits=job.limits)
        if found.verified:
            return [f"it is verified with {stated}"]
        if found.verdict == "unproven" and found.stats["seconds"]["oracle"] is not None:
            return [f"all outputs are right, as far as they were executed, with {stated}"]
    return []


def _mismatched(job: Job, error: MismatchError, begun: float) -> Report:
    report = Report.of_findings([error.finding], [])
    report.notes.append(f"after that, {error}")
    report.stats = _stats(job.front.mesh.size, time.perf_counter() - begun)
    return report


def _along_paths(job: Job, front: TakesPaths, lemmas: Mapping[str, Lemma], begun: float) -> Report:
    """Of programs that read values: one question for each path, until one is refuted."""
    answers = list[tuple[Along | None, Report]]()
    try:
        for problem in front.problems_along(job.paths, job.seed, frozenset(lemmas), _PROGRESS.get()):
            answers.append((problem.along, _answered(job, problem, lemmas)))
            if answers[-1][1].verdict == "refuted":
                break
    except MismatchError as error:
        answers.append((None, _mismatched(job, error, begun)))
    return of_paths(answers)


def _check(job: Job) -> None:
    limits_of(job.limits)
    if not isinstance(job.paths, int) or isinstance(job.paths, bool) or job.paths < 1:
        raise UsageError(
            f"paths= is {job.paths!r}; write along how many paths programs that read values are verified, from 1 on"
        )
    if job.trials is not None and (not isinstance(job.trials, int) or isinstance(job.trials, bool) or job.trials < 0):
        raise UsageError(f"trials= is {job.trials!r}; write how often both programs are executed, 0 to take a proof as it is")
    if not isinstance(job.seed, int) or isinstance(job.seed, bool) or not 0 <= job.seed < 2**62:
        raise UsageError(f"seed= is {job.seed!r}; write a whole number from 0 on")


def decide(
    problem: Problem,
    lemmas: Mapping[str, Lemma] | None = None,
    *,
    trials: int | None = None,
    seed: int = 0,
    limits: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Report:
    """The report of a problem, whatever front end made it.

    lemmas: of the user's own, by operator.
    trials, seed, limits: as `verify` has them.
    """
    captured = problem.captured
    if captured.joint.findings:
        report = Report.of_findings(captured.joint.findings, captured.assumptions)
        report.make_listing = partial(without_relations, captured.sequential, captured.held)
        report.stats = _stats(problem.mesh.size, captured.seconds)
    else:
        report = _decided(problem, lemmas or {}, trials, seed, limits_of(limits), progress)
    if problem.along is not None:
        without_decisions(report, problem.along)
        captured = problem.along.raw
    report.parameters = dict(problem.parameters)
    if report.verdict == "refuted":
        odd = odd_parameters(report.parameters)
        report.findings[:1] = [replace(each, odd=(*odd, *each.odd)) for each in report.findings[:1]]
    report.assumptions += problem.guesses
    report.guesses = list(problem.guesses)
    report.assumptions += [each.assumed for each in problem.expected.values() if each.assumed is not None]
    if captured.unstable is not None:
        if report.verdict != "refuted":
            raise CaptureError(captured.unstable)
        report.notes.append(f"{captured.unstable}; it is refuted for ranks in some such states")
    report.notes += _only_of_ranks(captured)
    unread = unread_inputs(captured.sequential, captured.held)
    report.notes += [f"the input {name} is read by neither program" for name in unread if name in problem.bounds]
    report.stats["classes"] = captured.classes
    if captured.by_rank is not None:
        report.stats["one_by_one"] = captured.by_rank
    report.stats["ops"] = captured.operations
    report.stats["mesh"] = str(problem.mesh)
    report.stats["versions"] = _versions()
    return report


def _decided(
    problem: Problem,
    lemmas: Mapping[str, Lemma],
    trials: int | None,
    seed: int,
    limits: Limits,
    progress: Progress | None,
) -> Report:
    """The verdict of a proof and an execution."""
    captured = problem.captured
    executed = captured if problem.along is None else problem.along.raw
    graphs = executed.sequential, executed.joint, executed.relations
    asked: list[bool] = []

    def are_wrong() -> bool:
        """Asked by a proof that is in trouble."""
        asked.append(are_seen_to_differ(*graphs, problem.expected, problem.bounds, seed=seed, limits=limits))
        return asked[-1]

    def proved(form: Form, apart: bool = False, **options: Any) -> Proof:
        return prove(
            form.sequential,
            form.world(apart),
            expected=problem.expected,
            ranges=problem.ranges,
            lemmas=all_lemmas(lemmas),
            limits=form.limits(limits.engine),
            **options,
        )

    def proved_with(joint: Joint) -> Proof:
        """Of ranks that were changed."""
        return proved(_forms(problem, joint)[-1], locate=False)

    def again(form: Form, first: Proof) -> Proof:
        """Where the first attempt does not prove it, each rank by itself."""

        def attempt() -> Proof:
            _tell(progress, "proof")
            return proved(form, True)

        return proved_apart(first, problem.mesh.size, attempt, limits.engine)

    def judged(proof: Proof) -> Judgement:
        return judge(
            *graphs,
            problem.expected,
            problem.bounds,
            proved=proof.unconditional,
            no_parts=proof.no_parts,
            trials=trials,
            seed=seed,
            progress=None if progress is None else partial(progress, "oracle"),
            limits=limits,
            classes=None if captured.matched is None else captured.matched.classes,
            along=problem.along,
        )

    forms = _forms(problem, captured.joint)
    _tell(progress, "proof")
    proof = first = proved(forms[0], are_wrong=are_wrong if problem.along is None and trials != 0 else None)
    _tell(progress, "oracle")
    judgement = judged(proof)
    if any(asked) and not judgement.different:  # numbers that all trials explain, so that all is to be tried
        proof = first = proved(forms[0])
        judgement = judged(proof)
    if not judgement.different:
        attempts = [(forms[0], first)]
        for form in () if first.proved else forms[1:]:
            if not proof.proved:
                attempts.append((form, proved(form)))
                proof = min(proof, attempts[-1][1], key=_left_open)
        for form, before in () if proof.proved else reversed(attempts):
            proof = min(proof, again(form, before), key=_left_open)
        judgement = judgement if proof is first else judged(proof)
    elif judgement.amends and problem.along is None:
        stops, joint = Stops(limits.locate), captured.joint
        ranks = joint.written_out() if isinstance(joint, ExpandedJoint) else joint  # which were executed, so they are few
        repair = proved_repair(judgement.amends, ranks, problem.mesh, proved_with, stops)
        judgement = replace(judgement, repair=repair, stopped=(*judgement.stopped, *stops.reached()))
    assumed = assumptions_of([(captured.sequential, 1), *captured.weighted])
    decisions = frozenset[str]() if problem.along is None else problem.along.of_ranks
    report = report_of(proof, judgement, [*assumed, *captured.assumptions], decisions)
    report.notes += judgement.hints
    seconds = None if judgement.skipped else judgement.seconds
    report.stats = _stats(problem.mesh.size, captured.seconds, proof.seconds, seconds)
    report.stats["oracle"] = {"trials": judgement.trials, "seed": seed, "skipped": judgement.skipped}
    return report


def _forms(problem: Problem, joint: Joint) -> list[Form]:
    """The programs in the forms in which they are tried to be proved: as they are; where they mask scores by large numbers,
    with what is masked described by itself; and, where they read or write at constant positions, with those spelled out."""
    captured = problem.captured
    world = captured.world if joint is captured.joint else partial(world_of, joint, list(captured.relations))
    if problem.along is not None:  # which is spelled out for its path
        return [Form(captured.sequential, world, EngineLimits.for_paths)]
    forms = [Form(captured.sequential, world, lambda limits: limits)]
    if masks_by_numbers(captured.sequential):
        forms.append(Form(captured.sequential, world, EngineLimits.for_masks))
    if captured.matched is None:
        made = with_constant_positions(captured.sequential, joint, captured.relations, problem.bounds)
        if made is not None:
            forms.append(Form(made[0], partial(world_of, made[1], captured.relations), EngineLimits.for_many_pieces))
    return forms


def _versions() -> dict[str, str]:
    """Of what decided, and of what was captured."""
    frameworks: dict[str, str] = {name: str(sys.modules[name].__version__) for name in ("torch", "jax") if name in sys.modules}
    return {"GraphGuard": __version__, **frameworks, "Python": platform.python_version()}


def _left_open(proof: Proof) -> int:
    return len(proof.findings)


def _stats(ranks: int, capture: float, proof: float | None = None, oracle: float | None = None) -> dict[str, Any]:
    return {"ops": 0, "ranks": ranks, "seconds": {"capture": capture, "proof": proof, "oracle": oracle}}


def _tell(progress: Progress | None, phase: str) -> None:
    """Say which phase begins."""
    if progress is not None:
        progress(phase, 0, 0)


def _only_of_ranks(captured: Captured) -> list[str]:
    """Outputs that the sequential program does not have."""
    known = {path for path, value in captured.sequential.outputs.items() if value is not None}
    extra = {path: None for each in captured.held for path, value in each.graph.outputs.items() if value is not None}
    return [f"{path}: only ranks return it, so nothing is claimed of it" for path in extra if path not in known]
