"""Operators of the user's own. One that is written in Python is recorded by what its body does, below autograd, as its kernel
runs; so a collective or a random number inside is seen. Any other is one operation of the graph, and the graph says what is
assumed of it. So is one for which there is a lemma: that says what it does."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphguard.aten.kernels import tensors_in
from graphguard.aten.operators import Operator, operator, overload
from graphguard.errors import CaptureError, first_line

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

_KERNELS = ("CPU", "CompositeExplicitAutograd")  # in the order in which torch looks for what to run on the CPU
NOT_PYTHON = "it has no kernel for the CPU that is written in Python"


class NotTraced(Exception):
    """The operator stays one operation."""


class HiddenDraw(CaptureError):
    """A body draws random numbers that its operator does not tell of."""


@functools.cache
def is_python(func: torch._ops.OpOverload) -> bool:
    """Whether what runs on the CPU was registered by a Python file."""
    told = torch._C._dispatch_dump(func.name())
    for key in _KERNELS:
        found = re.search(rf"^{key}(?:\[alias\])?: registered at (.*?):\d+ ::", told, re.MULTILINE)
        if found is not None:
            return found[1].endswith(".py")
    return False


def trace_body(recorder: Recorder, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator's kernel under the recorder; NotTraced, with the reason, if that cannot be."""
    if not is_python(info.func):
        raise NotTraced(NOT_PYTHON)
    mark, failure = len(recorder.graph.nodes), recorder.failure
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, list(kwargs.values())])}
    recorder.bodies.append(info)
    try:
        with recorder.resumed(), torch._C._AutoDispatchBelowAutograd():
            result = info.func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
    except HiddenDraw:
        raise
    except Exception as error:
        _undo(recorder, info, mark, error)
        recorder.failure = failure
        raise NotTraced(f"its body cannot be recorded: {_short(error)}") from None
    finally:
        recorder.bodies.pop()
    if any(tensor.untyped_storage()._cdata in given for tensor in tensors_in(result)):
        raise CaptureError(f"{info.name} returns memory of an argument, which its schema does not say; return a copy")
    return result


def _undo(recorder: Recorder, info: Operator, mark: int, error: Exception) -> None:
    """Forget what was recorded of a body. What has an effect cannot be forgotten."""
    done = recorder.graph.nodes[mark:]
    if done and (info.written or any(node.communicates or _draws(node.op) for node in done)):
        raise recorder.failed(CaptureError(
            f"the body of {info.name} has effects, and cannot be recorded to its end: {_short(error)}"
        )) from None  # fmt: skip
    del recorder.graph.nodes[mark:]
    recorder.constants.forget_after(mark)


def require_declared(bodies: Sequence[Operator]) -> None:
    """An operator that draws random numbers is no function of its operands, and torch has a tag to say so."""
    for info in bodies:
        if not info.random:
            raise HiddenDraw(
                f"the operator {info.name} draws random numbers, and is not declared to: torch takes it for a function of its "
                "operands; define it with tags=torch.Tag.nondeterministic_seeded"
            )


def _short(error: Exception) -> str:
    return first_line(error).split(";")[0]


def _draws(op: str) -> bool:
    return not op.startswith(("gg.", "dist.")) and operator(overload(op)).random
