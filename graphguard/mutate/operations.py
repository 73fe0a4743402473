"""Faults of what a rank computes by itself. Each function changes one operation, or says that it cannot."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

from graphguard.graph.ir import Arg, Constant, Symbol, Value, values_in
from graphguard.mutate.site import SUMS, Site, is_float, same_type, substitute

_SCALARS = {"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar", "aten.pow.Tensor_Scalar"}
_THRESHOLDS = {f"aten.{name}.Scalar" for name in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub")} | SUMS
_FILLS = {"aten.full.default": 1, "aten.fill.Scalar": 1, "aten.scalar_tensor.default": 0, "aten.masked_fill.Scalar": 2}
_DIMS = {"aten.sum.dim_IntList": 1, "aten.mean.dim": 1, "aten.amax.default": 1, "aten._softmax.default": 1,
         "aten._log_softmax.default": 1, "aten._softmax_backward_data.default": 2}  # fmt: skip
_OTHERS = {
    "aten.add.Tensor": ("aten.sub.Tensor", "aten.mul.Tensor"),
    "aten.sub.Tensor": ("aten.add.Tensor",),
    "aten.mul.Tensor": ("aten.add.Tensor", "aten.div.Tensor"),
    "aten.div.Tensor": ("aten.mul.Tensor",),
    "aten.div.Scalar": ("aten.mul.Scalar",),
    "aten.mul.Scalar": ("aten.div.Scalar",),
    "aten.relu.default": ("aten.sigmoid.default", "aten.clone.default", "aten.abs.default"),
    "aten.tanh.default": ("aten.sigmoid.default", "aten.sin.default"),
    "aten.silu.default": ("aten.sigmoid.default", "aten.relu.default"),
    "aten.sigmoid.default": ("aten.tanh.default", "aten.silu.default"),
    "aten.gelu.default": ("aten.silu.default", "aten.relu.default"),
    "aten.exp.default": ("aten.neg.default", "aten.sigmoid.default"),
    "aten.log.default": ("aten.neg.default",),
    "aten.cos.default": ("aten.sin.default",),
    "aten.sin.default": ("aten.cos.default",),
    "aten.neg.default": ("aten.clone.default", "aten.abs.default"),
    "aten.rsqrt.default": ("aten.sqrt.default", "aten.reciprocal.default"),
    "aten.sqrt.default": ("aten.rsqrt.default",),
    "aten.mean.dim": ("aten.sum.dim_IntList",),
    "aten.sum.dim_IntList": ("aten.mean.dim",),
    "aten.mean.default": ("aten.sum.default",),
    "aten.sum.default": ("aten.mean.default",),
    "aten.amax.default": ("aten.amin.default",),
    "aten.lt.Scalar": ("aten.le.Scalar", "aten.gt.Scalar"),
    "aten.ge.Scalar": ("aten.gt.Scalar", "aten.lt.Scalar"),
    "aten.gt.Scalar": ("aten.ge.Scalar", "aten.lt.Scalar"),
    "aten.gt.Tensor": ("aten.lt.Tensor", "aten.ge.Tensor"),
    "aten.bitwise_or.Tensor": ("aten.bitwise_and.Tensor",),
    "aten.bitwise_and.Tensor": ("aten.bitwise_or.Tensor",),
    "aten.tril.default": ("aten.triu.default",),
    "aten.triu.default": ("aten.tril.default",),
    "aten.zeros.default": ("aten.ones.default",),
    "aten.ones.default": ("aten.zeros.default",),
    "aten.ones_like.default": ("aten.zeros_like.default",),
    "aten.zeros_like.default": ("aten.ones_like.default",),
    "aten.new_zeros.default": ("aten.new_ones.default",),
}
_CODES = {"float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "bool": "?"}


# ---------------------------------------------------------------------- offsets
def shift_offset(site: Site) -> str | None:
    node, args = site.node, list(site.node.args)
    step = site.random.choice((-1, 1))
    match site.op:
        case "aten.slice.Tensor" | "aten.slice_backward.default" | "aten.slice_scatter.default":
            return _shift_slice(site, step)
        case "aten.select.int" | "aten.select_backward.default" | "aten.select_scatter.default":
            return _shift_choice(site)
        case "aten.arange.start_step" | "aten.arange.start" if _ints(args[:2]):
            args[0], args[1] = args[0] + step, args[1] + step  # type: ignore[operator]
        case "aten.arange.default" if _ints(args[:1]):
            site.give("aten.arange.start", step, args[0] + step, **node.kwargs)  # type: ignore[operator]
            return f"{node.op} from {step}"
        case "aten.tril.default" | "aten.triu.default":
            diagonal = args[1] if len(args) > 1 else 0
            args = [args[0], diagonal + step]  # type: ignore[operator]
        case "aten.constant_pad_nd.default":
            front, behind, *others = args[1]  # type: ignore[misc, str-unpack]
            if front == behind:
                return None
            args[1] = (behind, front, *others)
        case op if op in _THRESHOLDS and len(args) > 1 and type(args[1]) is int:
            args[1] += step
        case _:
            return None
    site.change(args)
    return f"{node.op} is moved by {step}"


def _ints(args: Sequence[Arg]) -> bool:
    return len(args) > 0 and all(type(arg) is int for arg in args)


def _shift_slice(site: Site, step: int) -> str | None:
    """A window of the same size, elsewhere."""
    node, args = site.node, list(site.node.args)
    first = 3 if site.op == "aten.slice_backward.default" or site.op == "aten.slice_scatter.default" else 2
    if len(args) > first + 2 and args[first + 2] != 1:
        return None
    if site.op == "aten.slice_backward.default":
        whole, part, dim = args[1], site.operands[0].shape, args[2]
    elif site.op == "aten.slice_scatter.default":
        whole, part, dim = site.operands[0].shape, site.operands[1].shape, args[2] if len(args) > 2 else 0
    else:
        whole, part, dim = site.operands[0].shape, site.output.shape, args[1] if len(args) > 1 else 0
    if not isinstance(whole, tuple) or type(dim) is not int:
        return None
    size, length = whole[dim], part[dim]
    assert isinstance(size, int)
    start = args[first] if len(args) > first and type(args[first]) is int else 0
    assert isinstance(start, int)
    start = max(0, start + size if start < 0 else start)
    choices = [
        s for s in {start + step, start - step, start + length, start - length} if 0 <= s <= size - length and s != start
    ]
    if not choices or length == 0:
        return None
    moved = site.random.choice(sorted(choices))
    defaults: list[Arg] = [None, 0, 0, 0, None] if first == 2 else [None, None, 0, 0, None]
    args = args + defaults[len(args) : first + 2]
    args[first], args[first + 1] = moved, moved + length
    site.change(args)
    return f"{node.op} starts at {moved} in place of {start}"


def _shift_choice(site: Site) -> str | None:
    node, args = site.node, list(site.node.args)
    if site.op == "aten.select_backward.default":
        whole, place = args[1], 3
    else:
        whole, place = site.operands[0].shape, 2 if site.op == "aten.select.int" else 3
    dim, index = args[place - 1], args[place]
    if not isinstance(whole, tuple) or type(dim) is not int or type(index) is not int:
        return None
    size = whole[dim]
    assert isinstance(size, int)
    choices = [other for other in range(size) if other != index % size]
    if not choices:
        return None
    args[place] = site.random.choice(choices)
    site.change(args)
    return f"{node.op} takes {args[place]} in place of {index}"


# ---------------------------------------------------------------------- numbers
def change_scale(site: Site) -> str | None:
    """Another number in an operation, or a number where there was none."""
    if site.node.communicates:
        given = site.operands
        if len(given) != 1 or not is_float(given[0]):
            return None
        factor = _factor(site)
        site.change([site.call("aten.mul.Scalar", given[0], factor, shape=given[0].shape)])
        return f"{factor:g} times what {site.node.op} sends"
    if site.random.random() < 0.6:
        words = _other_number(site)
        if words is not None:
            return words
    if len(site.node.outputs) != 1 or not is_float(site.output) or not site.node.op.startswith("aten."):
        return None
    factor = _factor(site)
    before = site.value(site.output.shape, site.output.dtype)
    site.again(site.node, site.node.args, (before,))
    site.give("aten.mul.Scalar", before, factor)
    return f"{factor:g} times the result of {site.node.op}"


def _factor(site: Site) -> float:
    size = site.random.choice(site.mesh.shape)
    return float(site.random.choice((2.0, 0.5, float(size), 1 / size, -1.0, 1.001, 0.0)))


def _other_number(site: Site) -> str | None:
    """One of the numbers that the operation has as arguments."""
    args, places = list(site.node.args), []
    for number, arg in enumerate(args):
        whole = type(arg) is int and number == 1 and site.op in _SCALARS
        filled = type(arg) is int and _FILLS.get(site.op) == number
        if (type(arg) is float and arg == arg and abs(arg) != float("inf")) or whole or filled:
            places.append(number)
    if not places:
        return None
    number = site.random.choice(places)
    old = args[number]
    assert isinstance(old, (int, float))
    choices = [old * 2, old + 1, -old, old * max(site.mesh.shape), 1 if type(old) is int else 1.0]
    choices += [old * 1.001, old / max(site.mesh.shape)] if type(old) is float else []
    new = site.random.choice([choice for choice in choices if choice != old] or [old + 1])
    if site.op == "aten.div.Tensor" and new == 0:
        new = old + 1
    args[number] = new
    site.change(args)
    return f"{new:g} in place of {old:g} in {site.node.op}"


def change_constant(site: Site) -> str | None:
    """A number or a table that is not the same as before."""
    held = [value for value in site.operands if value in site.graph.constants]
    if not held:
        return _other_number(site)
    value = site.random.choice(held)
    changed = _other_data(site, site.graph.constants[value])
    if changed is None:
        return None
    new = site.constant(changed)
    site.change([substitute(arg, {value: new}) for arg in site.node.args])
    return f"another constant {value.type} in {site.node.op}"


def _other_data(site: Site, constant: Constant) -> Constant | None:
    code = _CODES.get(constant.dtype)
    if code is None or not constant.data:
        return None
    items = list(struct.unpack(f"<{len(constant.data) // struct.calcsize(code)}{code}", constant.data))
    place = site.random.randrange(len(items))
    items[place] = not items[place] if code == "?" else items[place] + 1
    if items[place] != items[place] or items[place] in (float("inf"), -float("inf")):
        return None
    return constant._replace(data=struct.pack(f"<{len(items)}{code}", *items))


# ---------------------------------------------------------------------- operands
def swap_operands(site: Site) -> str | None:
    args = list(site.node.args)
    pairs = [(i, j) for i, j in itertools.combinations(range(len(args)), 2) if same_type(args[i], args[j])]
    pairs = [(i, j) for i, j in pairs if args[i] is not args[j]]
    if not pairs or site.node.communicates:
        return None
    i, j = site.random.choice(pairs)
    args[i], args[j] = args[j], args[i]
    site.change(args)
    return f"the operands {i} and {j} of {site.node.op} change places"


def drop_addend(site: Site) -> str | None:
    node = site.node
    if site.op in SUMS:
        kept = [arg for arg in node.args[:2] if same_type(arg, site.output)]
        if not kept:
            return None
        choice = site.random.choice(kept)
        assert type(choice) is Value
        site.keep(choice)
        return f"{node.op} keeps {'the first' if choice is node.args[0] else 'the second'} operand only"
    if site.op == "aten.addmm.default" and not node.kwargs:
        site.give("aten.mm.default", *node.args[1:])
        return f"{node.op} without its bias"
    return None


def use_stale_value(site: Site) -> str | None:
    """A tensor of the same shape that was made before."""
    operands = list(dict.fromkeys(values_in(site.node.args)))
    site.random.shuffle(operands)
    earlier = list(site.earlier())
    for operand in operands:
        others = [value for value in earlier if same_type(value, operand) and value is not operand]
        if others:
            stale = site.random.choice(others[-8:])
            site.change([substitute(arg, {operand: stale}) for arg in site.node.args])
            return f"{site.node.op} reads {stale} in place of {operand}"
    return None


# ---------------------------------------------------------------------- layout and operator
def change_layout(site: Site) -> str | None:
    """Elements in another order, or another dim."""
    node, args = site.node, list(site.node.args)
    if site.op in ("aten.transpose.int", "aten.permute.default", "aten.t.default"):
        given = site.operands[0]
        if sum(size > 1 for size in given.shape) < 2:
            return None
        site.give("aten.view.default", given, site.output.shape)
        return f"aten.view in place of {node.op}"
    if site.op not in _DIMS or len(args) <= _DIMS[site.op]:
        return None
    given, place = site.operands[0], _DIMS[site.op]
    dims = args[place] if isinstance(args[place], tuple) else (args[place],)
    if not _ints(dims) or len(dims) != 1:  # type: ignore[arg-type]
        return None
    now: int = dims[0] % len(given.shape)  # type: ignore[index, operator, assignment]
    if "softmax" in site.op:
        same = [dim for dim, size in enumerate(given.shape) if dim != now and size > 1]
    elif args[place + 1 :] == [True]:
        return None  # the dim that is kept would be another one
    else:
        same = [dim for dim, size in enumerate(given.shape) if dim != now and size == given.shape[now] and size > 1]
    if not same:
        return None
    new = site.random.choice(same)
    args[place] = (new,) if isinstance(args[place], tuple) else new
    site.change(args)
    return f"{node.op} along dim {new} in place of {now}"


def change_operator(site: Site) -> str | None:
    others = _OTHERS.get(site.op)
    node = site.node
    if others is None or (site.op in _DIMS and len(node.args) < 2):
        return None
    other = site.random.choice(others)
    tensors = [arg for arg in node.args if type(arg) is Value]
    if other in ("aten.div.Tensor", "aten.mean.dim", "aten.mean.default") and not all(map(is_float, tensors)):
        return None
    kwargs = dict(node.kwargs)
    if other in ("aten.div.Tensor", "aten.mul.Tensor") or site.op == "aten.gelu.default":
        kwargs.pop("alpha", None)
        kwargs.pop("approximate", None)
    if any(isinstance(arg, Symbol) for arg in node.args):
        return None
    site.give(other, *node.args, **kwargs)
    return f"{other} in place of {node.op}"
