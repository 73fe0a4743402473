"""View operators as steps: how to see a part of a tensor, and how to put a changed part back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from graphguard.errors import CaptureError
from graphguard.graph.ir import Arg, Symbol

if TYPE_CHECKING:
    from graphguard.capture.torch.record.aliasing import Cell

Shape = tuple[int, ...]
Args = tuple[Any, ...]  # an operator's own arguments, after the base


class ViewCall(NamedTuple):
    """An operator and its arguments after the tensors."""

    op: str
    args: tuple[Arg, ...]


class ViewStep(NamedTuple):
    """From a tensor to a view of it.

    `look` takes the base. `put_back` takes (base, part) where `needs_base`, else the part alone, from which the base
    can be rebuilt. A view that cannot be written through has no `put_back`.
    """

    look: ViewCall
    put_back: ViewCall | None
    needs_base: bool = False


def reshape(shape: Shape) -> ViewCall:
    return ViewCall("aten.view.default", (shape,))


def _reshaped(base: Cell, shape: Shape, args: Args) -> ViewStep:
    return ViewStep(reshape(shape), reshape(base.shape))


def _permuted(base: Cell, shape: Shape, args: Args) -> ViewStep:
    rank = len(base.shape)
    order = [d % rank for d in args[0]] if rank else []
    inverse = tuple(order.index(d) for d in range(rank))
    return ViewStep(ViewCall("aten.permute.default", (tuple(order),)), ViewCall("aten.permute.default", (inverse,)))


def _transposed(base: Cell, shape: Shape, args: Args) -> ViewStep:
    call = ViewCall("aten.transpose.int", args)
    return ViewStep(call, call)


def _matrix_transposed(base: Cell, shape: Shape, args: Args) -> ViewStep:
    call = ViewCall("aten.t.default", ())
    return ViewStep(call, call)


def _expanded(base: Cell, shape: Shape, args: Args) -> ViewStep:
    same_size = math.prod(shape) == math.prod(base.shape)
    return ViewStep(ViewCall("aten.expand.default", (shape,)), reshape(base.shape) if same_size else None)


def slice_step(dim: int, start: int, stop: int, step: int = 1) -> ViewStep:
    args = (dim, start, stop, step)
    return ViewStep(ViewCall("aten.slice.Tensor", args), ViewCall("aten.slice_scatter.default", args), needs_base=True)


def select_step(dim: int, index: int) -> ViewStep:
    args = (dim, index)
    return ViewStep(ViewCall("aten.select.int", args), ViewCall("aten.select_scatter.default", args), needs_base=True)


def _sliced(base: Cell, shape: Shape, args: Args) -> ViewStep:
    defaults: Args = (0, None, None, 1)
    dim, start, stop, step = args + defaults[len(args) :]
    dim = dim % len(base.shape)
    first, last, stride = slice(start, stop, step).indices(base.shape[dim])
    return slice_step(dim, first, max(first, last), stride)


def _selected(base: Cell, shape: Shape, args: Args) -> ViewStep:
    dim = args[0] % len(base.shape)
    return select_step(dim, args[1] % base.shape[dim])


def _diagonal(base: Cell, shape: Shape, args: Args) -> ViewStep:
    return ViewStep(ViewCall("aten.diagonal.default", args), ViewCall("aten.diagonal_scatter.default", args), needs_base=True)


def _retyped(base: Cell, shape: Shape, args: Args) -> ViewStep:
    return ViewStep(ViewCall("aten.view.dtype", args), ViewCall("aten.view.dtype", (Symbol("dtype", base.dtype),)))


def _involution(op: str, inverse: str) -> Callable[[Cell, Shape, Args], ViewStep]:
    def step(base: Cell, shape: Shape, args: Args) -> ViewStep:
        return ViewStep(ViewCall(op, args), ViewCall(inverse, ()))

    return step


def _unfolded(base: Cell, shape: Shape, args: Args) -> ViewStep:
    return ViewStep(ViewCall("aten.unfold.default", args), None)


_STEPS: dict[str, Callable[[Cell, Shape, Args], ViewStep]] = {
    **dict.fromkeys(("aten.view.default", "aten._unsafe_view.default", "aten._reshape_alias.default",
                     "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.unsqueeze.default"),
                    _reshaped),
    "aten.permute.default": _permuted,
    "aten.transpose.int": _transposed,
    "aten.t.default": _matrix_transposed,
    "aten.numpy_T.default": _matrix_transposed,
    "aten.expand.default": _expanded,
    "aten.slice.Tensor": _sliced,
    "aten.select.int": _selected,
    "aten.diagonal.default": _diagonal,
    "aten.view.dtype": _retyped,
    "aten.view_as_real.default": _involution("aten.view_as_real.default", "aten.view_as_complex.default"),
    "aten.view_as_complex.default": _involution("aten.view_as_complex.default", "aten.view_as_real.default"),
    "aten._conj.default": _involution("aten._conj.default", "aten._conj.default"),
    "aten._neg_view.default": _involution("aten._neg_view.default", "aten._neg_view.default"),
    "aten.unfold.default": _unfolded,
}  # fmt: skip


# Views with several outputs: pieces along one dim, in order.
PARTS = {"aten.unbind.int", "aten.split.Tensor", "aten.split_with_sizes.default", "aten.unsafe_split.Tensor",
         "aten.unsafe_split_with_sizes.default"}  # fmt: skip


def view_step(op: str, base: Cell, shape: Shape, args: Args) -> ViewStep:
    """The step of a view operator with one output."""
    make = _STEPS.get(op)
    if make is None:
        raise CaptureError(f"the view operator {op} is not modelled; copy the tensor first (`.clone()`)")
    return make(base, shape, args)


def part_steps(op: str, base: Cell, shapes: list[Shape], args: Args) -> list[ViewStep]:
    """The steps of a view operator with several outputs."""
    if op == "aten.unbind.int":
        dim = (args[0] if args else 0) % len(base.shape)
        return [select_step(dim, index) for index in range(len(shapes))]
    dim = (args[1] if len(args) > 1 else 0) % len(base.shape)
    steps, start = [], 0
    for shape in shapes:
        steps.append(slice_step(dim, start, start + shape[dim]))
        start += shape[dim]
    return steps
