"""A check that verifies, ready to be changed: its graphs, the relation of each output, and runs to compare with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from graphguard.audit.claims import random_inputs
from graphguard.capture.front import Bounds
from graphguard.capture.torch.relation.inputs import chunk
from graphguard.engine.interpret import Interpretation, Lemmas
from graphguard.engine.proof import Proof
from graphguard.engine.prove import Ranges, interpret, prove
from graphguard.engine.second_attempt import proved_apart
from graphguard.errors import CaptureError, InternalError, ReplayError, UsageError
from graphguard.graph.class_matching import world_of
from graphguard.graph.findings import Finding
from graphguard.graph.ir import Graph, Mesh
from graphguard.graph.matching import Joint
from graphguard.graph.placement import Partial, Placements, Shard
from graphguard.lemmas.known import all_lemmas
from graphguard.lemmas.user import by_operator
from graphguard.oracle.overflow import overflows
from graphguard.oracle.replay import run, run_joint
from graphguard.pipeline import Job
from graphguard.relation.expectation import FULL, LOCAL, Expectation
from graphguard.verdict.judge import judge
from graphguard.verdict.verdict import report_of

Tensors = dict[str, torch.Tensor]
# How near is equal: much nearer than in the oracle, so that a small fault counts. Inputs are moved by about as much as float64
# rounds; what that does to an output says what rounding may do.
_NUDGE, _OF_MOVED, _OF_LARGEST = 1e-13, 1e3, 1e-10
_OF_AWKWARD = 1e-11  # where inputs are not moved, as ties would go; a norm of equal numbers is zero but for 1e-13
_SCALES = (1.0, 1.0, 3.0, 0.25)  # of the inputs, one for each of the first trials
_AWKWARD: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (  # what becomes of the inputs in those after them
    lambda t: t.round() if t.is_floating_point() else t,  # ties and zeros
    lambda t: torch.zeros_like(t),
    lambda t: torch.full_like(t, 1 if t.is_floating_point() or t.dtype == torch.bool else _largest(t)),
    lambda t: -t.abs() if t.is_floating_point() else t,
    lambda t: (torch.arange(t.numel()) == t.numel() // 2).reshape(t.shape).to(t.dtype),
)
TRIALS = len(_SCALES) + len(_AWKWARD)
FURTHER = 24  # of what seems to be equal, and is not proved
TINY = TRIALS  # the first of them, for what only counts near zero


@dataclass(frozen=True)
class Trial:
    """Inputs of every rank, and what the sequential program gives for them."""

    local: list[Tensors]
    wanted: Tensors
    tolerance: dict[str, float]


@dataclass
class Specimen:
    """`expected` has the relation of every output, so that a changed program cannot verify by another one."""

    name: str
    sequential: Graph
    joint: Joint
    relations: Sequence[Graph]
    mesh: Mesh
    expected: dict[str, Expectation]
    ranges: Ranges
    seconds: float = 0.0  # that its proof takes
    trials: list[Trial] = field(default_factory=list)
    lemmas: Lemmas = field(default_factory=all_lemmas)
    apart: bool = False  # it is proved only if each rank is described by itself, and so are its changed programs
    draw: Callable[[int], Trial] = field(init=False)

    @property
    def operations(self) -> int:
        return len(self.sequential.nodes) + sum(len(graph.nodes) for graph in self.joint.graphs)

    def prove(self, joint: Joint, agrees: bool, locate: bool = True) -> Proof:
        """The proof that a report rests on. agrees: no run has shown a difference."""

        def attempt(apart: bool) -> Proof:
            return prove(
                self.sequential,
                world_of(joint, self.relations, apart),
                expected=self.expected,
                ranges=self.ranges,
                lemmas=self.lemmas,
                locate=locate,
            )

        first = attempt(self.apart)
        return proved_apart(first, self.mesh.size, partial(attempt, True)) if agrees and not self.apart else first

    def findings(self, joint: Joint, executed: bool, locate: bool = True) -> list[Finding]:
        """What a report says. Where the ranks compute something else, that takes an execution too."""
        proof = self.prove(joint, not executed, locate or not executed)
        conditional = [Finding("relation-lost", f"the relation holds only where {each.text}") for each in proof.conditions]
        if not executed or not locate or (proof.proved and not conditional):
            return proof.findings or conditional
        graphs, proved = (self.sequential, joint, self.relations), proof.unconditional
        judgement = judge(*graphs, self.expected, self.ranges, proved=proved, no_parts=proof.no_parts, small=False)
        return report_of(proof, judgement, ()).findings or conditional

    def agrees(self, trial: Trial) -> bool:
        """Whether the program that verifies does there, too; else rounding decides, or nothing is defined there."""
        return replace(self, trials=[trial]).difference(self.joint) is None

    def difference(self, joint: Joint, further: bool = False) -> str | None:
        """How the ranks' outputs differ from the sequential ones, or None if they are as the relations say on all trials.

        further: on other trials, for what is not proved, either. A rank that never has the largest number, or a branch that
        is seldom taken, takes many.
        """
        for path, expected in self.expected.items():
            if expected.unmet(joint.returning(path)):
                return f"{path} differs: a part of it is nowhere"
        agreed, skipped = False, None
        for trial in filter(self.agrees, map(self.draw, range(TRIALS, TRIALS + FURTHER))) if further else self.trials:
            try:
                states = run_joint(joint, trial.local, wide=True)
            except ReplayError as error:
                return f"it does not run: {error}"
            differing = self._differing(trial, [state.outputs() for state in states])
            if differing is None:
                agreed = True
            elif any(map(overflows, states)):
                skipped = differing  # a proof is of numbers that have room
            else:
                return f"{differing} differs"
        return None if agreed or skipped is None else f"{skipped} differs"

    def _differing(self, trial: Trial, held: Sequence[Mapping[str, torch.Tensor | None]]) -> str | None:
        for path, wanted in trial.wanted.items():
            parts = {rank: part for rank, outputs in enumerate(held) if (part := outputs.get(path)) is not None}
            if not as_stated(wanted, parts, self.expected[path], self.mesh, trial.tolerance[path]):
                return path
        return None


def specimen(name: str, job: Job) -> Specimen:
    """Capture a check, prove it, and run it. A check that does not verify is an error."""
    own = by_operator(job.lemmas)
    lemmas, problem = all_lemmas(own), job.front.problem(frozenset(own))
    captured, stated, ranges = problem.captured, problem.expected, problem.ranges
    if captured.unstable is not None:
        raise CaptureError(captured.unstable)
    if captured.joint.findings:
        raise UsageError(
            f"{name} is refuted, and only a check that verifies can be mutated: {captured.joint.findings[0].message}"
        )

    def attempt(apart: bool) -> Proof:
        return prove(captured.sequential, captured.world(apart), expected=stated, ranges=ranges, lemmas=lemmas)

    first = attempt(apart=False)
    proof = proved_apart(first, problem.mesh.size, partial(attempt, True))
    if not proof.proved:
        raise UsageError(f"{name} is not verified, and only a check that verifies can be mutated: {proof.findings[0].message}")
    expected = {path: in_full(stated.get(path), proof, path) for path in proof.relations}
    graphs = (captured.sequential, captured.joint, captured.relations)
    made = Specimen(name, *graphs, problem.mesh, expected, ranges, proof.seconds, lemmas=lemmas, apart=proof is not first)
    found = interpret(made.sequential, captured.world(), made.ranges, lemmas)
    made.draw = cache(partial(_trial, made, found, problem.bounds))
    made.trials = [made.draw(seed) for seed in range(len(_SCALES))]
    difference = made.difference(made.joint)
    if difference is not None:
        raise InternalError(f"{name} is verified, but its ranks compute something else ({difference}); please report it")
    made.trials += filter(made.agrees, map(made.draw, range(len(_SCALES), TRIALS)))
    return made


def in_full(stated: Expectation | None, proof: Proof, path: str) -> Expectation:
    """What is expected of an output; its proved relation, if none is stated."""
    if stated is not None and stated.states_relation:
        return stated
    proved = _as_proved(proof, path)
    return proved if stated is None else replace(proved, needs=stated.needs)


def _as_proved(proof: Proof, path: str) -> Expectation:
    relation = proof.relations[path]
    if relation.placed is None:
        raise UsageError(f"the relation of {path} has no placements; state it with outputs=")
    return Expectation(relation.text, relation.placed)


def _trial(made: Specimen, found: Interpretation, bounds: Mapping[str, Bounds], seed: int) -> Trial:
    """Inputs in the ranges that the proof assumes."""
    awkward = _AWKWARD[seed - len(_SCALES)] if len(_SCALES) <= seed < TRIALS else None
    given = random_inputs(found, made.sequential, seed)
    for name, tensor in given.items():
        if awkward is not None:
            given[name] = tensor = awkward(tensor) if tensor.is_floating_point() else _among(tensor, awkward(tensor))
        elif tensor.is_floating_point():
            tensor = tensor * (2.0**-30 if seed == TINY else _SCALES[seed % len(_SCALES)])
        given[name] = _within(tensor, *bounds.get(name, (None, None))) if tensor.is_floating_point() else tensor
    return trial_of(made, given, None if awkward is not None else nudged(given, seed))


def trial_of(made: Specimen, given: Tensors, moved: Tensors | None) -> Trial:
    """moved: the same inputs but for rounding, where they can be moved."""
    wanted = _outputs(made.sequential, given)
    others, room = (wanted, _OF_AWKWARD) if moved is None else (_outputs(made.sequential, moved), 0.0)
    tolerance = {path: _tolerance(tensor, others[path], room) for path, tensor in wanted.items()}
    return Trial([_outputs(relation, given) for relation in made.relations], wanted, tolerance)


def _among(drawn: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Other whole numbers, as far as they lie between those that were drawn in their range."""
    if drawn.dtype == torch.bool or not drawn.numel():
        return others
    return others.clamp(drawn.min(), drawn.max())


