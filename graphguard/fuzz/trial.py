"""What is said of a random program against what it does, on inputs that are chosen to be awkward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from graphguard.aten.kernels import Kernels, Lookup
from graphguard.audit.claims import audit_claims
from graphguard.engine.interpret import Interpretation
from graphguard.engine.numeric.claims import Wrong
from graphguard.engine.proof import Proof, Relation
from graphguard.engine.prove import interpret, prove
from graphguard.engine.relate.needs import Needs
from graphguard.errors import GraphGuardError, ReplayError
from graphguard.fuzz.program import Given, Graphs, RandomProgram, graphs_of
from graphguard.graph.ir import Node
from graphguard.graph.operators import COMPARES, name_of
from graphguard.lemmas.known import all_lemmas
from graphguard.mutate.specimen import as_stated
from graphguard.oracle.indexed import lie_inside
from graphguard.oracle.overflow import overflows
from graphguard.oracle.replay import Run, run, run_joint
from graphguard.relation.expectation import Expectation

Tensors = dict[str, torch.Tensor]
TRIALS = 8
_NOISE, _SHAKES, _SHORT = 1e-13, 3, 30  # relative; how often; numbers of so many bits are taken to be exact
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


def looked_at(program: RandomProgram) -> Result:
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
    found = interpret(graphs.sequential, graphs.world(), program.ranges, all_lemmas())
    proof = prove(graphs.sequential, graphs.world(), lemmas=all_lemmas(), ranges=program.ranges, locate=False)
    result.proved = len(proof.relations)
    result.unproved = sum(value is not None for value in graphs.sequential.outputs.values()) - result.proved
    for number in range(TRIALS):
        inputs = _inputs(program, number)
        alone = _alone(graphs, inputs)
        if alone is not None and _are_assumed(found, inputs):
            result.trials += 1
            _compare(result, program, graphs, found, proof, alone, inputs)
    return result


def _compare(
    result: Result, program: RandomProgram, graphs: Graphs, found: Interpretation, proof: Proof, alone: Run, inputs: Tensors
) -> None:
    try:
        states = _ranks(graphs, inputs)
    except ReplayError as error:  # a rank indexes outside of a tensor, or an operator has no kernel
        if proof.proved and not proof.conditions and "not implemented" not in str(error):
            result.false_proofs.append(f"all outputs are proved, and the ranks do not run: {error}")
        return
    if any(map(overflows, (alone, *states))):
        return
    defined = all(map(_is_defined, states))
    if _is_defined(alone):  # what is said of a tensor is said where it has numbers
        _compare_claims(result, graphs, found, states, inputs, defined or not _needs_more(found))
    for path in proof.relations if defined else proof.unconditional:
        _compare_output(result, program, graphs, proof.relations[path], states, _present(alone.outputs()), inputs)


def _are_assumed(found: Interpretation, inputs: Tensors) -> bool:
    """Whether whole numbers lie where the report says that they are taken to lie."""
    known = found.table.facts.ranges()
    atoms = {str(key): atom.id for (kind, key), atom in found.table.atoms() if kind == "input"}
    return all(lie_inside(tensor, known[atoms[name]]) for name, tensor in inputs.items() if atoms.get(name) in known)


def _is_defined(state: Run) -> bool:
    return all(map(_is_finite, state.values.values()))


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _needs_more(found: Interpretation) -> bool:
    """Whether something must hold so that the ranks' operations are defined, and is not known to."""
    needs = Needs(found.table)
    return any(True for each in found.needs for _ in needs.unmet(each.needs))


# ---------------------------------------------------------------------- claims
def _compare_claims(
    result: Result, graphs: Graphs, found: Interpretation, states: Sequence[Run], inputs: Tensors, of_ranks: bool
) -> None:
    audit = audit_claims(found, graphs.sequential, graphs.joint, graphs.relations, inputs)
    result.compared += audit.compared
    result.undescribed += audit.undescribed
    first = _first([each for each in audit.wrong if each.rank is None or of_ranks])
    if first is None:
        return
    if not _by_rounding(graphs, first, states, inputs):
        result.wrong.append(str(first))


def _first(wrong: Sequence[Wrong]) -> Wrong | None:
    """One that is not made from others."""
    tensors = {each.tensor for each in wrong}
    alone = [w for w in wrong if w.node is None or not any(operand in tensors for operand in w.node.operands())]
    return min(alone, key=lambda w: w.node is not None and w.node.communicates, default=None)


class _Noisy(Kernels):
    """Kernels whose results are off by a trifle, but for short numbers, which are not rounded."""

    def __init__(self, seed: int) -> None:
        super().__init__(wide=True)
        self.generator = torch.Generator().manual_seed(seed)

    def run(self, node: Node, lookup: Lookup) -> Sequence[torch.Tensor]:
        return [self._shaken(result) if result.dtype == torch.float64 else result for result in super().run(node, lookup)]

    def _shaken(self, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=self.generator, dtype=torch.float64)
        return torch.where(_is_short(tensor), tensor, tensor * (1 + _NOISE * noise) + 1e-300 * noise)


