"""What users call. `verify` and `verify_model` describe a check; what is done with it depends on who asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from graphguard.capture.program import FunctionProgram, ModelProgram, call_model
from graphguard.capture.session import Captured, LocalInputs, Subject
from graphguard.capture.session import capture as capture_subject
from graphguard.errors import GraphGuardError
from graphguard.relation import Input, mesh_of

MeshLike = Mapping[str, int] | int


@dataclass(frozen=True)
class Job:
    """One call of `verify` or `verify_model`: the programs, and what is expected of them."""

    subject: Subject
    outputs: Mapping[str, Any] = field(default_factory=dict)
    params: Any = "auto"
    lemmas: Sequence[Any] = ()
    trials: int | None = None
    seed: int = 0


_COLLECTED: ContextVar[list[Job] | None] = ContextVar("collected", default=None)


@contextmanager
def collecting() -> Iterator[list[Job]]:
    """Inside, `verify` and `verify_model` run nothing: they add the job to the list and return it."""
    jobs: list[Job] = []
    token = _COLLECTED.set(jobs)
    try:
        yield jobs
    finally:
        _COLLECTED.reset(token)


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
) -> Any:
    """Whether the distributed function refines the sequential one, for all inputs."""
    return _run(Job(_functions(sequential, distributed, mesh, inputs, local_inputs), outputs or {}, None, lemmas, trials, seed))


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
) -> Any:
    """Whether the distributed module refines the sequential one in what `step` does with them, for all inputs."""
    subject = _models(sequential, distributed, step, mesh, inputs, local_inputs)
    return _run(Job(subject, outputs or {}, params, lemmas, trials, seed))


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
        loss.backward()
        return {"loss": loss.detach(), "grads": {name: p.grad for name, p in model.named_parameters()}}


def _functions(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    mesh: MeshLike,
    inputs: Mapping[str, Input],
    local_inputs: LocalInputs | None,
) -> Subject:
    programs = FunctionProgram(sequential, "sequential"), FunctionProgram(distributed, "distributed")
    return Subject(*programs, mesh_of(mesh), dict(inputs), local_inputs)


def _models(
    sequential: Callable[[], torch.nn.Module],
    distributed: Callable[[Any], torch.nn.Module],
    step: Callable[..., Any],
    mesh: MeshLike,
    inputs: Mapping[str, Input],
    local_inputs: LocalInputs | None,
) -> Subject:
    programs = ModelProgram(sequential, step, "sequential"), ModelProgram(distributed, step, "distributed")
    return Subject(*programs, mesh_of(mesh), dict(inputs), local_inputs)


def _run(job: Job) -> Any:
    collected = _COLLECTED.get()
    if collected is not None:
        collected.append(job)
        return job
    raise GraphGuardError(
        "this version captures programs but has no prover yet: `graphguard capture FILE.py::CHECK` shows the graphs of a "
        "check, and gg.capture_function(...) returns them"
    )
