"""Functions of elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphguard.capture.jax.dtypes import in_graph, is_float, is_unsigned, is_whole, numpy_of
from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import Lowering, rule
from graphguard.errors import CaptureError
from graphguard.graph.ir import Value

_UNARY = {
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log1p": "log1p", "tanh": "tanh", "logistic": "sigmoid",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan",
    "sinh": "sinh", "cosh": "cosh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "erf": "erf", "erfc": "erfc",
    "erf_inv": "erfinv", "lgamma": "lgamma", "digamma": "digamma", "neg": "neg", "sign": "sign", "floor": "floor",
    "ceil": "ceil", "abs": "abs", "not": "bitwise_not",
}  # fmt: skip
_BINARY = {
    "add": "add.Tensor", "add_any": "add.Tensor", "sub": "sub.Tensor", "mul": "mul.Tensor", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip
_SWAPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_SYMMETRIC = {"add", "add_any", "mul", "and", "or", "xor"}


def _dtype(equation: Any) -> Any:
    return equation.outvars[0].aval.dtype


def _shape(equation: Any) -> tuple[int, ...]:
    return tuple(equation.outvars[0].aval.shape)


@rule(*_UNARY)
def unary(low: Lowering, equation: Any, x: Any) -> Value:
    if equation.params.get("accuracy") is not None:
        raise CaptureError("accuracy= is not modelled")
    return low.wrapped(low.build.aten(_UNARY[equation.primitive.name], low.tensor(x)), _dtype(equation))


@rule(*_BINARY)
def binary(low: Lowering, equation: Any, a: Any, b: Any) -> Value:
    name = equation.primitive.name
    op = _BINARY[name]
    if name in _SYMMETRIC and (isinstance(a, Known) or (_is_number(low, a) and not _is_number(low, b))):
        a, b = b, a
    if isinstance(a, Known) and name == "sub" and not isinstance(low.scalar(a), Value):
        return low.wrapped(low.build.aten("rsub.Scalar", low.tensor(b), low.scalar(a)), _dtype(equation))
    x, y = low.tensor(a), low.scalar(b)
    if "." not in op:
        op += ".Tensor" if isinstance(y, Value) else ".Scalar"
    made = _spread(low, low.build.aten(op, x, y), equation)
    return made if name in ("and", "or", "xor") else low.wrapped(made, _dtype(equation))


@rule(*_SWAPPED)
def compared(low: Lowering, equation: Any, a: Any, b: Any) -> Value:
    name = equation.primitive.name
    if isinstance(a, Known) or (_is_number(low, a) and not _is_number(low, b)):
        a, b, name = b, a, _SWAPPED[name]
    x, y = low.tensor(a), low.scalar(b)
    return _spread(low, low.build.aten(f"{name}.{'Tensor' if isinstance(y, Value) else 'Scalar'}", x, y), equation)


def _is_number(low: Lowering, x: Any) -> bool:
    """Whether all elements are one number, which may be another one on each rank."""
    return isinstance(x, Known) or not isinstance(low.scalar(x), Value)


def _spread(low: Lowering, x: Value, equation: Any) -> Value:
    """A scalar that stands beside a tensor in JAX may come first here."""
    return x if x.shape == _shape(equation) else low.build.aten("expand", x, list(_shape(equation)))


@rule("atan2", "nextafter")
def of_two(low: Lowering, equation: Any, a: Any, b: Any) -> Value:
    return low.build.aten(equation.primitive.name, low.tensor(a), low.tensor(b))


@rule("pvary", "pcast", "reshard", "sharding_constraint", "layout_constraint", "mesh_cast", "copy", "copy_p", "name",
      "reduce_precision", "stop_gradient", "optimization_barrier", "device_put", "tie")  # fmt: skip
def unchanged(low: Lowering, equation: Any, *operands: Any) -> Any:
    """What says where an array lies, or how exactly it is kept: over the reals it is the same array."""
    return list(operands) if equation.primitive.multiple_results else operands[0]


@rule("max", "min")
def extreme(low: Lowering, equation: Any, a: Any, b: Any) -> Any:
    name = equation.primitive.name
    a, b = (b, a) if isinstance(a, Known) else (a, b)
    x, y = low.tensor(a), low.scalar(b)
    if isinstance(y, Value) or not isinstance(y, (int, float)):
        return _spread(low, low.build.aten(f"{name}imum", x, low.tensor(b)), equation)
    if is_float(x.dtype) and y == (-math.inf if name == "max" else math.inf):
        return x
    if is_float(x.dtype) and name == "max" and y == 0:
        return low.build.aten("relu", x)
    before = low.build.made.get(x)
    if name == "min" and before is not None and before.op == "aten.clamp_min.default":
        return low.build.aten("clamp", before.args[0], before.args[1], y)
    return low.build.aten("clamp_min" if name == "max" else "clamp_max", x, y)


@rule("div")
def divided(low: Lowering, equation: Any, a: Any, b: Any) -> Value:
    x, y = low.tensor(a), low.scalar(b)
    kind = "Tensor" if isinstance(y, Value) else "Scalar"
    if is_whole(_dtype(equation)):
        _needs_divisor(low, b)
        return _spread(low, low.build.aten(f"div.{kind}_mode", x, y, rounding_mode="trunc"), equation)
    return _spread(low, low.build.aten(f"div.{kind}", x, y), equation)


@rule("rem")
def remainder(low: Lowering, equation: Any, a: Any, b: Any) -> Value:
    x, y = low.tensor(a), low.scalar(b)
    if is_whole(_dtype(equation)):
        _needs_divisor(low, b)
    return _spread(low, low.build.aten(f"fmod.{'Tensor' if isinstance(y, Value) else 'Scalar'}", x, y), equation)


def _needs_divisor(low: Lowering, by: Any) -> None:
    if isinstance(by, Known) and bool((by.array != 0).all()):
        return
    if isinstance(by, Value) and (low.intervals.of(by).low > 0 or low.intervals.of(by).high < 0):
        return
    low.build.assumptions.add(f"{low.build.source}: no whole number is divided by zero, where XLA would give -1")


@rule("integer_pow")
def whole_power(low: Lowering, equation: Any, x: Any) -> Value:
    power = equation.params["y"]
    if power < 0 and is_whole(_dtype(equation)):
        raise CaptureError("a negative power of whole numbers has no exact graph")
    return low.wrapped(low.build.aten("pow.Tensor_Scalar", low.tensor(x), power), _dtype(equation))


@rule("square")
def square(low: Lowering, equation: Any, x: Any) -> Value:
    return low.wrapped(low.build.aten("pow.Tensor_Scalar", low.tensor(x), 2), _dtype(equation))


@rule("cbrt")
def cube_root(low: Lowering, equation: Any, x: Any) -> Value:
    x = low.tensor(x)
    root = low.build.aten("pow.Tensor_Scalar", low.build.aten("abs", x), 1 / 3)
    return low.build.aten("mul.Tensor", low.build.aten("sign", x), root)


@rule("pow")
def power(low: Lowering, equation: Any, x: Any, y: Any) -> Value:
    if isinstance(y, Known) and not isinstance(low.scalar(y), Value):
        return _spread(low, low.build.aten("pow.Tensor_Scalar", low.tensor(x), low.scalar(y)), equation)
    if isinstance(x, Known) and not isinstance(low.scalar(x), Value):
        return _spread(low, low.build.aten("pow.Scalar", low.scalar(x), low.tensor(y)), equation)
    return _spread(low, low.build.aten("pow.Tensor_Tensor", low.tensor(x), low.tensor(y)), equation)


@rule("round")
def rounded(low: Lowering, equation: Any, x: Any) -> Value:
    x = low.tensor(x)
    if "EVEN" in str(equation.params["rounding_method"]):
        return low.build.aten("round", x)
    away = low.build.aten("floor", low.build.aten("add.Tensor", low.build.aten("abs", x), 0.5))
    return low.build.aten("mul.Tensor", low.build.aten("sign", x), away)


@rule("clamp")
def clamp(low: Lowering, equation: Any, least: Any, x: Any, most: Any) -> Value:
    bounds = [uniform(low, each) for each in (least, most)]
    if None not in bounds:
        if isinstance(x, Value) and is_whole(x.dtype) and low.intervals.of(x).within(*bounds):
            return x
        return low.build.aten("clamp", low.tensor(x), *bounds)
    return low.build.aten("clamp.Tensor", low.tensor(x), low.tensor(least), low.tensor(most))


def uniform(low: Lowering, x: Any) -> Any:
    """The one number that all elements are, on every rank; None if that is not known."""
    if isinstance(x, Known):
        return x.uniform()
    node = low.build.made.get(x)
    number = node.args[1] if node is not None and node.op == "aten.full.default" else None
    return number if isinstance(number, (int, float)) else None


@rule("select_n")
def select(low: Lowering, equation: Any, which: Any, *cases: Any) -> Any:
    if (
        isinstance(which, Known)
        and which.uniform() is not None
        and tuple(cases[int(which.uniform())].shape) == _shape(equation)
    ):
        return cases[int(which.uniform())]
    if len(cases) == 1:
        return cases[0]
    if str(which.dtype) != "bool":
        found = low.tensor(cases[-1])
        for place in reversed(range(len(cases) - 1)):
            found = low.build.aten(
                "where.self", low.build.aten("eq.Scalar", low.tensor(which), place), low.tensor(cases[place]), found
            )
        return found
    mask = low.tensor(which)
    inside = _none_of(low, mask)
    if inside is not None:  # which is one range, where the mask is two
        mask, cases = inside, cases[::-1]
    settled = low.intervals.decided(mask)
    if settled is not None and tuple(cases[settled].shape) == _shape(equation):
        return cases[settled]
    return low.build.aten("where.self", mask, low.tensor(cases[1]), low.tensor(cases[0]))


_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def _none_of(low: Lowering, mask: Value) -> Value | None:
    """Where neither of two comparisons of whole numbers holds; None if a mask is not one of either."""
    node = low.build.made.get(mask)
    if node is not None and node.op in ("aten.view.default", "aten.expand.default"):
        inner = _none_of(low, node.args[0])  # type: ignore[arg-type]
        return None if inner is None else low.build.aten(node.op.split(".")[1], inner, node.args[1])
    if node is None or node.op != "aten.bitwise_or.Tensor":
        return None
    parts = [low.build.made.get(each) for each in node.args]  # type: ignore[arg-type]
    others = []
    for part in parts:
        name = "" if part is None else part.op.split(".")[1]
        if part is None or name not in _OPPOSITE or not part.op.endswith(".Scalar") or not is_whole(part.args[0].dtype):  # type: ignore[union-attr]
            return None
        others.append(low.build.aten(f"{_OPPOSITE[name]}.Scalar", *part.args))
    return low.build.aten("bitwise_and.Tensor", *others)


@rule("is_finite")
def is_finite(low: Lowering, equation: Any, x: Any) -> Value:
    x = low.tensor(x)
    bad = low.build.aten("bitwise_or.Tensor", low.build.aten("isinf", x), low.build.aten("isnan", x))
    return low.build.aten("bitwise_not", bad)


# ---------------------------------------------------------------------- dtypes and bits
@rule("convert_element_type")
def converted(low: Lowering, equation: Any, x: Any) -> Any:
    """Numbers that the other dtype has; what is cut off is cut as XLA does it, but for floats beyond all whole numbers."""
    before, after = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    if isinstance(x, Known) and _fits(x, after):
        return Known(x.array.astype(numpy_of(after)))
    x = low.tensor(x)
    if is_unsigned(after):
        whole = low.cast(x, "int64")
        return whole if str(before) == "bool" else low.wrapped(whole, after)
    if is_unsigned(before) and is_whole(after) and str(after) != "int64":
        return low.cast(_signed(low, x), in_graph(after))
    return low.cast(x, in_graph(after))


def _fits(x: Known, dtype: Any) -> bool:
    """Whether numpy and XLA convert alike."""
    if not is_whole(dtype):
        return True
    info = np.iinfo(str(dtype))
    numbers = x.array.astype(np.float64)
    return bool(((numbers >= info.min) & (numbers <= info.max)).all())


def _signed(low: Lowering, x: Value) -> Value:
    """Unsigned numbers of 32 bits, read as signed ones."""
    high = low.build.aten("ge.Scalar", x, 1 << 31)
    return low.build.aten("where.self", high, low.build.aten("sub.Tensor", x, 1 << 32), x)


_ONE_TO_TWO = 0x3F800000  # the bits of 1.0: with 23 bits below it, a float from 1 to 2


@rule("bitcast_convert_type")
def bits(low: Lowering, equation: Any, operand: Any) -> Value:
    before, after = str(equation.invars[0].aval.dtype), str(equation.params["new_dtype"])
    x = low.tensor(operand)
    if before == after:
        return x
    if (before, after) == ("uint32", "int32"):
        return low.cast(_signed(low, x), "int32")
    if (before, after) == ("int32", "uint32"):
        return low.wrapped(low.cast(x, "int64"), "uint32")
    node = low.build.made.get(x)
    if (before, after) == ("uint32", "float32") and node is not None and node.op == "aten.bitwise_or.Scalar":
        fraction = node.args[0]
        if node.args[1] == _ONE_TO_TWO and isinstance(fraction, Value) and low.intervals.of(fraction).within(0, (1 << 23) - 1):
            part = low.build.aten("mul.Tensor", low.cast(fraction, "float32"), 2.0**-23)
            return low.build.aten("add.Tensor", part, 1.0)
    raise CaptureError(f"the bits of {before} as {after} are no function of numbers")


@rule("shift_left", "shift_right_logical", "shift_right_arithmetic")
def shifted(low: Lowering, equation: Any, x: Any, by: Any) -> Value:
    name, dtype = equation.primitive.name, _dtype(equation)
    if (
        name != "shift_right_arithmetic"
        and str(dtype) in ("uint32", "int32")
        and isinstance(by, Known)
        and bool((by.array >= 32).all())
    ):
        return low.full(_shape(equation), Known(np.zeros(1, dtype=numpy_of(dtype))))
    if not isinstance(by, Known) or not by.is_same or not bool(((by.array >= 0) & (by.array < 32)).all()):
        raise CaptureError("a shift by what is not a known number of bits below 32 has no exact graph yet")
    if not is_unsigned(dtype) and (name != "shift_right_arithmetic" or str(dtype) not in ("int32", "int64")):
        raise CaptureError(f"it has no exact graph yet for {dtype}")
    x = low.tensor(x)
    count = by.uniform()
    if count is None:
        other = low.tensor(by)
        op = "bitwise_left_shift.Tensor" if name == "shift_left" else "bitwise_right_shift.Tensor"
        return low.wrapped(low.build.aten(op, x, other), dtype)
    if name == "shift_left":
        return low.wrapped(low.build.aten("mul.Tensor", x, 1 << count), dtype)
    return low.build.aten("div.Scalar_mode", x, 1 << count, rounding_mode="floor")
