"""What users call. `verify` and `verify_model` describe a check; what is done with it depends on who asks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from graphguard.capture.program import PARAMETERS, FunctionProgram, ModelProgram, call_model
from graphguard.capture.session import Captured, LocalInputs, Progress, Subject
from graphguard.capture.session import capture as capture_subject
from graphguard.capture.wrappers import gradients_of
from graphguard.dtensors import needed_parts, of_dtensors, other_shapes
from graphguard.engine.apart import proved_apart
from graphguard.engine.proof import Proof
from graphguard.errors import CaptureError, GraphGuardError, InternalError, MismatchError, UsageError
from graphguard.expectation import Expectation, expectations
from graphguard.ir import Graph
from graphguard.lemmas.user import binds, by_operator
from graphguard.listing import without_relations
from graphguard.parameters import (
    Parameter,
    expected_gradients,
    found_parameters,
    guesses,
    needed_gradients,
    relations_with,
    use_sequential_names,
)
from graphguard.relation import Input, mesh_of
from graphguard.report import Report
from graphguard.scope import counted
from graphguard.verdict import assumptions_of, report_of, unread_inputs

MeshLike = Mapping[str, int] | int


@dataclass(frozen=True)
class Job:
    """One call of `verify` or `verify_model`: the programs, and what is expected of them."""

    subject: Subject
    outputs: Mapping[str, Any] | None = None
    params: Any = "auto"
    lemmas: Sequence[Any] = ()
    trials: int | None = None
    seed: int = 0


_COLLECTED: ContextVar[list[Job] | None] = ContextVar("collected", default=None)
_PROGRESS: ContextVar[Progress | None] = ContextVar("progress", default=None)


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


@counted
def verify(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    *,
    mesh: MeshLike,
    inputs: Mapping[str, Input],
    local_inputs: LocalInputs | None = None,
    outputs: Mapping[str, Any] | None = None,
    lemmas: Sequence[Any] = (),
    trials: int | None = None,
    seed: int = 0,
) -> Report:
    """Whether the distributed function refines the sequential one, for all inputs.

    sequential, distributed: called with the inputs as keywords; return a tensor, or any nesting of dicts, lists and tuples of
        tensors. The distributed one runs once per rank, with `torch.distributed` initialised; a parameter named `mesh` is
        given the DeviceMesh.
    mesh: `{axis: size}`, or the number of ranks.
    inputs: the full shape of each sequential input, and how the ranks' inputs come from it.
    local_inputs: `fn(full, coord) -> dict`, all of a rank's inputs from all of the sequential ones, where the two sides differ.
    outputs: the relation that an output is expected to have, `{path: placement}`, `{path: {axis: placement}}` or
        `{path: fn(full, coord)}`; an output that is not listed may have any.
    lemmas: what `gg.lemma` returned, for this check alone.
    trials: how often both programs are executed, 3 if left out; 0 if a proof is not to be looked at: without one, it is 3.
    seed: of the first trial's inputs.
    """
    return _run(Job(_functions(sequential, distributed, mesh, inputs, local_inputs), outputs, None, lemmas, trials, seed))


@counted
def verify_model(
    sequential: Callable[[], torch.nn.Module],
    distributed: Callable[[Any], torch.nn.Module],
    *,
    mesh: MeshLike,
    inputs: Mapping[str, Input],
    step: Callable[..., Any] = call_model,
    params: Any = "auto",
    local_inputs: LocalInputs | None = None,
    outputs: Mapping[str, Any] | None = None,
    lemmas: Sequence[Any] = (),
    trials: int | None = None,
    seed: int = 0,
) -> Report:
    """Whether the distributed module refines the sequential one in what `step` does with them, for all inputs and parameters.

    sequential: builds the module; its parameters get no data.
    distributed: builds a rank's module, given the DeviceMesh.
    step: `step(model, **inputs)` returns the outputs; left out, the model is called. `gg.train_step` gives loss and gradients.
    params: "auto", or `{pattern: placement or fn(full, coord)}` for the parameters whose relation is not found.

    All other arguments are those of `verify`.
    """
    subject = _models(sequential, distributed, step, mesh, inputs, local_inputs)
    return _run(Job(subject, outputs, params, lemmas, trials, seed))


def capture_function(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    *,
    mesh: MeshLike,
    inputs: Mapping[str, Input],
    local_inputs: LocalInputs | None = None,
) -> Captured:
    """The graphs of two functions: the sequential one, every rank's, and the input relation."""
    return capture_subject(_functions(sequential, distributed, mesh, inputs, local_inputs))


