"""Equations with jaxprs inside: calls are inlined, loops are unrolled, branches on data are both computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from graphguard.capture.jax.dtypes import numpy_of
from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import CALLS, Diverged, Lowering, rule
from graphguard.errors import CaptureError
from graphguard.graph.ir import Value

_MOST_STEPS = 100_000  # of a loop: one that ends goes on for less
MAY_NOT_MEET = "a branch on data communicates, so whether the ranks meet depends on data"
_JAXPRS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_COMMUNICATES = {"psum", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant", "reduce_scatter",
                 "psum_scatter", "all_to_all", "ragged_all_to_all", "pbroadcast", "shard_map"}  # fmt: skip


@rule(*CALLS)
def call(low: Lowering, equation: Any, *operands: Any) -> list[Any]:
    inner = next(equation.params[key] for key in _JAXPRS if key in equation.params)
    return low.closed(inner, operands) if hasattr(inner, "consts") else low.run(inner, (), operands)


@rule("debug_callback", "debug_print")
def shown(low: Lowering, equation: Any, *operands: Any) -> list[Any]:
    """What is printed changes nothing."""
    return []


@rule("scan")
def scan(low: Lowering, equation: Any, *operands: Any) -> list[Any]:
    params = equation.params
    consts, rest = operands[: params["num_consts"]], operands[params["num_consts"] :]
    carry, columns = list(rest[: params["num_carry"]]), rest[params["num_carry"] :]
    stacked: list[list[Any]] = []
    steps = range(params["length"])
    for step in reversed(steps) if params["reverse"] else steps:
        rows = [_row(low, column, step) for column in columns]
        results = low.closed(params["jaxpr"], [*consts, *carry, *rows])
        carry = results[: params["num_carry"]]
        stacked.append([low.tensor(each) for each in results[params["num_carry"] :]])
    if params["reverse"]:
        stacked.reverse()
    outputs = equation.outvars[params["num_carry"] :]
    if not stacked:
        return [*carry, *(low.full(each.aval.shape, Known(np.zeros(1, dtype=numpy_of(each.aval.dtype)))) for each in outputs)]
    return [*carry, *(low.build.aten("stack", column, 0) for column in zip(*stacked, strict=True))]


def _row(low: Lowering, column: Any, step: int) -> Any:
    """One step's row; of numbers that count, the number."""
    if isinstance(column, Known):
        return Known(column.array[:, step])
    column = low.tensor(column)
    node = low.build.made.get(column)
    while node is not None and node.op == "aten._to_copy.default":
        node = low.build.made.get(node.args[0])  # type: ignore[arg-type]
    if node is not None and node.op == "aten.arange.default" and len(column.shape) == 1:
        return Known(np.array([step], dtype=numpy_of(column.dtype)))
    return low.build.aten("select.int", column, 0, step)


@rule("while")
def loop(low: Lowering, equation: Any, *operands: Any) -> list[Any]:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, of_body, state = operands[:first], operands[first:second], list(operands[second:])
    for _ in range(_MOST_STEPS):
        (goes_on,) = low.closed(params["cond_jaxpr"], [*of_condition, *state])
        if not isinstance(goes_on, Known):
            raise CaptureError("how often it runs depends on data; write a loop of a fixed length")
        if not way(goes_on):
            return state
        state = low.closed(params["body_jaxpr"], [*of_body, *state])
    raise CaptureError(f"it runs more than {_MOST_STEPS} times")


@rule("cond")
def branch(low: Lowering, equation: Any, which: Any, *operands: Any) -> list[Any]:
    branches = equation.params["branches"]
    if isinstance(which, Known):
        return low.closed(branches[min(max(way(which), 0), len(branches) - 1)], operands)
    if any(_communicates(each.jaxpr) for each in branches):
        raise CaptureError(MAY_NOT_MEET)
    return chosen(low, low.tensor(which), [low.closed(one, operands) for one in branches])


def chosen(low: Lowering, which: Value, results: list[list[Any]]) -> list[Any]:
    """The results of one of several branches: the first one for what is below its number, the last one for what is above."""
    found = [low.tensor(each) for each in results[-1]]
    for place in reversed(range(len(results) - 1)):
        mask = low.build.aten("le.Scalar" if place == 0 else "eq.Scalar", low.cast(which, "int32"), place)
        these = map(low.tensor, results[place])
        found = [low.build.aten("where.self", mask, yes, no) for yes, no in zip(these, found, strict=True)]
    return found


@rule("platform_index")
def platform(low: Lowering, equation: Any) -> Any:
    raise CaptureError("which platform it runs on is not known")


def way(which: Known) -> int:
    """The number on which a way depends; ranks that differ in it are walked apart."""
    kinds = np.unique(which.numbers)
    if len(kinds) > 1:
        raise Diverged(which.numbers)
    return int(kinds[0])


def _communicates(jaxpr: Any) -> bool:
    return any(each.primitive.name in _COMMUNICATES for each in equations(jaxpr))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of them, also those of jaxprs inside."""
    for equation in jaxpr.eqns:
        yield equation
        for param in equation.params.values():
            for inner in param if isinstance(param, (tuple, list)) else (param,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
