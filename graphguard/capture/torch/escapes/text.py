"""Tensors as text. What a tensor looks like is its values, so the text of one that has none must not decide anything: it may be
made in a call of `print` or of a logger, which is what programs do with it, and nowhere else."""

from __future__ import annotations

import ast
import builtins
import functools
import logging
import os
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from graphguard.capture.torch.escapes.statements import statement_of
from graphguard.capture.torch.record.constants import NotConstant
from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

_TORCH, _LOGGING = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(logging.__file__) + os.sep
_TEXTS = ("__repr__", "__str__", "__format__")
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PRINTERS: list[Any] = []  # functions of libraries
_LEVELS = {"debug", "info", "warning", "warn", "error", "critical", "exception", "log"}


def guard_text(recorder: Recorder) -> None:
    """Patches torch for the rest of this process."""
    plain: dict[str, Any] = {name: getattr(torch.Tensor, name) for name in ("__repr__", "__format__")}

    def text(self: torch.Tensor, method: str, *args: Any) -> str:
        frame = _asking()
        if frame is None:
            return plain[method](self, *args)  # type: ignore[no-any-return]
        constant = _constant(recorder, self)
        if constant is not None:
            with _disable_current_modes():
                return plain[method](constant, *args)  # type: ignore[no-any-return]
        if is_only_shown(frame):
            return f"tensor(..., size={tuple(self.shape)}, dtype={self.dtype})"
        recorder.locate()
        raise recorder.failed(CaptureError(
            "the program makes text of a tensor whose values are not known while it is captured, and could decide by it what "
            "it does next; leave it out, or make it in the call that prints it (`print(f\"{x}\")`)"
        ))  # fmt: skip

    torch.Tensor.__repr__ = lambda self, **kwargs: text(self, "__repr__")
    torch.Tensor.__format__ = lambda self, spec: text(self, "__format__", spec)
    for kind in (DTensor, AsyncCollectiveTensor, torch.nn.Parameter):
        _guard_subclass(kind, text)


def only_prints(function: Any) -> None:
    """A library's function that prints or logs what it is given, and does nothing else with it."""
    _PRINTERS.append(function)


def _guard_subclass(kind: Any, text: Any) -> None:
    made = kind.__repr__

    @functools.wraps(made)
    def guarded(self: Any) -> str:
        shown = text(self, "__repr__")
        return f"{kind.__name__} containing:\n{shown}" if kind is torch.nn.Parameter else shown

    kind.__repr__ = guarded


def _constant(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with its values, if they are known and it looks the same without a history."""
    if type(tensor) not in _PLAIN or tensor.grad_fn is not None:
        return None
    with _disable_current_modes():
        try:
            found = recorder.constants.tensor(recorder.value(tensor)).clone()
        except (NotConstant, CaptureError):
            return None
        return found.requires_grad_() if tensor.requires_grad else found


def _asking() -> FrameType | None:
    """Whose text it is to be; None if it is torch that asks, other than to make a text of its own."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        if frame.f_code.co_filename != __file__ and frame.f_code.co_name not in _TEXTS:
            return None
        frame = frame.f_back
    return frame


def is_only_shown(frame: FrameType) -> bool:
    """Whether text that is made there is printed or logged, and nothing else."""
    if frame.f_code.co_filename.startswith(_LOGGING):
        return True
    if sys.stdout is not sys.stderr:  # the program redirects what it prints
        return False
    statement = statement_of(frame)
    return statement is not None and _prints(statement, frame)


def _prints(statement: ast.stmt, frame: FrameType) -> bool:
    """Whether the statement is a call of the builtin `print`, to the terminal, of a logger, or of a library's own printer."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call) or _keeps_text(statement.value):
        return False
    call, names = statement.value, {**frame.f_globals, **frame.f_locals}
    if isinstance(call.func, ast.Name):
        found = names.get(call.func.id, getattr(builtins, call.func.id, None))
        if any(found is printer for printer in _PRINTERS):
            return all(isinstance(word.value, ast.Constant) for word in call.keywords)
        return found is builtins.print and all(word.arg in ("sep", "end", "flush") for word in call.keywords)
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return False
    owner = names.get(call.func.value.id)
    return call.func.attr in _LEVELS and (owner is logging or isinstance(owner, logging.Logger))


def _keeps_text(printing: ast.Call) -> bool:
    """Whether text that is made in a call of `print` may be known elsewhere: it gets a name, or is given to someone else."""
    inside = [node for node in ast.walk(printing) if node is not printing]
    given = [argument for node in inside if isinstance(node, ast.Call) and not _is_textual(node) for argument in node.args]
    return any(isinstance(node, ast.NamedExpr | ast.Await | ast.Yield) for node in inside) or any(
        _is_text(node) for argument in given for node in ast.walk(argument)
    )


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _is_textual(node))


def _is_textual(call: ast.Call) -> bool:
    """Whether a call makes text of what it is given, and no more."""
    if isinstance(call.func, ast.Name):
        return call.func.id in ("str", "repr", "format")
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("format", "join", "ljust", "rjust", "center")
