"""HLO instructions by the rules for JAX's primitives, which XLA made them of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from graphguard.capture.hlo.comparators import compared_by
from graphguard.capture.hlo.devices import groups_of, pairs_of
from graphguard.capture.hlo.text import Instruction, Module
from graphguard.capture.hlo.windows import convolution_of, reversed_dims
from graphguard.capture.jax import rules  # noqa: F401 # registers them
from graphguard.capture.jax.builder import Builder
from graphguard.capture.jax.dtypes import in_graph, numpy_of
from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import Lowering
from graphguard.capture.jax.mesh import Along
from graphguard.capture.jax.rules.calls import MAY_NOT_MEET, chosen, way
from graphguard.errors import CaptureError

MOST_STEPS, MOST_INSTRUCTIONS = 100_000, 2_000_000
# Of the same meaning, and without arguments of their own.
_NAMES = {
    "subtract": "sub", "multiply": "mul", "divide": "div", "maximum": "max", "minimum": "min", "exponential": "exp",
    "negate": "neg", "power": "pow", "remainder": "rem", "cosine": "cos", "sine": "sin", "exponential-minus-one": "expm1",
    "log-plus-one": "log1p", "is-finite": "is_finite", "shift-left": "shift_left", "shift-right-logical": "shift_right_logical",
    "shift-right-arithmetic": "shift_right_arithmetic", "bitcast": "reshape",
    **{name: name for name in ("add", "and", "or", "xor", "not", "abs", "sign", "floor", "ceil", "log", "tanh",
                               "logistic", "sqrt", "rsqrt", "cbrt", "tan", "erf", "atan2", "clamp", "reshape")},
}  # fmt: skip
_ELEMENTWISE = {*_NAMES, "compare", "select", "convert"} - {"reshape", "bitcast"}
_OF_ONE_DTYPE = {*_NAMES} - {"is-finite"}
_IDENTITIES = ("copy", "optimization-barrier", "opt-barrier", "copy-start", "copy-done", "domain")
_NEUTRAL = {"add": 0, "multiply": 1, "maximum": -math.inf, "minimum": math.inf, "and": True, "or": False}
_REDUCED = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min", "and": "and", "or": "or"}
_SUMMED = {"add": "psum", "maximum": "pmax", "minimum": "pmin"}
_Read = Callable[["Reader", Instruction], tuple[str, dict[str, Any]]]
_PARAMETERS: dict[str, _Read] = {}


def _of(op: str) -> Callable[[_Read], _Read]:
    def register(read: _Read) -> _Read:
        _PARAMETERS[op] = read
        return read

    return register


class Reader(Lowering):
    def __init__(self, builder: Builder, module: Module):
        super().__init__(builder)
        self.inside = 1  # all of it is what a device does
        self.module = module
        self._order = {name: place for place, name in enumerate(module.computations)}
        self._left = MOST_INSTRUCTIONS

    def computation(self, name: str, args: list[Any], caller: str | None = None) -> Any:
        if name not in self._order or (caller is not None and self._order[name] >= self._order[caller]):
            raise CaptureError(f"the computation {name} is called before it is there")
        env: dict[str, Any] = {}
        for each in self.module.computations[name]:
            self._left -= 1
            if self._left < 0:
                raise CaptureError(f"its loops run more than {MOST_INSTRUCTIONS} instructions")
            self.build.source = self.module.source(each) or self.build.source
            self.build.backward = "transpose(" in each.attributes
            missing = next((operand for operand in each.operands if operand not in env), None)
            if missing is not None:
                raise CaptureError(f"{each.name} reads {missing}, which is not there yet")
            try:
                env[each.name] = self._read(each, [env[operand] for operand in each.operands], args, name)
            except _Placed:
                raise
            except CaptureError as error:
                where = f"{self.build.source}: " if self.build.source is not None else ""
                raise _Placed(f"{where}the instruction {each.op} ({each.name}): {error}") from None
            except (LookupError, ValueError, TypeError, AttributeError, AssertionError):
                where = f"{self.build.source}: " if self.build.source is not None else ""
                raise _Placed(f"{where}the instruction {each.op} ({each.name}): it cannot be read as it is written") from None
            if each.is_root:
                return env[each.name]
        raise CaptureError(f"the computation {name} has no ROOT")

    def _read(self, each: Instruction, operands: list[Any], args: list[Any], name: str) -> Any:
        op = each.op
        if op == "parameter":
            return args[int(each.raw)]
        if op == "constant":
            return self._constant(each)
        if op == "tuple":
            return tuple(operands)
        if op == "get-tuple-element":
            return operands[0][each.number("index")]
        if op in _IDENTITIES or (op == "custom-call" and 'custom_call_target="Sharding"' in each.attributes):
            return operands[0]
        if op in ("call", "fusion"):
            return self.computation(each.word("to_apply" if op == "call" else "calls"), operands, name)
        if op == "while":
            return self._loop(each, operands[0], name)
        if op == "conditional":
            return self._branch(each, operands, name)
        if op == "sort":
            return self._sort(each, operands)
        if op in ("partition-id", "replica-id"):
            return Known(np.array(self.build.ranks if op == "partition-id" and len(self.build.ranks) else [0], dtype=np.int64))
        if op == "reduce":
            return self._reduce(each, operands)
        if op == "all-reduce":
            return self._all_reduce(each, operands)
        if op == "all-to-all" and len(operands) > 1:
            return self._exchange(each, operands)
        return self._by_rule(each, operands)

    def _constant(self, each: Instruction) -> Any:
        dtype, shape = each.type
        if "..." in each.raw:
            raise CaptureError("its numbers are left out of the text; dump with --xla_dump_large_constants")
        words = re.findall(r"[\w.+\-]+", each.raw)
        read = int if dtype.startswith(("int", "uint")) else float
        numbers = [word == "true" if word in ("true", "false") else read(word) for word in words]
        return self.literal(np.array(numbers).reshape(shape).astype(numpy_of(dtype)))

    def _loop(self, each: Instruction, state: Any, name: str) -> Any:
        for _ in range(MOST_STEPS):
            goes_on = self.computation(each.word("condition"), [state], name)
            if not isinstance(goes_on, Known):
                raise CaptureError("how often it runs depends on data")
            if not way(goes_on):
                return state
            state = self.computation(each.word("body"), [state], name)
        raise CaptureError(f"it runs more than {MOST_STEPS} times")

    def _branch(self, each: Instruction, operands: list[Any], name: str) -> Any:
        """One of several computations, each with an operand of its own: by number, or the first one where a predicate holds."""
        which, given, bodies = operands[0], operands[1:], branches_of(each)
        if len(bodies) != len(given):
            raise CaptureError(f"it has {len(bodies)} branches and {len(given)} operands")
        by_predicate = each.has("true_computation")
        if isinstance(which, Known):
            place = way(which)
            place = 1 - place if by_predicate else place if 0 <= place < len(bodies) else len(bodies) - 1
            return self.computation(bodies[place], [given[place]], name)
        nodes = len(self.build.nodes)
        results = [self.computation(body, [operand], name) for body, operand in zip(bodies, given, strict=True)]
        if any(node.communicates for node in self.build.nodes[nodes:]):
            raise CaptureError(MAY_NOT_MEET)
        flat = [list(result) if isinstance(result, tuple) else [result] for result in results]
        if any(isinstance(part, tuple) for result in flat for part in result):
            raise CaptureError("a branch that gives tuples in tuples has no exact graph yet")
        number = self.tensor(which)
        if by_predicate:
            number = self.build.aten("bitwise_not", number)
        else:  # a number that is no branch's is the last one's
            last = self.build.aten("full", [], len(bodies) - 1, dtype=number.dtype)
            number = self.build.aten("where.self", self.build.aten("lt.Scalar", number, 0), last, number)
        made = chosen(self, number, flat)
        return tuple(made) if isinstance(results[0], tuple) else made[0]

    def _sort(self, each: Instruction, operands: list[Any]) -> Any:
        """By one array, the others in its order."""
        key, descending = compared_by(self.module.computations.get(each.word("to_apply"), []))
        (dim,) = each.numbers("dimensions")
        if key >= len(operands):
            raise CaptureError("it compares an array that it does not have")
        if len(operands) > 1 and "is_stable=true" not in each.attributes:
            self.build.assumptions.add(f"{self.build.source}: equal keys stay in their order, though the sort is not stable")
        values = [self.tensor(operand) for operand in operands]
        ordered, order = self.build.several("sort.stable", values[key], stable=True, dim=dim, descending=descending)
        made = [ordered if place == key else self.build.aten("gather", value, dim, order) for place, value in enumerate(values)]
        return tuple(made) if len(made) > 1 else made[0]

    # ------------------------------------------------------------------ reductions
    def combined_by(self, each: Instruction) -> str:
        """The operation of a computation of two numbers; "" if it gives the second."""
        body = self.module.computations.get(each.word("to_apply"), [])
        names = [one.name for one in sorted((one for one in body if one.op == "parameter"), key=lambda one: int(one.raw))]
        root = next((one for one in body if one.is_root), None)
        if len(names) == 2 and len(body) == 2 and root is not None and root.name == names[1]:
            return ""
        if len(names) != 2 or len(body) != 3 or root is None or sorted(root.operands) != sorted(names):
            raise CaptureError("what combines its elements is not one operation")
        return root.op

    def _reduce(self, each: Instruction, operands: list[Any]) -> Any:
        if len(operands) != 2:
            raise CaptureError("a reduction of several arrays has no exact graph yet")
        how, (x, first) = self.combined_by(each), operands
        if how not in _REDUCED:
            raise CaptureError(f"a reduction by {how!r} has no exact graph yet")
        made = x
        if each.numbers("dimensions"):
            made = self.primitive(f"reduce_{_REDUCED[how]}", {"axes": each.numbers("dimensions")}, each.type, [x])
        neutral = isinstance(first, Known) and first.uniform() == _NEUTRAL[how]
        return made if neutral else self.primitive(_NAMES.get(how, how), {}, each.type, [made, first])

    def _all_reduce(self, each: Instruction, operands: list[Any]) -> Any:
        how = self.combined_by(each)
        if how not in _SUMMED:
            raise CaptureError(f"a reduction over devices by {how!r} has no exact graph yet")
        along = self.along(each)
        equation = _equation(_SUMMED[how], {"axes": along}, each.types, many=True)
        made = self.applied(equation, operands)
        return tuple(made) if len(made) > 1 else made[0]

    def along(self, each: Instruction) -> Along:
        """The groups of a collective, whose numbers are those of partitions."""
        if not each.has("channel_id"):
            raise CaptureError("it is over replicas, not over partitions")
        if each.op in ("all-reduce", "all-gather", "reduce-scatter") and "use_global_device_ids=true" not in each.attributes:
            raise CaptureError("its groups are not of global device ids")
        return Along(listed=groups_of(each.attributes, self.build.mesh.size))

    def _exchange(self, each: Instruction, operands: list[Any]) -> Any:
        """One array for each member, in its own place."""
        along, rows = self.along(each), self.build.aten("stack", tuple(map(self.tensor, operands)), 0)
        if self.build.places.size(along) != len(operands):
            raise CaptureError("it has not one array for each member of its groups")
        ones = (1,) * len(operands)
        made = self.build.collective("all_to_all_single", rows, rows.shape, along, output_splits=ones, input_splits=ones)
        return tuple(self.build.aten("select.int", made, 0, place) for place in range(len(operands)))

    # ------------------------------------------------------------------ all others
    def _by_rule(self, each: Instruction, operands: list[Any]) -> Any:
        if each.op in _PARAMETERS:
            name, params = _PARAMETERS[each.op](self, each)
            if each.op == "select":
                operands = [operands[0], operands[2], operands[1]]
            if each.op == "convolution":
                operands = [operands[0], self._turned(operands[1], each)]
            if each.op in ("gather", "scatter"):
                operands = [operands[0], self._lined(operands[1], each), *operands[2:]]
        elif each.op in _NAMES:
            name, params = _NAMES[each.op], {}
        else:
            raise CaptureError("it has no exact graph yet")
        shape = each.type[1]
        shapes = [tuple(operand.shape) for operand in operands]
        if each.op in _ELEMENTWISE and any(its != shape and (its or each.op not in ("select", "clamp")) for its in shapes):
            raise CaptureError(f"its operands are {', '.join(map(str, shapes))}, where it gives {shape}")
        dtypes = {operand.dtype for operand in operands}
        if each.op in _OF_ONE_DTYPE and dtypes != {in_graph(each.type[0])}:
            raise CaptureError(f"its operands are of {', '.join(sorted(dtypes))}, where it gives {each.type[0]}")
        return self.primitive(name, params, each.type, operands)

    def primitive(self, name: str, params: dict[str, Any], type_: Any, operands: list[Any]) -> Any:
        return self.applied(_equation(name, params, (type_,), operands=operands), operands)[0]

    def _turned(self, weight: Any, each: Instruction) -> Any:
        """The kernel of a convolution that reads it from its end, as gradients do."""
        dims = reversed_dims(each)
        return self.build.aten("flip", self.tensor(weight), dims) if dims else weight

    def _lined(self, index: Any, each: Instruction) -> Any:
        """Indices with their components in the last dim."""
        dim = each.number("index_vector_dim")
        if dim == len(index.shape):
            return Known(index.array[..., None]) if isinstance(index, Known) else self.view(index, [*index.shape, 1])
        if dim != len(index.shape) - 1:
            raise CaptureError("indices whose components are not in the last dim have no exact graph yet")
        return index


def branches_of(each: Instruction) -> list[str]:
    """The computations of a conditional, in the order of its operands."""
    if each.has("true_computation"):
        return [each.word("true_computation"), each.word("false_computation")]
    found = re.search(r"branch_computations=\{(.*?)\}", each.attributes)
    if found is None:
        raise CaptureError("it has no branches")
    return re.findall(r"%([\w.\-]+)", found[1])


class _Placed(CaptureError):
    """An error that names its instruction already."""


def _equation(name: str, params: dict[str, Any], types: Any, many: bool = False, operands: Any = ()) -> Any:
    outvars = [SimpleNamespace(aval=SimpleNamespace(shape=shape, dtype=_dtype(dtype))) for dtype, shape in types]
    invars = [SimpleNamespace(aval=SimpleNamespace(shape=each.shape, dtype=each.dtype)) for each in operands]
    return SimpleNamespace(
        primitive=SimpleNamespace(name=name, multiple_results=many), params=params, outvars=outvars, invars=invars
    )


def _dtype(name: str) -> Any:
    return name if name.startswith("bfloat") else np.dtype(name)


# ---------------------------------------------------------------------- arguments
@_of("compare")
def _compare(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    if each.has("type"):
        raise CaptureError("a comparison in a total order has no exact graph yet")
    return each.word("direction").lower(), {}


@_of("select")
def _select(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    return "select_n", {}


@_of("broadcast")
def _broadcast(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    return "broadcast_in_dim", {"shape": each.type[1], "broadcast_dimensions": each.numbers("dimensions")}


@_of("transpose")
def _transpose(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    return "transpose", {"permutation": each.numbers("dimensions")}


@_of("reverse")
def _reverse(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    return "rev", {"dimensions": each.numbers("dimensions")}


@_of("concatenate")
def _concatenate(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    return "concatenate", {"dimension": each.numbers("dimensions")[0]}


@_of("slice")
def _slice(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    cuts = [
        [int(number) for number in cut.split(":")]
        for cut in re.findall(r"\[(\d+:\d+(?::\d+)?)\]", each.attributes.split("slice=")[1])
    ]
    starts, stops, steps = zip(*((*cut, 1)[:3] for cut in cuts), strict=True)
    return "slice", {"start_indices": starts, "limit_indices": stops, "strides": steps}


@_of("convert")
def _convert(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    return "convert_element_type", {"new_dtype": _dtype(each.type[0])}


@_of("iota")
def _iota(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    dtype, shape = each.type
    return "iota", {"shape": shape, "dimension": each.number("iota_dimension"), "dtype": dtype}


@_of("pad")
def _pad(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    found = re.search(r"padding=([\d_x\-]+)", each.attributes)
    dims = [[int(number) for number in dim.split("_")] for dim in found[1].split("x")] if found else []
    return "pad", {"padding_config": [tuple((*dim, 0)[:3]) for dim in dims]}


@_of("dynamic-slice")
def _dynamic_slice(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    return "dynamic_slice", {"slice_sizes": each.numbers("dynamic_slice_sizes")}


@_of("dynamic-update-slice")
def _dynamic_update_slice(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    return "dynamic_update_slice", {}


@_of("dot")
def _dot(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    summed = each.numbers("lhs_contracting_dims"), each.numbers("rhs_contracting_dims")
    batch = each.numbers("lhs_batch_dims"), each.numbers("rhs_batch_dims")
    return "dot_general", {"dimension_numbers": (summed, batch)}


@_of("convolution")
def _convolution(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    return "conv_general_dilated", convolution_of(each)


@_of("all-gather")
def _all_gather(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    (dim,) = each.numbers("dimensions")
    return "all_gather", {"axis_name": reader.along(each), "all_gather_dimension": dim, "tiled": True}


@_of("reduce-scatter")
def _reduce_scatter(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    if reader.combined_by(each) != "add":
        raise CaptureError("it does not sum")
    (dim,) = each.numbers("dimensions")
    return "reduce_scatter", {"axis_name": reader.along(each), "scatter_dimension": dim, "tiled": True}


@_of("all-to-all")
def _all_to_all(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    (dim,) = each.numbers("dimensions")
    return "all_to_all", {"axis_name": reader.along(each), "split_axis": dim, "concat_axis": dim}


@_of("collective-permute")
def _permute(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    if not each.has("channel_id"):
        raise CaptureError("it is over replicas, not over partitions")
    everyone = Along(listed=(tuple(range(reader.build.mesh.size)),))
    return "ppermute", {"axis_name": everyone, "perm": pairs_of(each.attributes)}


@_of("gather")
def _gather(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    keys = ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims")
    numbers = SimpleNamespace(**{key: each.numbers(key) for key in keys})
    return "gather", {
        "dimension_numbers": numbers,
        "slice_sizes": each.numbers("slice_sizes"),
        "mode": "clip",
        "fill_value": None,
    }


@_of("scatter")
def _scatter(reader: Reader, each: Instruction) -> tuple[str, dict[str, Any]]:
    names = {"": "scatter", "add": "scatter-add", "multiply": "scatter_mul", "minimum": "scatter_min", "maximum": "scatter_max"}
    how = reader.combined_by(each)
    if how not in names:
        raise CaptureError(f"a scatter by {how!r} has no exact graph yet")
    keys = ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims")
    numbers = SimpleNamespace(
        **{key: each.numbers(key) for key in keys}, operand_batching_dims=each.numbers("input_batching_dims")
    )
    unique = "unique_indices=true" in each.attributes
    return names[how], {"dimension_numbers": numbers, "mode": "drop", "unique_indices": unique}
