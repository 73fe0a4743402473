"""What users call: signatures and what they mean. The steps behind `verify` are in `pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from graphguard.audit.user_lemma import registered_lemma
from graphguard.capture.front import Captured
from graphguard.capture.torch.front import MeshLike, TorchFrontEnd, functions, models
from graphguard.capture.torch.program import call_model
from graphguard.capture.torch.relation.inputs import Input
from graphguard.capture.torch.session import capture
from graphguard.capture.torch.subject import LocalInputs
from graphguard.capture.torch.training import train_step
from graphguard.lemmas.user import Lemma
from graphguard.pipeline import PATHS, Job, run
from graphguard.report.report import Report
from graphguard.scope import counted

__all__ = ["Input", "capture_function", "capture_model", "lemma", "train_step", "verify", "verify_model"]


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
    limits: Mapping[str, int] | None = None,
    paths: int = PATHS,
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
    seed: of the first trial's inputs, and of the first path's.
    limits: `{name: number}`, of work; a report that is `unproven` names those that were reached.
    paths: along how many paths programs are verified that read values, and go different ways by them; `report.paths` says so.
    """
    subject = functions(sequential, distributed, mesh, inputs, local_inputs)
    return run(Job(TorchFrontEnd(subject, outputs), lemmas, trials, seed, limits, paths))


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
    limits: Mapping[str, int] | None = None,
    paths: int = PATHS,
) -> Report:
    """Whether the distributed module refines the sequential one in what `step` does with them, for all inputs and parameters.

    sequential: builds the module; its parameters get no data.
    distributed: builds a rank's module, given the DeviceMesh.
    step: `step(model, **inputs)` returns the outputs; left out, the model is called. `gg.train_step` gives loss and gradients.
    params: "auto", or `{pattern: placement or fn(full, coord)}` for the parameters whose relation is not found.

    All other arguments are those of `verify`.
    """
    subject = models(sequential, distributed, step, mesh, inputs, local_inputs)
    return run(Job(TorchFrontEnd(subject, outputs, params), lemmas, trials, seed, limits, paths))


def capture_function(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    *,
    mesh: MeshLike,
    inputs: Mapping[str, Input],
    local_inputs: LocalInputs | None = None,
) -> Captured:
    """The graphs of two functions: the sequential one, every rank's, and the input relation."""
    return capture(functions(sequential, distributed, mesh, inputs, local_inputs))


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
    return capture(models(sequential, distributed, step, mesh, inputs, local_inputs))


def lemma(
    name: str,
    meaning: str | Callable[..., Any],
    *,
    whole: str | Iterable[str] = (),
    sample: Sequence[Any] | None = None,
) -> Lemma:
    """Say what a custom operator does: inside of a check for this check, else for all checks of this process. A later lemma of
    the same name takes its place.

    meaning: an index rule, `"... h, h -> ... h"`, one pattern for each tensor; or a function in plain torch that takes the
        operator's arguments and gives what it gives.
    whole: the axes of an index rule that the operator must see whole.
    sample: arguments to try the operator on, where small random tensors will not do.

    The lemma is compared with the operator's own CPU kernel first; if they differ, it is refused with the counterexample.
    """
    return registered_lemma(name, meaning, whole, sample)
