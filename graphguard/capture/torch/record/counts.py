"""How often each whole number occurs: `bincount` has as many results as its largest operand says, and at least `minlength`.
Where no operand can be larger than that, its shape is known, and it is a sum of ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from graphguard.aten.operators import Operator
from graphguard.capture.torch.record.invocation import Invocation
from graphguard.graph.ir import Node, Value
from graphguard.graph.operators import name_of

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

_PLACES = {"argmax": 0, "argmin": 0, "topk": 1, "sort": 1}  # which result of an operator holds positions along a dim
_MOVES = {
    "view", "_unsafe_view", "reshape", "clone", "detach", "alias", "slice", "select", "transpose", "t", "permute", "expand",
    "unsqueeze", "squeeze", "as_strided", "contiguous",
}  # fmt: skip


def _bincount(recorder: Recorder, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    numbers = args[0]
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    if weights is not None or not _are_all_below(recorder, recorder.value(numbers), least):
        return recorder.record(Invocation(info, args, kwargs, recorder.aliases))
    with recorder.resumed():
        places = numbers.to(torch.int64)
        return torch.zeros(least, dtype=torch.int64, device=numbers.device).scatter_add(0, places, torch.ones_like(places))


def _are_all_below(recorder: Recorder, value: Value, bound: int) -> bool:
    """Whether whole numbers are known to be from 0 to below a bound: positions along a dim, or an input of a stated range."""
    made = {output: node for node in recorder.graph.nodes for output in node.outputs}
    while value in made:
        node = made[value]
        name = name_of(node.op)
        if name in _PLACES:
            return node.outputs[_PLACES[name]] is value and _length(node) <= bound
        if name not in _MOVES:
            return False
        value = next(node.operands())
    names = [name for name, each in recorder.graph.inputs.items() if each is value]
    return any(recorder.below.get(name, bound + 1) <= bound for name in names)


def _length(node: Node) -> int:
    """Of the dim along which positions are told."""
    operand = next(node.operands())
    place = 2 if name_of(node.op) == "topk" else 1
    last = None if name_of(node.op).startswith("arg") else -1
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", last)
    return operand.shape[dim] if isinstance(dim, int) and operand.shape else operand.numel


HANDLERS: dict[str, Callable[..., Any]] = {"aten.bincount.default": _bincount}
