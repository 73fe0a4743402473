"""Runs both programs on random inputs and compares every tensor with what the engine claims about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from graphguard.aten.kernels import Kernels
from graphguard.aten.operators import DTYPES
from graphguard.engine.interpret import Interpretation
from graphguard.engine.numeric.claims import Audit, Wrong, audit
from graphguard.engine.numeric.evaluator import Array
from graphguard.engine.store.ranges import BEYOND, Ranges, hull
from graphguard.graph.ir import Graph, Value
from graphguard.graph.matching import Joint
from graphguard.oracle.indexed import parts_of
from graphguard.oracle.replay import Run, run, run_joint


def check_claims(
    found: Interpretation,
    sequential: Graph,
    joint: Joint,
    relations: Sequence[Graph],
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> list[Wrong]:
    """The tensors, of the sequential program and of every rank, that are not what the engine says they are."""
    return audit_claims(found, sequential, joint, relations, inputs).wrong


def audit_claims(
    found: Interpretation,
    sequential: Graph,
    joint: Joint,
    relations: Sequence[Graph],
    inputs: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
) -> Audit:
    given = {**random_inputs(found, sequential, seed), **(inputs or {})}
    alone = run(sequential, given, wide=True)
    parts = [run(relation, given, wide=True).outputs() for relation in relations]
    local = [{name: tensor for name, tensor in part.items() if tensor is not None} for part in parts]
    states = run_joint(joint, local, wide=True)
    graphs = [sequential, *joint.graphs, *relations]
    constants = {constant: _array(Kernels(True).tensor(constant)) for graph in graphs for constant in graph.constants.values()}
    for (kind, constant), _ in found.table.atoms():
        if kind == "constant" and constant not in constants:  # a row of one
            constants[constant] = _array(Kernels(True).tensor(constant))  # type: ignore[arg-type, index]
    return audit(
        found,
        (sequential, _held(alone)),
        [(graph, _held(state)) for graph, state in zip(joint.graphs, states, strict=True)],
        {name: _array(Kernels(True).cast(tensor)) for name, tensor in given.items()},
        constants,
    )


def random_inputs(found: Interpretation, sequential: Graph, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs in the ranges that the engine assumes."""
    generator = torch.Generator().manual_seed(seed)
    atoms = {key: atom for (kind, key), atom in found.table.atoms() if kind == "input"}
    result = {}
    for name, value in sequential.inputs.items():
        known = found.table.facts.ranges().get(atoms[name].id, Ranges()) if name in atoms else Ranges()
        result[name] = _random(value, known, generator)
        if name in atoms and atoms[name].nonnegative and value.dtype != "bool":
            result[name] = result[name].abs()
    return result


def _random(value: Value, known: Ranges, generator: torch.Generator) -> torch.Tensor:
    dtype = DTYPES[value.dtype]
    if dtype == torch.bool:
        return torch.rand(value.shape, generator=generator) < 0.5
    if dtype.is_complex:
        return torch.randn(value.shape, generator=generator, dtype=torch.complex128)
    if dtype.is_floating_point:
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)
    parts = parts_of(known)
    low, high = hull(known.declared) if known.declared else (0, max([2, *(len(part.choices()) for part in parts)]))
    low, high = (low if low > -BEYOND else min(0, high - 1)), (high if high < BEYOND else max(2, low + 2))
    tensor = torch.randint(low, max(high, low + 1), value.shape, generator=generator).to(dtype)
    for part in parts:
        tensor = part.placed(tensor)
    return tensor


def _held(state: Run) -> dict[Value, Array]:
    return {value: _array(tensor) for value, tensor in state.values.items() if tuple(tensor.shape) == value.shape}


def _array(tensor: torch.Tensor) -> Array:
    """Numbers, whatever they were; complex ones as pairs along a new last dim."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return np.asarray(tensor.to(torch.float64).numpy())
