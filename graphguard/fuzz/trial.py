"""What is said of a random program against what it does, on inputs that are chosen to be awkward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from graphguard.engine.claims import Wrong
from graphguard.engine.interpret import Interpretation
from graphguard.engine.proof import Proof
from graphguard.engine.prove import interpret, prove
from graphguard.errors import GraphGuardError, ReplayError
from graphguard.expectation import Expectation
from graphguard.fuzz.program import Given, Graphs, Program, graphs_of
from graphguard.mutate.specimen import as_stated, overflows
from graphguard.oracle.claims import audit_claims
from graphguard.oracle.replay import Run, run, run_joint

Tensors = dict[str, torch.Tensor]
TRIALS = 8
_NUDGE = 1e-5  # by which inputs are moved, to see whether rounding alone makes a difference
_NEAR = 1e-6  # relative to the largest element


@dataclass
class Result:
    """wrong: claims about tensors that do not hold. false_proofs: outputs whose proved relation does not.

    left_out: why the program was not looked at. trials: inputs on which the sequential program is defined.
    """

    seed: int
    ranks: int = 0
    steps: int = 0
    trials: int = 0
    compared: int = 0
    undescribed: int = 0
    proved: int = 0
    unproved: int = 0
    wrong: list[str] = field(default_factory=list)
    false_proofs: list[str] = field(default_factory=list)
    left_out: str | None = None


def looked_at(program: Program) -> Result:
    """All that is said of a program, compared."""
    result = Result(program.seed, program.mesh.size, len(program.steps))
    try:
        graphs = graphs_of(program)
    except GraphGuardError as error:
        result.left_out = f"{type(error).__name__}: {error}"
        return result
    if graphs.joint.findings:
        result.left_out = f"the ranks do not fit together: {graphs.joint.findings[0].kind}"
        return result
    everything = (graphs.sequential, graphs.joint, graphs.relations)
    found = interpret(*everything, program.ranges)
    proof = prove(*everything, ranges=program.ranges, locate=False)
    result.proved = len(proof.relations)
    result.unproved = sum(value is not None for value in graphs.sequential.outputs.values()) - result.proved
    for number in range(TRIALS):
        inputs = _inputs(program, number)
        alone = _alone(graphs, inputs)
        if alone is not None:
            result.trials += 1
            _compare(result, program, graphs, found, proof, alone, inputs)
    return result


def _compare(
    result: Result, program: Program, graphs: Graphs, found: Interpretation, proof: Proof, alone: Tensors, inputs: Tensors
) -> None:
    conditional = bool(found.presumed)
    try:
        states = _ranks(graphs, inputs)
    except ReplayError as error:  # a rank indexes outside of a tensor, or an operator has no kernel
        if proof.proved and not conditional and "not implemented" not in str(error):
            result.false_proofs.append(f"all outputs are proved, and the ranks do not run: {error}")
        return
    _compare_claims(result, graphs, found, states, inputs)
    if not _excused(conditional, states):
        _compare_outputs(result, program, proof, states, alone)


# ---------------------------------------------------------------------- claims
def _compare_claims(result: Result, graphs: Graphs, found: Interpretation, states: Sequence[Run], inputs: Tensors) -> None:
    audit = audit_claims(found, graphs.sequential, graphs.joint, graphs.relations, inputs)
    result.compared += audit.compared
    result.undescribed += audit.undescribed
    excused = _excused(bool(found.presumed), states)
    wrong = [each for each in audit.wrong if each.rank is None or not excused]
    first = _first(wrong)
    if first is None:
        return
    if first.rounded:  # what only rounding makes is gone when all is moved by a trifle
        moved = _moved(inputs, result.trials)
        if _jumps(first) or _alone(graphs, moved) is None:
            return
        again = audit_claims(found, graphs.sequential, graphs.joint, graphs.relations, moved)
        if all(each.tensor is not first.tensor for each in again.wrong):
            return
    result.wrong.append(str(first))


def _first(wrong: Sequence[Wrong]) -> Wrong | None:
    """One that is not made from others."""
    tensors = {each.tensor for each in wrong}
    alone = [w for w in wrong if w.node is None or not any(operand in tensors for operand in w.node.operands())]
    return min(alone, key=lambda w: w.node is not None and w.node.communicates, default=None)


_JUMPS = {"floor", "ceil", "round", "trunc", "sign", "sgn", "frac", "remainder", "fmod", "floor_divide", "eq", "ne", "lt", "le", "gt",
          "ge", "argmax", "argmin", "sort", "topk", "cummax", "median", "kthvalue", "bitwise_not", "logical_and", "any", "all",
          "logical_or", "logical_xor", "count_nonzero", "copy"}  # fmt: skip


def _jumps(wrong: Wrong) -> bool:
    """Whether the least difference of what an operation is given makes a large one."""
    assert wrong.node is not None
    name = wrong.node.op.split(".")[1].removesuffix("_")
    return name in _JUMPS or not wrong.tensor.dtype.startswith(("float", "bfloat"))


def _excused(conditional: bool, states: Sequence[Run]) -> bool:
    """Whether nothing is claimed of the ranks: numbers were too large, or a condition may not hold."""
    if any(map(overflows, states)):
        return True
    floats = (tensor for state in states for tensor in state.values.values() if tensor.is_floating_point())
    return conditional and not all(bool(torch.isfinite(each).all()) for each in floats)


# ---------------------------------------------------------------------- outputs
def _compare_outputs(result: Result, program: Program, proof: Proof, states: Sequence[Run], alone: Tensors) -> None:
    held = [state.outputs() for state in states]
    for path, relation in proof.relations.items():
        parts = {rank: part for rank, outputs in enumerate(held) if (part := outputs.get(path)) is not None}
        if relation.placements is None:
            continue
        stated = Expectation(relation.text, tuple(placement for _, placement in relation.placements))
        size = float(alone[path].double().abs().max()) if alone[path].numel() else 0.0
        if not as_stated(alone[path], parts, stated, program.mesh, _NEAR * max(1.0, size)):
            result.false_proofs.append(f"{relation.text} does not hold")


def _ranks(graphs: Graphs, inputs: Tensors) -> list[Run]:
    local = [_present(run(relation, inputs, wide=True).outputs()) for relation in graphs.relations]
    return run_joint(graphs.joint, local, wide=True)


def _alone(graphs: Graphs, inputs: Tensors) -> Tensors | None:
    """The sequential outputs; None where the program is not defined: it raises, or some tensor of it is not finite."""
    try:
        state = run(graphs.sequential, inputs, wide=True)
    except ReplayError:
        return None
    floats = (tensor for tensor in state.values.values() if tensor.is_floating_point())
    return _present(state.outputs()) if all(bool(torch.isfinite(each).all()) for each in floats) else None


def _present(outputs: Mapping[str, torch.Tensor | None]) -> Tensors:
    return {path: tensor for path, tensor in outputs.items() if tensor is not None}


# ---------------------------------------------------------------------- inputs
def _inputs(program: Program, number: int) -> Tensors:
    """The first two trials are plain; in the others each input has a pattern of its own."""
    generator = torch.Generator().manual_seed(1000 * program.seed + number)
    return {
        name: _drawn(given, number if number < 2 else number + place, generator)
        for place, (name, given) in enumerate(program.inputs.items())
    }


def _drawn(given: Given, pattern: int, generator: torch.Generator) -> torch.Tensor:
    shape, count = given.shape, math.prod(given.shape)
    whole = torch.randint(-2, 3, shape, generator=generator)
    if given.dtype == torch.bool:
        return [whole > 0, torch.zeros(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool)][pattern % 3]
    if not given.dtype.is_floating_point:
        return _whole(given, pattern, generator)
    some = torch.randn(shape, generator=generator, dtype=torch.float64)
    patterns: Sequence[torch.Tensor] = [
        some, whole.double(), torch.zeros(shape), torch.ones(shape), whole / 2, -some.abs(),
        torch.arange(count).reshape(shape) == pattern % max(1, count), some.sign() * 3, some.abs(),
    ]  # fmt: skip
    return patterns[pattern % len(patterns)].double()


def _whole(given: Given, pattern: int, generator: torch.Generator) -> torch.Tensor:
    """Whole numbers in the declared range; where there is none, a few below zero, and of the bytes the ends."""
    if given.dtype == torch.uint8:
        low, high = 0, [3, 256][pattern % 2]
    else:
        low, high = (0, given.high) if given.high is not None else ([0, -2, 0, 0][pattern % 4], [2, 3, 4, 1][pattern % 4])
    choices = [
        torch.randint(low, high, given.shape, generator=generator),
        torch.full(given.shape, low),
        torch.full(given.shape, high - 1),
        low + torch.arange(math.prod(given.shape)).reshape(given.shape) % (high - low),
    ]
    return choices[0 if pattern < 2 else pattern % 4].to(given.dtype)


def _moved(inputs: Tensors, number: int) -> Tensors:
    generator = torch.Generator().manual_seed(number)
    return {
        name: tensor + _NUDGE * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in inputs.items()
    }
