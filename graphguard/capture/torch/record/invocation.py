"""One call of an operator: what the graph says of it, and what is run in its place on meta tensors."""

from __future__ import annotations

from typing import Any

import torch

from graphguard.aten.operators import IRRELEVANT_KEYWORDS, Operator, symbol
from graphguard.capture.torch.escapes.device import given_device, is_meta
from graphguard.capture.torch.record.aliasing import AliasTable, Cell
from graphguard.capture.torch.record.shapes import META, scalar_key
from graphguard.errors import CaptureError
from graphguard.graph.ir import Arg, Symbol, Value

_TENSOR = object()


class Invocation:
    """`encoded` and `keywords` are the arguments as values of the graph; `args` and `kwargs` are what the operator is run on.
    `cells` are the windows that the arguments show, in order."""

    __slots__ = ("_originals", "args", "cells", "device", "encoded", "generator", "info", "keywords", "kwargs")

    def __init__(self, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], aliases: AliasTable):
        self.info, self.args, self.kwargs = info, args, kwargs
        self.cells: list[Cell] = []
        with_data: list[torch.Tensor] = []
        self.encoded: tuple[Arg, ...] = tuple([self._encode(arg, aliases, with_data) for arg in args])
        self.keywords: dict[str, Arg] = {}
        for name, arg in kwargs.items():
            if name not in IRRELEVANT_KEYWORDS:
                self.keywords[name] = self._encode(arg, aliases, with_data)
        self.generator: torch.Generator | None = kwargs.get("generator")
        self._originals: dict[int, torch.Tensor] = {}
        if with_data:
            self._leave_data_out(with_data, aliases)
        self.device: torch.device | None = None  # that the results are put on, if the call names another one than the CPU
        if info.is_factory or "generator" in kwargs:
            self._make_on_meta()

    def _encode(self, arg: Any, aliases: AliasTable, with_data: list[torch.Tensor]) -> Arg:
        kind = type(arg)
        if kind is int or kind is float or kind is bool or kind is str or arg is None:
            return arg  # type: ignore[no-any-return]
        if isinstance(arg, torch.Tensor):
            cell = aliases.cell(arg)
            self.cells.append(cell)
            if not is_meta(arg):
                with_data.append(arg)
            return aliases.read(cell)
        if isinstance(arg, (list, tuple)):
            return tuple([self._encode(item, aliases, with_data) for item in arg])
        named = symbol(arg)
        if named is not None:
            return named
        if isinstance(arg, (int, float, complex)):  # of a subclass, as numpy's floats are
            return int(arg) if isinstance(arg, int) else float(arg) if isinstance(arg, float) else complex(arg)
        if isinstance(arg, torch.device):
            return Symbol("device", "cpu")
        raise CaptureError(f"an argument of type {kind.__name__} cannot be part of a graph")

    def _leave_data_out(self, with_data: list[torch.Tensor], aliases: AliasTable) -> None:
        twins = {id(tensor): aliases.without_data(aliases.cell(tensor)) for tensor in with_data}
        self._originals = {id(twins[id(tensor)]): tensor for tensor in with_data}
        self.args = _replace(self.args, twins)
        self.kwargs = {name: _replace(arg, twins) for name, arg in self.kwargs.items()}

    def _make_on_meta(self) -> None:
        kwargs = self.kwargs
        if self.info.is_factory:
            named = [arg for arg in (*self.args, kwargs.get("device")) if isinstance(arg, torch.device)]
            self.device = given_device(named[0]) if named else None
            self.args = tuple([META if isinstance(arg, torch.device) else arg for arg in self.args])
            kwargs = {**kwargs, "device": META}
        # meta kernels draw no numbers: a generator of another device would only be refused
        self.kwargs = {name: None if name == "generator" else arg for name, arg in kwargs.items() if name != "pin_memory"}

    @property
    def first(self) -> Any:
        return self.args[0] if self.args else None

    def key(self) -> object:
        """Equal for calls whose outputs have the same form."""
        return (
            self.info,
            torch.get_default_dtype(),
            tuple([cell.key for cell in self.cells]),
            tuple([_form_key(arg) for arg in self.encoded]),
            tuple([(name, _form_key(arg)) for name, arg in self.kwargs.items()]) if self.kwargs else None,
        )

    def argument(self, position: int, name: str, keyword_only: bool) -> Any:
        return self.kwargs.get(name) if keyword_only or position >= len(self.args) else self.args[position]

    def returned(self, result: Any) -> Any:
        """The result as the caller expects it: with its own tensors in place of the twins that stood for them."""
        return _replace(result, self._originals) if self._originals else result


def _form_key(arg: object) -> object:
    kind = type(arg)
    if kind is Value or isinstance(arg, torch.Tensor):
        return _TENSOR  # its form is in the key already, in order
    if kind is tuple or kind is list:
        return tuple([_form_key(item) for item in arg])  # type: ignore[attr-defined]
    return scalar_key(arg)


def _replace(arg: Any, tensors: dict[int, torch.Tensor]) -> Any:
    if isinstance(arg, torch.Tensor):
        return tensors.get(id(arg), arg)
    if isinstance(arg, (list, tuple)):
        return type(arg)(_replace(item, tensors) for item in arg)
    return arg