def capture_model(
    sequential: Callable[[], torch.nn.Module],
    distributed: Callable[[Any], torch.nn.Module],
    *,
    mesh: MeshLike,
    inputs: Mapping[str, Input],
    step: Callable[..., Any] = call_model,
    local_inputs: LocalInputs | None = None,
) -> Captured:
    """The graphs of two modules and a step; the parameters are inputs named `params.<name>`."""
    return capture_subject(_models(sequential, distributed, step, mesh, inputs, local_inputs))


@dataclass(frozen=True)
class train_step:
    """A step that differentiates `loss_fn(model, **inputs)`: returns `loss` and `grads.<parameter name>`.

    `loss` is the expected relation of the loss, as in `outputs=`.
    """

    loss_fn: Callable[..., torch.Tensor]
    loss: Any = None

    def __call__(self, model: torch.nn.Module, **inputs: Any) -> dict[str, Any]:
        loss = self.loss_fn(model, **inputs)
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"the loss_fn of gg.train_step returned {type(loss).__name__}; it must return a scalar tensor")
        if loss.numel() != 1:
            raise UsageError(
                f"the loss_fn of gg.train_step returned a tensor of shape {tuple(loss.shape)}; it must be a scalar"
            )
        loss.backward()
        return {"loss": loss.detach(), "grads": gradients_of(model)}


def _functions(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    mesh: MeshLike,
    inputs: Mapping[str, Input],
    local_inputs: LocalInputs | None,
) -> Subject:
    programs = FunctionProgram(sequential, "sequential"), FunctionProgram(distributed, "distributed")
    return Subject(*programs, mesh_of(mesh), _named(inputs), local_inputs)


def _named(inputs: Any) -> dict[str, Input]:
    if not isinstance(inputs, Mapping):
        raise UsageError(f"inputs= is {type(inputs).__name__}; write {{name: gg.Input(shape, placement)}}")
    return dict(inputs)


def _models(
    sequential: Callable[[], torch.nn.Module],
    distributed: Callable[[Any], torch.nn.Module],
    step: Callable[..., Any],
    mesh: MeshLike,
    inputs: Mapping[str, Input],
    local_inputs: LocalInputs | None,
) -> Subject:
    for side, builder, call in (("sequential", sequential, "lambda: "), ("distributed", distributed, "lambda mesh: ")):
        if isinstance(builder, torch.nn.Module):
            raise UsageError(f"{side}= is a module; give a function that builds it: {side}={call}{type(builder).__name__}(...)")
        if not callable(builder):
            raise UsageError(f"{side}= is {type(builder).__name__}, not a function that builds a module")
    if not binds(distributed, (None,), {}):
        raise UsageError("distributed= is called with the mesh; write distributed=lambda mesh: ...")
    if not callable(step):
        raise UsageError(f"step= is {type(step).__name__}; write step(model, **inputs), or gg.train_step(loss_fn)")
    programs = ModelProgram(sequential, step, "sequential"), ModelProgram(distributed, step, "distributed")
    return Subject(*programs, mesh_of(mesh), _named(inputs), local_inputs)


