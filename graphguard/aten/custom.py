"""Operators of the user's own, executed. Those written in Python compute in 64 bits, whatever they cast to inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphguard.aten.operators import BUILT_IN

WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}


def is_custom(function: torch._ops.OpOverload) -> bool:
    return function.namespace not in BUILT_IN


def python_of(function: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """What `torch.library.custom_op` was given for the CPU; None for other operators."""
    from torch._library.custom_ops import OPDEFS

    made = OPDEFS.get(function.name().removesuffix(".default"))
    backends = getattr(made, "_backend_fns", None) or {}
    return backends.get("cpu") or backends.get(None)


def call_wide(function: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The result in 64 bits, and whether it may have been rounded to fewer on the way."""
    python = python_of(function)
    if python is not None:
        return widely(python, args, kwargs), False
    try:
        return _widened(function(*args, **kwargs)), True
    except Exception as error:  # a kernel may be for single precision alone
        try:
            narrow = _each([args, kwargs], torch.float64, torch.float32)
            return _widened(function(*narrow[0], **narrow[1])), True
        except Exception:
            raise error from None


def widely(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function in torch gives in 64 bits, whatever it casts to inside."""
    with _Widening():
        return _widened(function(*args, **kwargs))


class _Widening(TorchDispatchMode):
    """Casts to fewer bits, and tensors made with fewer, have 64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = list(_wide_dtypes(args)), {name: _wide_dtypes(arg) for name, arg in (kwargs or {}).items()}
        return call_wide(func, args, kwargs)[0] if is_custom(func) else func(*args, **kwargs)


def _wide_dtypes(arg: Any) -> Any:
    if isinstance(arg, torch.dtype):
        return WIDE.get(arg, arg)
    return type(arg)(map(_wide_dtypes, arg)) if type(arg) in (list, tuple) else arg


def _widened(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.to(WIDE.get(result.dtype, result.dtype))
    return type(result)(map(_widened, result)) if type(result) in (list, tuple) else result


def _each(tree: Any, before: torch.dtype, after: torch.dtype) -> Any:
    """The tree with tensors of one dtype in another."""
    if isinstance(tree, torch.Tensor):
        return tree.to(after) if tree.dtype == before else tree
    if isinstance(tree, dict):
        return {name: _each(item, before, after) for name, item in tree.items()}
    return [_each(item, before, after) for item in tree] if isinstance(tree, (list, tuple)) else tree