def _outputs(graph: Graph, inputs: Tensors) -> Tensors:
    return {path: tensor for path, tensor in run(graph, inputs, wide=True).outputs().items() if tensor is not None}


def nudged(inputs: Tensors, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + _NUDGE * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in inputs.items()
    }


def _tolerance(whole: torch.Tensor, moved: torch.Tensor, room: float) -> float:
    if not (whole.is_floating_point() or whole.is_complex()):
        return 0.0
    return room + _OF_LARGEST * _largest(whole) + _OF_MOVED * _largest(whole - moved) + 1e-14


def _largest(tensor: torch.Tensor) -> float:
    sizes = tensor.abs()[torch.isfinite(tensor.abs())]
    return float(sizes.max()) if sizes.numel() else 0.0


def _within(tensor: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """Inside the bounds that an input states."""
    if low is not None and high is not None:
        return low + torch.sigmoid(tensor) * (high - low)
    if low is not None:
        return low + tensor.abs()
    return high - tensor.abs() if high is not None else tensor


# ---------------------------------------------------------------------- whether outputs are as their relation says
def as_stated(
    wanted: torch.Tensor, parts: Mapping[int, torch.Tensor], expected: Expectation, mesh: Mesh, tolerance: float
) -> bool:
    if expected.graphs is not None:
        return all(
            graph is not None and _close(run(graph, {FULL: wanted}, wide=True).outputs()[LOCAL], parts[rank], tolerance)
            for rank, graph in enumerate(expected.graphs)
            if rank in parts
        )
    assert expected.placements is not None
    coordinates = {rank: mesh.coordinate(rank) for rank in parts}
    places = {axis: sorted({coordinate[axis] for coordinate in coordinates.values()}) for axis in mesh.names}
    held = {tuple(places[axis].index(at) for axis, at in coordinates[rank].items()): part for rank, part in parts.items()}
    sizes = [len(places[axis]) for axis in mesh.names]
    if len(held) != math.prod(sizes):
        return False
    for axis, placement in enumerate(expected.placements):
        if isinstance(placement, Partial):
            held = _reduced(held, axis, sizes[axis], placement.reduce)
    return all(
        _close(_tile(wanted, expected.placements, place, sizes), held[place], tolerance)
        for place in itertools.product(*map(range, sizes))
    )


def _reduced(
    held: Mapping[tuple[int, ...], torch.Tensor], axis: int, size: int, reduce: str
) -> dict[tuple[int, ...], torch.Tensor]:
    result = {}
    for place in held:
        parts = [held[(*place[:axis], at, *place[axis + 1 :])] for at in range(size)]
        if len({part.shape for part in parts}) > 1:
            return dict(held)  # nothing to be reduced, and so nothing that agrees
        stacked = torch.stack(parts)
        match reduce:
            case "max" | "min":
                result[place] = stacked.amax(0) if reduce == "max" else stacked.amin(0)
            case "avg":
                result[place] = stacked.sum(0) / size
            case _:
                result[place] = stacked.sum(0)
    return result


def _tile(wanted: torch.Tensor, placements: Placements, place: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for placement, at, size in zip(placements, place, sizes, strict=True):
        if isinstance(placement, Shard):
            wanted = chunk(wanted, placement.dim, at, size)
    return wanted


def _close(want: torch.Tensor | None, have: torch.Tensor, tolerance: float) -> bool:
    """Where the sequential program is defined."""
    if want is None or want.shape != have.shape:
        return False
    if not (want.is_floating_point() or want.is_complex()):
        return bool((want == have).all())
    have = have.to(want.dtype)
    return bool((((have - want).abs() <= tolerance) | (have == want) | want.isnan()).all())