# ---------------------------------------------------------------------- running
def _run(job: Job) -> Report:
    collected = _COLLECTED.get()
    if collected is not None:
        collected.append(job)
        return job  # type: ignore[return-value]
    try:
        return _report(job)
    except GraphGuardError:
        raise
    except Exception as error:
        raise InternalError(f"{type(error).__name__} in GraphGuard itself: {error}; please report it") from error


def _report(job: Job) -> Report:
    _check(job)
    subject = replace(job.subject, opaque=frozenset(by_operator(job.lemmas)))
    begun = time.perf_counter()
    try:
        captured = capture_subject(subject, progress=_PROGRESS.get(), accept_unstable=True)
    except MismatchError as error:
        spent = time.perf_counter() - begun
        report = Report.of_findings([error.finding], [])
        report.notes.append(f"after that, {error}")
        report.stats = {"ops": 0, "ranks": subject.mesh.size, "seconds": {"capture": spent, "proof": None, "oracle": None}}
        return report
    if all(value is None for value in captured.sequential.outputs.values()):
        raise UsageError(
            "the sequential program returns no tensor, so there is nothing to verify; return what the ranks should match"
        )
    parameters = _parameters(job, captured)
    relations, expected = _with_parameters(job, captured, parameters)
    seconds: dict[str, float | None] = {"capture": captured.seconds, "proof": None, "oracle": None}
    stats: dict[str, Any] = {"ops": 0, "ranks": subject.mesh.size, "seconds": seconds}
    if captured.joint.findings:
        report = Report.of_findings(captured.joint.findings, captured.assumptions)
        report.make_listing = partial(without_relations, captured.sequential, list(captured.ranks))
    else:
        report = _decided(job, captured, relations, expected, stats)
    report.parameters = {name.removeprefix(PARAMETERS): str(found) for name, found in parameters.items()}
    report.assumptions += guesses(parameters) + [each.assumed for each in expected.values() if each.assumed is not None]
    if captured.unstable is not None:
        if report.verdict != "refuted":
            raise CaptureError(captured.unstable)
        report.notes.append(f"{captured.unstable}; it is refuted for ranks in some such states")
    report.notes += _only_of_ranks(captured)
    report.notes += [
        f"the input {name} is read by neither program"
        for name in unread_inputs(captured.sequential, captured.ranks, relations)
        if name in subject.inputs
    ]
    stats["ops"] = sum(len(graph.nodes) for graph in [captured.sequential, *captured.ranks])
    report.stats = stats
    return report


def _decided(
    job: Job, captured: Captured, relations: list[Graph], expected: Mapping[str, Expectation], stats: dict[str, Any]
) -> Report:
    """The verdict of a proof and an execution."""
    from graphguard.oracle.judge import judge

    graphs = captured.sequential, captured.joint, relations
    inputs = job.subject.inputs
    proof_of = partial(_proof, *graphs, expected=expected, ranges=_ranges(inputs), lemmas=by_operator(job.lemmas))
    progress = _PROGRESS.get()
    tell = None if progress is None else partial(progress, "oracle")
    judged = partial(judge, *graphs, expected, _bounds(inputs), trials=job.trials, seed=job.seed, progress=tell)
    proof = first = proof_of()
    _tell("oracle")
    judgement = judged(proved=proof.unconditional, no_parts=proof.no_parts)
    if not judgement.different:
        proof = proved_apart(first, job.subject.mesh.size, proof_of)
        judgement = judgement if proof is first else judged(proved=proof.unconditional, no_parts=proof.no_parts)
    stats["seconds"].update(proof=proof.seconds, oracle=None if judgement.skipped else judgement.seconds)
    stats["oracle"] = {"trials": judgement.trials, "seed": job.seed, "skipped": judgement.skipped}
    assumed = assumptions_of([captured.sequential, *captured.ranks, *relations])
    report = report_of(proof, judgement, [*assumed, *captured.assumptions])
    report.notes += judgement.hints
    return report


