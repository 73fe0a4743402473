"""Definitions of operators in plain torch, traced for one call of the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from graphguard.aten.operators import DTYPES
from graphguard.capture.torch.program import FunctionProgram, binds
from graphguard.capture.torch.relation.inputs import Input
from graphguard.capture.torch.session import capture_sequential
from graphguard.errors import CaptureError, ProgramError, UsageError
from graphguard.graph.ir import Arg, Graph, Node, Symbol, Value


def trace(function: Callable[..., Any], name: str, node: Node) -> Graph:
    """What a function computes for the arguments of a node, which calls the operator of that name."""
    if not binds(function, node.args, node.kwargs):
        raise UsageError(
            f"the lemma of {name} does not take the arguments with which {node.source} calls the operator; "
            "give the definition the parameters that the operator has"
        )
    inputs = {str(n): Input(tensor.shape, dtype=DTYPES[tensor.dtype]) for n, tensor in enumerate(node.operands())}

    def program(**given: Any) -> Any:
        tensors = iter(given[str(number)] for number in range(len(given)))
        args = [_concrete(arg, tensors) for arg in node.args]
        return function(*args, **{key: _concrete(arg, tensors) for key, arg in node.kwargs.items()})

    try:
        return capture_sequential(FunctionProgram(program, "sequential"), inputs)
    except (CaptureError, ProgramError) as error:
        text = str(error).replace("the sequential program", f"the lemma of {name}")
        raise UsageError(f"{text} (for the call at {node.source})") from None


def _concrete(arg: Arg, tensors: Iterator[Any]) -> Any:
    if type(arg) is Value:
        return next(tensors)
    if type(arg) is tuple:
        return [_concrete(each, tensors) for each in arg]
    if isinstance(arg, Symbol):
        return DTYPES.get(arg.name, arg.name)
    return arg
