"""One node, executed by torch's own CPU kernels. Values are never changed in place: what a node writes is copied first."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphguard.aten.custom import WIDE, call_wide, is_custom
from graphguard.aten.grouped import GROUPED, ends_of, grouped_mm, is_defined
from graphguard.aten.operators import DTYPE_NAMES, DTYPES, Operator, operator, overload
from graphguard.errors import ReplayError
from graphguard.graph.ir import Arg, Constant, Node, Symbol, Value

_numpy = torch.Tensor.numpy  # a capture replaces the method by one that asks the graph
Lookup = Callable[[Value], torch.Tensor]
_DEFAULTS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_UNINITIALISED = ("aten.empty.", "aten.empty_like.", "aten.empty_strided.", "aten.empty_permuted.", "aten.new_empty.",
                  "aten.new_empty_strided.")  # fmt: skip
VIEWS = {"aten.view.default", "aten._unsafe_view.default"}
MEMORY_ORDER = {"aten.as_strided.default", "aten.as_strided_scatter.default"}
DENSE_ROWS = {"aten.view.dtype", "aten.view_as_complex.default"}  # they need the last dim to be dense, as it was in the program
LAZY = {"aten._conj.default", "aten._neg_view.default"}
BATCH_NORM = "aten.native_batch_norm.default"
_BATCH_NORM_BACKWARD = "aten.native_batch_norm_backward.default"
HALF_TO_FLOAT = {"aten._softmax.default", "aten._log_softmax.default"}
# Never executed, whatever a graph says: they reach outside the process.
_FORBIDDEN = {"aten.from_file.default", "aten.from_file.out"}
# Kernels that write where an index says, without a look at it. Outside of the tensor that is another one's memory.
_LABELS = {"aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"}  # (_, input, target, _, _, ignored, _)
_ROWS = {"aten.embedding_dense_backward.default"}  # (_, indices, rows, padding, _)


class Kernels:
    """Executes nodes. `wide` replaces every float dtype by float64 (and complex ones by complex128)."""

    def __init__(self, wide: bool = False):
        self.wide = wide
        self.rounds = False  # whether an operator was met that may round to fewer bits all the same

    def tensor(self, constant: Constant) -> torch.Tensor:
        return self.cast(tensor_of(constant))

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype(tensor.dtype))

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return WIDE.get(dtype, dtype) if self.wide else dtype

    def run(self, node: Node, lookup: Lookup) -> Sequence[torch.Tensor]:
        """The values of the node's outputs."""
        if node.op == "gg.part":
            return [self._part(node, lookup)]
        function, info = self.function(node.op)
        args = [self.argument(arg, lookup) for arg in node.args]
        kwargs = {name: self.argument(arg, lookup) for name, arg in node.kwargs.items()}
        if node.op in VIEWS:
            return [args[0].reshape(args[1])]
        if node.op in MEMORY_ORDER:  # strides and offset count from the start of the memory: it must hold nothing else
            args[0] = args[0].clone(memory_format=torch.contiguous_format)
        if node.op in DENSE_ROWS:
            args[0] = args[0].contiguous()
        if node.op in HALF_TO_FLOAT and self.wide:
            args[2] = False
        if info.draws:
            kwargs["generator"] = None  # some overloads insist on one
        _require_inside(node.op, args)
        written = self._copy_written(info, args, kwargs)
        result = self._call(node, function, args, kwargs)
        returned = list(tensors_in(result))
        if written:
            outputs = written + [t for t in returned if all(t is not w for w in written)]
        else:
            outputs = returned
        if node.op in LAZY:
            outputs = [t.resolve_conj().resolve_neg() for t in outputs]
        if leaves_unwritten(node.op):
            outputs = [_poison(t) for t in outputs]
        if node.op == BATCH_NORM and not args[5]:  # no statistics are saved: what stands for them depends on the backend
            outputs[1:] = [torch.full(value.shape, math.nan, dtype=outputs[0].dtype) for value in node.outputs[1:]]
        if node.op == _BATCH_NORM_BACKWARD and len(outputs) < len(node.outputs):  # gradients that are not asked for
            outputs = [torch.full(v.shape, math.nan) if t is None else t for v, t in zip(node.outputs, result, strict=True)]
        if node.outputs and len(outputs) != len(node.outputs):
            raise ReplayError(f"{node.op} gave {len(outputs)} tensors where the graph has {len(node.outputs)}")
        if node.outputs and outputs[0].dtype != self.dtype(DTYPES[node.outputs[0].dtype]):
            raise ReplayError(f"{node.op} gave {outputs[0].dtype} where the graph has {node.outputs[0].dtype}")
        return outputs

    def _call(self, node: Node, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Integers divided, or times a Python float, have the default dtype: that of the program, not of this process."""
        given = DTYPES[node.outputs[0].dtype] if node.outputs else torch.float32
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self.wide else given if given in _DEFAULTS else torch.float32)
        try:
            if self.wide and is_custom(function):
                result, rounds = call_wide(function, args, kwargs)
                self.rounds |= rounds
                return result
            if node.op == GROUPED and is_defined(*args, **kwargs):
                return grouped_mm(args[0], args[1], ends_of(args, kwargs))
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    @staticmethod
    @functools.cache
    def function(name: str) -> tuple[Any, Operator]:
        if name in _FORBIDDEN:
            raise ReplayError(f"{name} is never executed: it reaches outside the process")
        try:
            function = overload(name)
        except (AttributeError, ValueError):
            function = None
        # TorchScript's builtins, which may write files, have no kernel and never come from a capture
        if not isinstance(function, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel(function.name()):
            raise ReplayError(f"there is no operator {name}")
        return function, operator(function)

    def argument(self, arg: Arg, lookup: Lookup) -> Any:
        kind = type(arg)
        if kind is Value:
            return lookup(arg)  # type: ignore[arg-type]
        if kind is tuple:
            return [self.argument(item, lookup) for item in arg]  # type: ignore[union-attr]
        if kind is Symbol:
            assert isinstance(arg, Symbol)
            return self.dtype(DTYPES[arg.name]) if arg.kind == "dtype" else _named(arg)
        return arg

    @staticmethod
    def _copy_written(info: Operator, args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        written: list[torch.Tensor] = []
        for position, name, keyword_only in info.written:
            holder: Any = kwargs if keyword_only or position >= len(args) else args
            key: Any = name if holder is kwargs else position
            if holder is kwargs and name not in kwargs:
                continue
            held = holder[key]
            if isinstance(held, torch.Tensor):
                holder[key] = held.clone()
                written.append(holder[key])
            elif held is not None:
                holder[key] = [item.clone() for item in held]
                written += holder[key]
        return written

    def _part(self, node: Node, lookup: Lookup) -> torch.Tensor:
        """One summand of a tensor that is given as Partial: all but the last are arbitrary, the last makes up the sum."""
        whole = lookup(node.args[0])  # type: ignore[arg-type]
        key, index, count = node.args[1:4]
        assert isinstance(index, int) and isinstance(count, int)
        seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randn(whole.shape, generator=generator, dtype=torch.float64).to(whole.dtype) for _ in range(count - 1)]
        return parts[index] if index < count - 1 else whole - sum(parts)


def _named(symbol: Symbol) -> Any:
    found = torch.device("cpu") if symbol.kind == "device" else getattr(torch, symbol.name, None)
    if not isinstance(found, (torch.device, torch.layout, torch.memory_format)):
        raise ReplayError(f"there is no {symbol.kind} {symbol.name}")
    return found


def tensors_in(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in tensors_in(item)]
    return []


def tensor_of(constant: Constant) -> torch.Tensor:
    dtype = DTYPES[constant.dtype]
    if math.prod(constant.shape) == 0:
        return torch.empty(constant.shape, dtype=dtype)
    return torch.frombuffer(bytearray(constant.data), dtype=dtype).reshape(constant.shape)


def constant_of(tensor: torch.Tensor) -> Constant:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    data = bytes(_numpy(tensor.reshape(-1).view(torch.uint8))) if tensor.numel() else b""
    return Constant(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data)


def _require_inside(op: str, args: Sequence[Any]) -> None:
    """Refuse an index that a kernel would follow out of its tensor."""
    if op in _LABELS:
        indices, size, ignored = args[2], args[1].shape[1 if args[1].dim() > 1 else 0], args[5]
    elif op in _ROWS:
        indices, size, ignored = args[1], args[2], args[3]
    else:
        return
    outside = ((indices < 0) | (indices >= size)) & (indices != ignored)
    if bool(outside.any()):
        raise ReplayError(f"{op}: index {int(indices[outside][0])} is out of bounds for size {size}")


def leaves_unwritten(op: str) -> bool:
    """Whether the operator gives memory that nothing was written to."""
    return op.startswith(_UNINITIALISED)


def looks_unwritten(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor >= torch.iinfo(tensor.dtype).max // 2).any())


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill memory that was never written, so that a program that reads it is seen to differ."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(math.nan)
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 2)