def _proof(*graphs: Any, **options: Any) -> Proof:
    from graphguard.engine.prove import prove

    _tell("proof")
    return prove(*graphs, **options)


def _tell(phase: str) -> None:
    """Say which phase begins."""
    progress = _PROGRESS.get()
    if progress is not None:
        progress(phase, 0, 0)


def _check(job: Job) -> None:
    if job.subject.local_inputs is not None and not callable(job.subject.local_inputs):
        raise UsageError(f"local_inputs= is {type(job.subject.local_inputs).__name__}, not a function of (full, coord)")
    if job.outputs is not None and not isinstance(job.outputs, Mapping):
        raise UsageError(f"outputs= is {type(job.outputs).__name__}; write {{path: placement}}")
    by_operator(job.lemmas)
    if job.trials is not None and (not isinstance(job.trials, int) or isinstance(job.trials, bool) or job.trials < 0):
        raise UsageError(f"trials= is {job.trials!r}; write how often both programs are executed, 0 to take a proof as it is")
    if not isinstance(job.seed, int) or isinstance(job.seed, bool) or not 0 <= job.seed < 2**62:
        raise UsageError(f"seed= is {job.seed!r}; write a whole number from 0 on")


def _parameters(job: Job, captured: Captured) -> dict[str, Parameter]:
    """What is known of the parameters of a module; a function has none."""
    if not isinstance(job.subject.distributed, ModelProgram):
        return {}
    use_sequential_names(captured)
    return found_parameters(job.subject, captured, job.params)


def _with_parameters(
    job: Job, captured: Captured, parameters: Mapping[str, Parameter]
) -> tuple[list[Graph], dict[str, Expectation]]:
    """The input relations and what is expected of outputs; for a module, with what is known of its parameters."""
    program, mesh, stated = job.subject.distributed, job.subject.mesh, job.outputs or {}
    outputs, needs, relations = of_dtensors(captured, mesh), needed_parts(captured), captured.relations
    gradients: dict[str, Any] = {}
    if isinstance(program, ModelProgram):
        relations = relations_with(job.subject, captured, parameters)
        if isinstance(program.step, train_step):
            gradients = expected_gradients(captured, parameters)
            outputs |= gradients if program.step.loss is None else {**gradients, "loss": program.step.loss}
            for path, more in needed_gradients(captured, parameters).items():
                needs[path] = [*more, *needs.get(path, ())]
    of_parameters = gradients.keys() - stated.keys()
    expected = expectations({**outputs, **stated}, captured, mesh, needs, other_shapes(captured), of_parameters)
    return relations, expected


def _ranges(inputs: Mapping[str, Input]) -> dict[str, tuple[float | None, float | None]]:
    """The stated bounds `low <= v < high` of inputs, which the proof uses."""
    ranges: dict[str, tuple[float | None, float | None]] = {}
    for name, spec in inputs.items():
        whole = not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype == torch.bool)
        if whole and (spec.low is not None or spec.high is not None):
            ranges[name] = (_ceiling(spec.low), _ceiling(spec.high))
        elif spec.dtype.is_floating_point and (spec.low is not None or spec.high is not None):
            ranges[name] = (spec.low, spec.high)
    return ranges


def _bounds(inputs: Mapping[str, Input]) -> dict[str, tuple[float | None, float | None]]:
    """The stated bounds of all inputs, between which the oracle draws."""
    return {name: (spec.low, spec.high) for name, spec in inputs.items()}


def _ceiling(bound: float | None) -> int | None:
    return math.ceil(bound) if bound is not None and math.isfinite(bound) else None


def _only_of_ranks(captured: Captured) -> list[str]:
    """Outputs that the sequential program does not have."""
    known = {path for path, value in captured.sequential.outputs.items() if value is not None}
    extra = {path: None for graph in captured.ranks for path, value in graph.outputs.items() if value is not None}
    return [f"{path}: only ranks return it, so nothing is claimed of it" for path in extra if path not in known]
