"""The front end for PyTorch: what the user passes to `verify` or `verify_model`, and the problem that it states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphguard.capture.front import Captured, Problem, Progress, mesh_of, require_outputs
from graphguard.capture.torch.program import PARAMETERS, FunctionProgram, ModelProgram, binds
from graphguard.capture.torch.relation.dtensors import needed_parts, of_dtensors, other_shapes
from graphguard.capture.torch.relation.inputs import Input, bounds_of
from graphguard.capture.torch.relation.made_parameters import MadeParameter
from graphguard.capture.torch.relation.other_layouts import in_code, other_layouts
from graphguard.capture.torch.relation.outputs import expectations
from graphguard.capture.torch.relation.parameters import (
    Parameters,
    expected_gradients,
    found_parameters,
    guesses,
    needed_gradients,
    use_sequential_names,
    with_gradients_of_made,
    with_relations,
)
from graphguard.capture.torch.sampled import UndefinedPath, capture_along
from graphguard.capture.torch.session import capture
from graphguard.capture.torch.subject import LocalInputs, Subject
from graphguard.capture.torch.training import train_step
from graphguard.errors import ProgramError, UsageError
from graphguard.graph.ir import Graph, Mesh, Value
from graphguard.relation.expectation import Expectation
from graphguard.routes.along import along
from graphguard.routes.drawn import Drawn
from graphguard.routes.variety import Variety

MeshLike = Mapping[str, int] | int


@dataclass(frozen=True)
class TorchFrontEnd:
    """Two programs in torch, and what is expected of them. outputs, params: as the user wrote them."""

    subject: Subject
    outputs: Mapping[str, Any] | None = None
    params: Any = "auto"

    @property
    def mesh(self) -> Mesh:
        return self.subject.mesh

    def capture(self, progress: Progress | None = None) -> Captured:
        return capture(self.subject, progress=progress)

    def problem(self, opaque: frozenset[str], progress: Progress | None = None) -> Problem:
        self._check()
        captured = capture(replace(self.subject, opaque=opaque), progress=progress, accept_unstable=True)
        require_outputs(captured.sequential)
        return self._stated(captured)

    def _stated(self, captured: Captured) -> Problem:
        """What is asked of programs that were captured."""
        parameters = self._parameters(captured)
        captured = self._with_relations(captured, parameters)
        return Problem(
            self.mesh,
            captured,
            self._expected(captured, parameters),
            bounds_of(self.subject.inputs),
            {name.removeprefix(PARAMETERS): str(found) for name, found in parameters.items()},
            tuple(guesses(parameters)),
        )

    def on(self, mesh: Mesh) -> TorchFrontEnd:
        """The same programs on other ranks."""
        return replace(self, subject=replace(self.subject, mesh=mesh))

    def other_layouts(self, problem: Problem) -> Iterator[tuple[str, Problem]]:
        """The same with other layouts of the parameters of which only shapes speak, each as the user would state it."""
        captured = problem.captured
        parameters = self._parameters(captured)
        if any(isinstance(found, MadeParameter) for found in parameters.values()):
            return  # whose gradients were written into the sequential program
        for stated in other_layouts(parameters, captured.sequential, self.mesh):
            known = {} if self.params == "auto" else self.params
            yield in_code(stated), replace(self, params={**known, **stated})._stated(captured)

    def problems_along(
        self, paths: int, seed: int, opaque: frozenset[str], progress: Progress | None = None
    ) -> Iterator[Problem]:
        """The same along the paths of samples, for programs that read values: up to so many different ones."""
        self._check()
        subject = replace(self.subject, opaque=opaque)
        fixed = {name: each.values for name, each in self.subject.inputs.items() if each.values is not None}
        drawn = Drawn(seed, bounds=bounds_of(self.subject.inputs), fixed=fixed)
        try:
            first, reads = self._along(subject, drawn, progress)
        except UndefinedPath as undefined:
            raise _on_a_sample(undefined.error) from None
        yield first
        found = 1
        for other in Variety(drawn, first, reads).different() if first.along is not None else ():
            if found >= paths:
                return
            with suppress(UndefinedPath):
                problem, _ = self._along(subject, other, progress)
                if not (other.has_ties and problem.along is not None and problem.along.unexplained):  # rounding breaks ties
                    found += 1
                    yield problem

    def _along(self, subject: Subject, drawn: Drawn, progress: Progress | None) -> tuple[Problem, Sequence[Value]]:
        """The problem on the path of a sample, and what the sequential program read."""
        found = capture_along(subject, drawn, self._relations, progress)
        require_outputs(found.captured.sequential)
        problem = self._stated(found.captured)
        if problem.captured.joint.findings:
            return problem, found.reads[0]
        inputs = problem.captured.sequential.inputs
        sample = {name: drawn.input(name, value) for name, value in inputs.items()}
        return along(problem, found.reads, sample), found.reads[0]

    def _relations(self, captured: Captured) -> Sequence[Graph]:
        """Of ranks that are captured in part."""
        if not isinstance(self.subject.distributed, ModelProgram):
            return captured.relations
        use_sequential_names(captured)
        return with_relations(self.subject, captured, found_parameters(self.subject, captured, self.params)).relations

    def _check(self) -> None:
        local_inputs = self.subject.local_inputs
        if local_inputs is not None and not callable(local_inputs):
            raise UsageError(f"local_inputs= is {type(local_inputs).__name__}, not a function of (full, coord)")
        if self.outputs is not None and not isinstance(self.outputs, Mapping):
            raise UsageError(f"outputs= is {type(self.outputs).__name__}; write {{path: placement}}")

    def _parameters(self, captured: Captured) -> Parameters:
        """What is known of the parameters of a module; a function has none."""
        if not isinstance(self.subject.distributed, ModelProgram):
            return {}
        use_sequential_names(captured)
        return found_parameters(self.subject, captured, self.params)

    def _with_relations(self, captured: Captured, parameters: Parameters) -> Captured:
        """For a module, with the relations of its parameters."""
        if not isinstance(self.subject.distributed, ModelProgram):
            return captured
        with_gradients_of_made(captured, parameters)
        return with_relations(self.subject, captured, parameters)

    def _expected(self, captured: Captured, parameters: Parameters) -> dict[str, Expectation]:
        """What is stated of outputs, what DTensors say of themselves, and what a training step returns."""
        program, stated = self.subject.distributed, self.outputs or {}
        outputs, needs = of_dtensors(captured, self.mesh), needed_parts(captured)
        gradients: dict[str, Any] = {}
        if isinstance(program, ModelProgram) and isinstance(program.step, train_step):
            gradients = expected_gradients(captured, parameters)
            outputs |= gradients if program.step.loss is None else {**gradients, "loss": program.step.loss}
            for path, more in needed_gradients(captured, parameters).items():
                needs[path] = [*more, *needs.get(path, ())]
        of_parameters = gradients.keys() - stated.keys()
        return expectations({**outputs, **stated}, captured, self.mesh, needs, other_shapes(captured), of_parameters)


def _on_a_sample(error: ProgramError) -> ProgramError:
    advice = "this is on a sample of the inputs, as the program reads values; low=, high= and values= of gg.Input say on which"
    return ProgramError(f"{error}; {advice}", error.frames)


# ---------------------------------------------------------------------- what the user passes
def functions(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    mesh: MeshLike,
    inputs: Mapping[str, Input],
    local_inputs: LocalInputs | None,
) -> Subject:
    programs = FunctionProgram(sequential, "sequential"), FunctionProgram(distributed, "distributed")
    return Subject(*programs, mesh_of(mesh), _by_name(inputs), local_inputs)


def models(
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
    return Subject(*programs, mesh_of(mesh), _by_name(inputs), local_inputs)


def _by_name(inputs: Any) -> dict[str, Input]:
    if not isinstance(inputs, Mapping):
        raise UsageError(f"inputs= is {type(inputs).__name__}; write {{name: gg.Input(shape, placement)}}")
    return dict(inputs)