def _by_rounding(graphs: Graphs, wrong: Wrong, states: Sequence[Run], inputs: Tensors) -> bool:
    """Whether noise in all results moves the tensor about as far as it is from what is said of it, or that is less than the
    last digit of an operand, which a description may add and take away. In runs of short numbers alone nothing is rounded."""
    alone = run(graphs.sequential, inputs, wide=True)
    state = alone if wrong.rank is None else states[wrong.rank]
    floats = (tensor for each in (alone, *states) for tensor in each.values.values() if tensor.is_floating_point())
    if all(bool(_is_short(each).all()) for each in floats):
        return False
    if wrong.node is not None and (_turns(wrong.node, state) or wrong.difference <= _NOISE * _largest(wrong.node, state)):
        return True
    for seed in range(_SHAKES):
        noisy = _noisy(graphs, inputs, seed)
        if noisy is None:
            return True
        shaken = noisy[0] if wrong.rank is None else noisy[1][wrong.rank]
        before, after = state.values[wrong.tensor], shaken.values[wrong.tensor]
        if wrong.undefined and not torch.isfinite(before).equal(torch.isfinite(after)):
            return True
        if _distance(before, after) > min(_NEAR if wrong.said_undefined else math.inf, 0.01 * wrong.difference):
            return True
    return False


def _largest(node: Node, state: Run) -> float:
    """Of the numbers among the operands."""
    operands = (state.values[operand].double() for operand in node.operands())
    return max((float(each.abs().nan_to_num(0, 0).max()) for each in operands if each.numel()), default=0.0)


_STEP = {"floor", "ceil", "round", "trunc", "frac", "sign", "sgn", "any", "all", "count_nonzero", "_to_copy", "copy", "sum"}
_DIVIDE = {"div", "floor_divide", "remainder", "fmod"}


def _turns(node: Node, state: Run) -> bool:
    """Whether an operation turns where its operands are, but for rounding: numbers that are next to each other, or to a whole
    one."""
    operands = [state.values[operand].double() for operand in node.operands()]
    operands += [torch.tensor(float(arg)) for arg in node.args if isinstance(arg, (int, float))]
    name = name_of(node.op)
    if name in _STEP:
        return _are_near(operands[0], operands[0].round())
    if name in COMPARES:
        return _are_near(operands[0], operands[1])
    if name in _DIVIDE and len(operands) > 1:
        quotient = operands[0] / operands[1]
        return _are_near(quotient, quotient.round())
    return False


def _are_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one - other).abs() <= _NEAR * other.abs().clamp(min=1)).any())


def _is_short(tensor: torch.Tensor) -> torch.Tensor:
    mantissa = torch.frexp(tensor)[0] * 2.0**_SHORT
    return mantissa == mantissa.round()


def _is_rounded(node: Node, state: Run) -> bool:
    """Whether an operand has more bits than those that are taken to be exact."""
    operands = (state.values[operand] for operand in node.operands())
    return any(each.is_floating_point() and not bool(_is_short(each).all()) for each in operands)


def _noisy(graphs: Graphs, inputs: Tensors, seed: int) -> tuple[Run, list[Run]] | None:
    """Both sides with noise; None where it moves an index out of its tensor."""
    try:
        local = [_present(run(relation, inputs, wide=True).outputs()) for relation in graphs.relations]
        return run(graphs.sequential, inputs, kernels=_Noisy(seed)), run_joint(graphs.joint, local, kernels=_Noisy(seed + 9))
    except ReplayError:
        return None


def _distance(plain: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the larger of 1 and the largest number."""
    plain, other = plain.double(), other.double()
    apart = torch.where(plain == other, 0.0, (plain - other).abs()).nan_to_num(math.inf)
    return float(apart.max()) / max(1.0, float(plain.abs().nan_to_num(0, 0).max())) if apart.numel() else 0.0


# ---------------------------------------------------------------------- outputs
def _compare_output(
    result: Result,
    program: RandomProgram,
    graphs: Graphs,
    relation: Relation,
    states: Sequence[Run],
    alone: Tensors,
    inputs: Tensors,
) -> None:
    path = relation.path
    parts = {rank: part for rank, state in enumerate(states) if (part := state.outputs().get(path)) is not None}
    if relation.placed is None:
        return
    stated = Expectation(relation.text, relation.placed)
    size = float(alone[path].double().abs().max()) if alone[path].numel() else 0.0
    if as_stated(alone[path], parts, stated, program.mesh, _NEAR * max(1.0, size)):
        return
    if not _is_shaky(graphs, path, states, alone, inputs):
        result.false_proofs.append(f"{relation.text} does not hold")


def _is_shaky(graphs: Graphs, path: str, states: Sequence[Run], alone: Tensors, inputs: Tensors) -> bool:
    """Whether noise in all results moves an output, on either side, or numbers that were rounded are next to each other."""
    if any(_turns(node, state) for state in states for node in state.graph.nodes if _is_rounded(node, state)):
        return True
    for seed in range(_SHAKES):
        noisy = _noisy(graphs, inputs, seed)
        if noisy is None:
            return True
        shaken = [(alone[path], noisy[0].outputs()[path])]
        shaken += [
            (plain.outputs().get(path), other.outputs().get(path)) for plain, other in zip(states, noisy[1], strict=True)
        ]
        if any(a is not None and b is not None and _distance(a, b) > _NEAR for a, b in shaken):
            return True
    return False


def _ranks(graphs: Graphs, inputs: Tensors) -> list[Run]:
    local = [_present(run(relation, inputs, wide=True).outputs()) for relation in graphs.relations]
    return run_joint(graphs.joint, local, wide=True)


def _alone(graphs: Graphs, inputs: Tensors) -> Run | None:
    """The sequential run; None where the program is not defined: it raises, or an output of it is not finite."""
    try:
        state = run(graphs.sequential, inputs, wide=True)
    except ReplayError:
        return None
    return state if all(map(_is_finite, _present(state.outputs()).values())) else None


def _present(outputs: Mapping[str, torch.Tensor | None]) -> Tensors:
    return {path: tensor for path, tensor in outputs.items() if tensor is not None}


# ---------------------------------------------------------------------- inputs
def _inputs(program: RandomProgram, number: int) -> Tensors:
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
