"""Whether a run leaves the numbers that floats have room for. The proof is over the reals, where there is room for all."""

from __future__ import annotations

import torch

from graphguard.graph.ir import Node, Value
from graphguard.graph.operators import GROWS, name_of
from graphguard.oracle.replay import Run

_EXPONENTIALS = {"exp", "exp2", "sigmoid", "_softmax", "silu"}
_BELOW_ONE = {"erf", "tanh", "sigmoid"}  # in size, and yet rounded to it
_SMALLEST = 1e-290


def overflows(run: Run) -> bool:
    """Whether finite numbers become infinite though no real number is; or an exponential becomes nothing, or what is below one
    becomes one, and something is divided by it, or its logarithm taken. A division by a true zero is none of these."""
    vanished: set[Value] = set()
    for node in run.graph.nodes:
        operands = [run.values[value] for value in node.operands() if value in run.values]
        results = {value: run.values[value] for value in node.outputs if value in run.values}
        if not results or not all(map(_is_finite, operands)):
            continue
        name = name_of(node.op)
        ended = _ends(name, operands, list(results.values()))
        lost = any(value in vanished for value in node.operands())
        if ended and (lost or ((name in GROWS or node.communicates) and not _names_infinity(node))):
            return True
        if lost or (name in _EXPONENTIALS and _is_finite(operands[0])):
            vanished |= {value for value, tensor in results.items() if _has_nothing(tensor)}
        if name in _BELOW_ONE:
            vanished |= {value for value, tensor in results.items() if bool((tensor.abs() == 1).any())}
    return False


def _ends(name: str, operands: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """Whether a result is not finite. Of a power that is no overflow where it is no real number, or one over zero."""
    if name != "pow" or operands[0].shape != results[0].shape:
        return not all(map(_is_finite, results))
    return bool((torch.isinf(results[0]) & (operands[0] != 0)).any())


def _is_finite(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all())


def _has_nothing(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool((tensor.abs() < _SMALLEST).any())


def _names_infinity(node: Node) -> bool:
    return any(isinstance(arg, float) and arg in (float("inf"), -float("inf")) for arg in (*node.args, *node.kwargs.values()))
