"""The memory of output shapes: running an operator on meta tensors costs tens of microseconds, remembering it a few."""

from __future__ import annotations

from typing import Any

import torch

from graphguard.graph.ir import Value

META = torch.device("meta")
_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


class _InPlace:
    """The operator returned its first argument."""


IN_PLACE = _InPlace()


class ShapeCache:
    """From (operator, forms of the inputs, scalars, default dtype) to the forms of the outputs. Only operators whose outputs
    are fresh tensors, or their one written argument, are remembered; see `Operator.cacheable` for those that never are."""

    def __init__(self) -> None:
        self._known: dict[object, Any] = {}

    def get(self, key: object) -> Any:
        return self._known.get(key)

    def put(self, key: object, result: Any, first: object, writes: int) -> None:
        if writes:
            if writes == 1 and result is first:
                self._known[key] = IN_PLACE
        elif type(result) is torch.Tensor:
            self._known[key] = _form(result)
        elif type(result) in (tuple, list) and result and all(type(t) is torch.Tensor for t in result):
            self._known[key] = [type(result), [_form(t) for t in result]]

    @staticmethod
    def revive(remembered: Any, first: object) -> Any:
        """Fresh outputs of the remembered forms."""
        if remembered is IN_PLACE:
            return first
        if type(remembered) is tuple:
            shape, strides, dtype = remembered
            return torch.empty_strided(shape, strides, dtype=dtype, device=META)
        kind, forms = remembered
        return kind(torch.empty_strided(shape, strides, dtype=dtype, device=META) for shape, strides, dtype in forms)


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.stride(), tensor.dtype


def scalar_key(argument: Any) -> object:
    """A hashable stand-in for an argument that is not a tensor. Types count: 1, 1.0 and True promote differently."""
    kind = type(argument)
    if kind is int or kind is str or argument is None:
        return argument
    if kind is tuple or kind is list:
        return tuple([scalar_key(item) for item in argument])
    if kind is Value:
        raise TypeError("a tensor is not a scalar")
    return kind, argument


# Shared by all captures of a process: the forms do not depend on the program.
SHAPES = ShapeCache()
