"""A check of programs that read values, along the path of one sample, ready to be changed.

The ranks are changed as they were recorded, and written for the path again: which decisions they make, what follows from those,
and what operators at known positions become, is all found anew. Inputs are on the path: the sequential program decides on
them as it did on the sample. What the ranks decide there is theirs to show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice

import torch

from graphguard.aten.kernels import tensor_of
from graphguard.capture.front import Along, Problem
from graphguard.engine.limits import Limits
from graphguard.engine.proof import Proof
from graphguard.engine.prove import prove
from graphguard.engine.second_attempt import proved_apart
from graphguard.errors import CaptureError, InternalError, ReplayError, UsageError
from graphguard.graph.ancestry import needed_alone
from graphguard.graph.class_matching import world_of
from graphguard.graph.findings import Finding
from graphguard.graph.ir import Graph, Value
from graphguard.graph.matching import Joint, join
from graphguard.lemmas.known import all_lemmas
from graphguard.lemmas.user import by_operator
from graphguard.mutate.specimen import Specimen, Tensors, Trial, in_full, nudged, trial_of
from graphguard.oracle.draws import Regime, draws_of
from graphguard.oracle.replay import run
from graphguard.pipeline import Job, TakesPaths
from graphguard.relation.expectation import Expectation
from graphguard.routes.along import along
from graphguard.verdict.paths import OPEN

_TRIALS = 5
_AROUND = (0.0, 0.3, 0.1, 1e-2, 1e-3)  # how far inputs that decide are moved, relative to what they are, at first
_TRIES = 40


@dataclass
class PathSpecimen(Specimen):
    problem: Problem | None = None  # as it was recorded, for whichever path
    known: Sequence[Mapping[Value, torch.Tensor]] = ()  # by program, what decides, and what it is on the path
    sample: Tensors = field(default_factory=dict)

    def prove(self, joint: Joint, agrees: bool, locate: bool = True) -> Proof:
        try:
            on_path = self._on_path(joint)
        except (ReplayError, CaptureError) as error:
            return Proof(findings=[Finding("relation-lost", f"the ranks do not go the way that was recorded: {error}")])
        captured, path = on_path.captured, on_path.along
        assert path is not None
        expected = {**on_path.expected, **self.expected}
        if captured.joint.findings:
            return Proof(findings=list(captured.joint.findings))

        def attempt(apart: bool) -> Proof:
            return prove(
                captured.sequential,
                world_of(captured.joint, self.relations, apart),
                expected=expected,
                ranges=self.ranges,
                lemmas=self.lemmas,
                locate=locate,
                limits=Limits().for_paths(),
            )

        first = attempt(self.apart)
        proof = proved_apart(first, self.mesh.size, partial(attempt, True)) if agrees and not self.apart else first
        proof.findings += [Finding("relation-lost", f"{OPEN}: {each}") for each in path.unexplained]
        return proof

    def findings(self, joint: Joint, executed: bool, locate: bool = True) -> list[Finding]:
        """What the proof says: where a fault is located along a path is not looked at."""
        proof = self.prove(joint, not executed, locate=False)
        return proof.findings or [Finding("relation-lost", f"the relation holds only where {e.text}") for e in proof.conditions]

    def _on_path(self, joint: Joint) -> Problem:
        """The question that is asked of changed ranks."""
        assert self.problem is not None
        ranks = [replace(graph, outputs=dict(graph.outputs)) for graph in joint.graphs]
        sequential = replace(self.sequential, outputs=dict(self.sequential.outputs))
        captured = replace(self.problem.captured, sequential=sequential, ranks=ranks, joint=join(ranks))
        graphs = [sequential, *ranks]
        reads = [
            [value for value in known if value in there]
            for known, there in zip(self.known, (set(graph.values()) for graph in graphs), strict=True)
        ]
        return along(replace(self.problem, captured=captured, along=None), reads, self.sample)

    def is_on_path(self, inputs: Tensors) -> bool:
        try:
            state = run(self.sequential, inputs, wide=True)
        except ReplayError:
            return False
        return all(torch.equal(state.values[value], chosen) for value, chosen in self.known[0].items())

    def trial(self, seed: int) -> Trial:
        """The sample, or inputs around it, as far away as the sequential program decides alike."""
        for attempt in range(_TRIES):
            inputs = self._around(seed, attempt)
            if self.is_on_path(inputs):
                return self._trial_of(inputs)
        return self._trial_of(self.sample)

    def _around(self, seed: int, attempt: int) -> Tensors:
        if seed == 0:
            return dict(self.sample)
        generator = torch.Generator().manual_seed(seed * _TRIES + attempt)
        far = _AROUND[seed % len(_AROUND)] * 0.7**attempt
        needed = needed_alone(self.sequential, list(self.known[0]))
        drawn = draws_of(self.sequential, self.ranges, Regime(1.0), {})
        made = {}
        for name, tensor in self.sample.items():
            if not tensor.is_floating_point():
                made[name] = tensor
            elif self.sequential.inputs[name] in needed:
                made[name] = tensor + far * torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * tensor.abs()
            else:
                made[name] = drawn[name].tensor(generator).to(torch.float64)
        return made

    def _trial_of(self, inputs: Tensors) -> Trial:
        moved = nudged(inputs, 0)
        return trial_of(self, inputs, moved if self.is_on_path(moved) else None)


def path_specimens(name: str, job: Job, most: int) -> Iterator[PathSpecimen]:
    """Up to so many paths of a check whose programs read values, each as a specimen."""
    front, own = job.front, by_operator(job.lemmas)
    if not isinstance(front, TakesPaths):
        raise UsageError(f"{name} reads values, and its front end takes no paths")
    problems = front.problems_along(most, job.seed, frozenset(own))
    for number, problem in enumerate(islice(problems, most), 1):
        yield _specimen(f"{name}, path {number}", problem, job)


def _specimen(name: str, problem: Problem, job: Job) -> PathSpecimen:
    path = problem.along
    if path is None:
        raise UsageError(f"{name} is refuted, and only a check that verifies can be mutated")
    raw = _without(problem, path)
    captured, ranges, lemmas = raw.captured, problem.ranges, all_lemmas(by_operator(job.lemmas))
    graphs = (captured.sequential, captured.joint, captured.relations)
    made = PathSpecimen(name, *graphs, problem.mesh, dict(raw.expected), ranges, lemmas=lemmas)
    made.problem, made.sample = raw, {each: tensor_of(constant) for each, constant in path.sample.items()}
    made.known = [{value: tensor_of(constant) for value, constant in known.items()} for known in path.deciding]
    proof = made.prove(captured.joint, agrees=True)
    made.seconds = proof.seconds
    if not proof.proved:
        raise UsageError(f"{name} is not verified, and only a check that verifies can be mutated: {proof.findings[0].message}")
    made.expected = {each: in_full(raw.expected.get(each), proof, each) for each in captured.sequential.outputs}
    made.draw = cache(made.trial)
    made.trials = [made.draw(seed) for seed in range(_TRIALS)]
    difference = made.difference(made.joint)
    if difference is not None:
        raise InternalError(f"{name} is verified, but its ranks compute something else ({difference}); please report it")
    return made


def _without(problem: Problem, path: Along) -> Problem:
    """As it was recorded, without the outputs that say what is decided."""

    def bare(graph: Graph) -> Graph:
        return replace(graph, outputs={each: value for each, value in graph.outputs.items() if each not in path.of_ranks})

    ranks = [bare(graph) for graph in path.raw.joint.graphs]
    captured = replace(path.raw, sequential=bare(path.raw.sequential), ranks=ranks, joint=join(ranks))
    expected: dict[str, Expectation] = {each: e for each, e in problem.expected.items() if each not in path.of_ranks}
    return replace(problem, captured=captured, expected=expected, along=None)
