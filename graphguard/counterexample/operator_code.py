"""One node as lines of torch: what `aten/kernels.py` does in float64, in print."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping

import torch

from graphguard.aten.kernels import (
    BATCH_NORM,
    DENSE_ROWS,
    HALF_TO_FLOAT,
    LAZY,
    MEMORY_ORDER,
    VIEWS,
    Kernels,
    leaves_unwritten,
)
from graphguard.aten.operators import DTYPES, Operator
from graphguard.graph.ir import Arg, Constant, Node, Symbol, Value

Names = dict[Value, str]
_WRITTEN_OUT = 32  # elements of a constant; larger ones are packed

HELPERS = {
    "tensors": '''
def tensors(result):
    """All tensors of what an operator returns."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for item in result or () for tensor in tensors(item)]
''',
    "part": '''
def part(whole, key, index, count):
    """One summand of a tensor that is given as Partial: all but the last are arbitrary, the last makes up the sum."""
    import hashlib

    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little")
    g = torch.Generator().manual_seed(seed)
    parts = [torch.randn(whole.shape, generator=g, dtype=torch.float64).to(whole.dtype) for _ in range(count - 1)]
    return parts[index] if index < count - 1 else whole - sum(parts)
''',
    "unpacked": '''
def unpacked(text, dtype, shape):
    """A constant of the programs."""
    import base64, zlib

    data = bytearray(zlib.decompress(base64.b85decode(text)))
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
''',
}  # fmt: skip
_KERNELS = Kernels(wide=True)


class Constants:
    """The constants of all graphs, each written once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[Constant, str] = {}

    def name(self, constant: Constant) -> str:
        if constant not in self._names:
            if not self._names:
                self.lines += ["", "# constants of the programs"]
            self._names[constant] = f"c{len(self._names)}"
            self.lines.append(f"{self._names[constant]} = {_constant(constant)}")
        return self._names[constant]


def _constant(constant: Constant) -> str:
    tensor = _KERNELS.tensor(constant)
    if tensor.numel() and bool((tensor == tensor.reshape(-1)[0]).all()):
        return f"torch.full({constant.shape}, {_scalar(tensor.reshape(-1)[0].item())}, dtype={tensor.dtype})"
    if tensor.numel() <= _WRITTEN_OUT:
        items = ", ".join(_scalar(item) for item in tensor.reshape(-1).tolist())
        return f"torch.tensor([{items}], dtype={tensor.dtype}).reshape({constant.shape})"
    text = base64.b85encode(zlib.compress(constant.data, 9)).decode()
    return f"unpacked({text!r}, {DTYPES[constant.dtype]}, {constant.shape}).to({tensor.dtype})"


# ---------------------------------------------------------------------- nodes
def lines_of(node: Node, names: Mapping[Value, str], outside: str | None = None) -> list[str]:
    """Assignments to the outputs of a node that does not communicate. `outside` is what torch says of an index of it."""
    if node.op == "gg.part":
        return [f"{names[node.outputs[0]]} = part({', '.join(_text(arg, names) for arg in node.args)})"]
    if outside is not None:
        return [f"# {node.op} raises here: {outside}", *_unwritten(node, names)]
    if leaves_unwritten(node.op):
        return _unwritten(node, names)
    info = Kernels.function(node.op)[1]
    args = [_text(arg, names) for arg in node.args]
    kwargs = {name: _text(arg, names) for name, arg in node.kwargs.items()}
    if node.op in VIEWS:
        return [f"{names[node.outputs[0]]} = {args[0]}.reshape({args[1]})"]
    if node.op in MEMORY_ORDER:
        args[0] += ".clone(memory_format=torch.contiguous_format)"
    if node.op in DENSE_ROWS:
        args[0] += ".contiguous()"
    if node.op in HALF_TO_FLOAT:
        args[2] = "False"
    if info.draws:
        kwargs["generator"] = "None"
    written, lines = _copies(node, info, args, kwargs, names)
    call = f"torch.ops.{node.op}({', '.join([*args, *(f'{name}={text}' for name, text in kwargs.items())])})"
    return lines + _assignments(node, info, call, written, [names[value] for value in node.outputs])


def _assignments(node: Node, info: Operator, call: str, written: list[str], outputs: list[str]) -> list[str]:
    rest = outputs[len(written) :]
    if written:
        if not rest:
            return [call]
        mine = f"({', '.join(written)},)"
        return [f"{', '.join(rest)}, = [t for t in tensors({call}) if all(t is not w for w in {mine})]"]
    if not rest:
        return [call]
    returns = info.func._schema.returns
    lazy = ".resolve_conj().resolve_neg()" if node.op in LAZY else ""
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        return [f"{rest[0]} = {call}{lazy}"]
    if len(returns) == len(rest) and len(rest) > 1:
        lines = [f"{', '.join(rest)} = {call}"]
    else:
        lines = [f"{', '.join(rest)}, = tensors({call})"]
    if node.op == BATCH_NORM and not node.args[5]:
        lines += [f"{name} = torch.full({v.shape}, float('nan'))" for name, v in zip(rest[1:], node.outputs[1:], strict=True)]
    return lines


def _copies(
    node: Node, info: Operator, args: list[str], kwargs: dict[str, str], names: Mapping[Value, str]
) -> tuple[list[str], list[str]]:
    """What the node writes is copied first, under the names of its first outputs."""
    written: list[str] = []
    lines: list[str] = []
    for position, name, keyword_only in info.written:
        by_name = keyword_only or position >= len(args)
        if by_name and name not in kwargs:
            continue
        given = node.kwargs[name] if by_name else node.args[position]
        if given is None:
            continue
        items = given if isinstance(given, tuple) else (given,)
        copies = [names[value] for value in node.outputs[len(written) : len(written) + len(items)]]
        lines += [f"{copy} = {_text(item, names)}.clone()" for copy, item in zip(copies, items, strict=True)]
        text = f"[{', '.join(copies)}]" if isinstance(given, tuple) else copies[0]
        if by_name:
            kwargs[name] = text
        else:
            args[position] = text
        written += copies
    return written, lines


def _unwritten(node: Node, names: Mapping[Value, str]) -> list[str]:
    """Memory that nothing was written to: something that differs from every value."""
    lines = []
    for value in node.outputs:
        kind = _KERNELS.dtype(DTYPES[value.dtype])
        if kind.is_floating_point or kind.is_complex:
            number = "float('nan')"
        else:
            number = "True" if kind == torch.bool else str(torch.iinfo(kind).max // 2)
        lines.append(f"{names[value]} = torch.full({value.shape}, {number}, dtype={kind})")
    return lines


def _text(arg: Arg, names: Mapping[Value, str]) -> str:
    if isinstance(arg, Value):
        return names[arg]
    if isinstance(arg, Symbol):
        if arg.kind == "dtype":
            return str(_KERNELS.dtype(DTYPES[arg.name]))
        return "torch.device('cpu')" if arg.kind == "device" else f"torch.{arg.name}"
    if isinstance(arg, tuple):
        return f"[{', '.join(_text(item, names) for item in arg)}]"
    return _scalar(arg)


def _scalar(item: object) -> str:
    if isinstance(item, float) and not math.isfinite(item):
        return f"float('{item}')"
    if isinstance(item, complex) and not (math.isfinite(item.real) and math.isfinite(item.imag)):
        return f"complex({_scalar(item.real)}, {_scalar(item.imag)})"
    return repr(item)
