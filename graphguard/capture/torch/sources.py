"""Which line of the user's files an operation comes from, and which module of the model runs it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType

import torch
import typing_extensions

import graphguard
from graphguard.capture.torch.wrappers import named_modules
from graphguard.graph.cells import COMMAND, is_command
from graphguard.graph.ir import Source

_OURS = os.path.dirname(graphguard.__file__) + os.sep
_HIDDEN = (
    _OURS,
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(concurrent.futures.__file__) + os.sep,
    contextlib.__file__,
    copy.__file__,
    functools.__file__,
    threading.__file__,
    typing_extensions.__file__,
    "<frozen ",
    *(() if is_command() else (COMMAND,)),  # made by libraries, unless it is the program
    "<eval_with_key>",
)
# What called these is not the program's: a command line, a test runner.
_ENTRIES = {os.path.join(os.path.dirname(__file__), file) for file in ("program.py", "session.py")}
MOST_CALLERS = 5  # lines of the user's that led to an operation, the nearest one included
_BACKWARD_ENTRY = torch.autograd.graph._engine_run_backward.__code__
_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__


def is_user_file(file: str) -> bool:
    return not file.startswith(_HIDDEN)


class ModulePaths:
    """What modules are called: as the outermost module that is called has them, or the one that is checked. No module is kept
    alive: what a program does may depend on when a wrapper goes (DDP averages no more gradients then)."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}  # by identity, while the module is there

    def add(self, root: torch.nn.Module) -> None:
        for path, module in named_modules(root):
            self._put(module, path)

    def _put(self, module: torch.nn.Module, path: str) -> str:
        known = self._path(module)
        if known is not None:
            return known
        self._known[id(module)] = weakref.ref(module), path
        return path

    def _path(self, module: torch.nn.Module) -> str | None:
        known = self._known.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def of(self, call: FrameType | None) -> str:
        """Of the module that is called in a frame."""
        if call is None:
            return ""
        module = call.f_locals["self"]
        known = self._path(module)
        if known is None:
            calls = [call, *_calls_outside(call)]
            self.add(calls[-1].f_locals["self"])
            # one that no module holds has the path of the one that calls it
            known = self._put(module, self.of(calls[1] if len(calls) > 1 else None))
        return known


def _calls_outside(frame: FrameType) -> Iterator[FrameType]:
    """The calls of modules that led to a frame."""
    outer = frame.f_back
    while outer is not None and outer.f_code.co_filename not in _ENTRIES:
        if outer.f_code is _MODULE_CALL:
            yield outer
        outer = outer.f_back


class SourceTracker:
    """Forward operations have the nearest user frame. Backward ones have the line of the forward operation whose gradient
    they compute, found by autograd's sequence number, unless they run in a `backward` (or recomputed forward) of the user.
    Where no user code is involved, the last known line stands. The module is the innermost that is being called; of a
    backward that the user wrote, the one that called its forward."""

    def __init__(self) -> None:
        self._by_sequence: dict[int, Source] = {}
        self._known: list[Source | None] = [None]
        # by file, line, the number of the caller, which is quick to hash, and module
        self._numbers: dict[tuple[str, int, int, str], int] = {}
        self._hides: dict[str, bool] = {}
        self._last: Source | None = None
        self._module = ""  # that ran what was looked at last
        self.modules = ModulePaths()

    def here(self) -> tuple[Source | None, bool]:
        """The source of the operation being dispatched, and whether it belongs to a backward pass."""
        node = torch._C._current_autograd_node()
        if node is None:
            source = self.nearest()
            if source is None and self._last is not None:
                source = self._last.inside(self._module)
        else:
            source, forward = self.nearest(stop_at_engine=True), self._by_sequence.get(node._sequence_nr())
            if source is None:
                source = forward or self.nearest()
                self._last = source or self._last
                return self._last, True
            if forward is not None and not source.module:
                source = source.inside(forward.module)
        if source is not None:
            # autograd made its node for this operation just before it was dispatched; if it made none, the number is that of
            # an earlier one, which has its line
            self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, source)
            self._last = source
        return self._last, node is not None

    def expect_node(self) -> None:
        """A custom function is about to make its autograd node: its backward belongs to the line that applies it."""
        source = self.nearest()
        if source is not None:
            self._by_sequence[torch.autograd._get_sequence_nr()] = source

    def nearest(self, stop_at_engine: bool = False) -> Source | None:
        frame: FrameType | None = sys._getframe(2)
        found: list[tuple[FrameType, int]] = []  # each with how many calls of modules are inside of it
        calls: list[FrameType] = []
        while frame is not None and (len(found) < MOST_CALLERS or len(calls) <= found[MOST_CALLERS - 1][1]):
            code = frame.f_code
            file = code.co_filename
            hidden = self._hides.get(file)
            if hidden is None:
                hidden = self._hides[file] = file.startswith(_HIDDEN)
            if not hidden:
                found.append((frame, len(calls)))
            elif code is _MODULE_CALL:
                calls.append(frame)
            elif (stop_at_engine and code is _BACKWARD_ENTRY) or file in _ENTRIES:
                break
            frame = frame.f_back
        modules = [self.modules.of(call) for call in calls]
        modules.append("")
        self._module = modules[0]
        number = 0
        for place in reversed(range(min(len(found), MOST_CALLERS))):
            each, inside = found[place]
            number = self._number(each.f_code, each.f_lineno, number, modules[inside if place else 0])
        return self._known[number]

    def _number(self, code: CodeType, line: int, caller: int, module: str) -> int:
        key = (code.co_filename, line, caller, module)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._known)
            file = code.co_filename if code.co_filename.startswith("<") else os.path.abspath(code.co_filename)
            self._known.append(Source(file, line, code.co_name, self._known[caller]).inside(module))
        return number
