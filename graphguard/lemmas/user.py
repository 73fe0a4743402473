"""Lemmas of the user's own, for operators that have no row: an index rule, or a definition in plain torch.

gg.lemma("mylib::rms_norm", "... h, h -> ... h", whole="h")
gg.lemma("mylib::swiglu", lambda g, u: torch.nn.functional.silu(g) * u)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphguard.engine.interpret import Interpreter, leaves
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.engine.terms.unknown import Described, Unknown
from graphguard.errors import UsageError
from graphguard.graph.ir import Arg, Graph, Node
from graphguard.graph.ir import Value as Tensor
from graphguard.lemmas import registry
from graphguard.lemmas.rule import Rule, spelled
from graphguard.scope import known_lemmas


@dataclass(frozen=True)
class Lemma:
    """What a user says of one operator. `checked` counts the random cases in which torch's own execution agreed."""

    operator: str  # `mylib.rms_norm.default`
    meaning: Rule | Definition
    checked: int = 0
    untested: str | None = None  # why it could not be compared with the operator itself
    weaker: str | None = None  # what it asks for without need
    dtypes: frozenset[tuple[str, ...]] = field(default=frozenset(), repr=False)  # of the operands, in which it held
    sample: Sequence[Any] | None = field(default=None, repr=False, compare=False)  # arguments that it was tried on

    @property
    def name(self) -> str:
        return qualified(self.operator)

    @property
    def assumption(self) -> str:
        if self.untested is not None:
            return f"trusted: {self.name} is {self.meaning}, a lemma of yours; {self.untested}"
        return f"{self.name} is {self.meaning}, a lemma of yours that held in {self.checked} random cases"

    def describe(
        self, interpreter: Interpreter, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], lanes: int
    ) -> Sequence[Described]:
        if any(isinstance(each, np.ndarray) for each in leaves((args, kwargs))):
            raise Undescribed(f"{self.name} with arguments that differ between ranks")
        if any(tensor.dtype.startswith("complex") for tensor in (*node.operands(), *node.outputs)):
            raise Undescribed(f"{self.name} of complex numbers")
        dtypes = keyed(tensor.dtype for tensor in node.operands())
        if self.untested is None and dtypes not in self.dtypes:
            raise Undescribed(f"{self.name} of {' and '.join(dtypes) or 'nothing'}, in which its lemma was not seen to hold")
        operands = [each for each in leaves((args, kwargs)) if isinstance(each, Value)]
        if isinstance(self.meaning, Definition):
            return self.meaning.describe(interpreter, self.name, node, operands, lanes)
        shapes = [tensor.shape for tensor in node.operands()]
        words = (tuple(map(spelled, node.args)), tuple((key, spelled(arg)) for key, arg in sorted(node.kwargs.items())))
        return self.meaning.describe(registry.Call(interpreter.table, node), operands, shapes, words)


@dataclass(frozen=True, eq=False)
class Definition:
    """A function in plain torch that gives what the operator gives. It is traced for each kind of arguments that it meets.

    trace: the function's graph for a call, given the operator's name too."""

    function: Callable[..., Any]
    trace: Callable[[Callable[..., Any], str, Node], Graph] = field(repr=False)
    fails: dict[tuple[int, ...], str] = field(default_factory=dict, repr=False)  # for operands of so many dims, and how
    _graphs: dict[Any, Graph] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        code = getattr(self.function, "__code__", None)
        where = "" if code is None else f" at {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
        return f"what {'the lambda' if name == '<lambda>' else name}{where} computes"

    def describe(
        self, interpreter: Interpreter, name: str, node: Node, operands: Sequence[Value], lanes: int
    ) -> Sequence[Described]:
        """The traced graph, interpreted in place of the operation."""
        fails = self.fails.get(tuple(len(tensor.shape) for tensor in node.operands()))
        if fails is not None:
            raise UsageError(f"the lemma of {name} does not hold for the call at {node.source}: {fails}")
        graph = self.graph(name, node)
        if [_kind(value.dtype) for value in graph.outputs.values() if value] != [_kind(t.dtype) for t in node.outputs]:
            raise UsageError(f"the lemma of {name} gives {_types(graph)} at {node.source}, where the operator gives {node}")
        inputs = {str(number): value for number, value in enumerate(operands)}
        if interpreter.table.recording:
            environment = interpreter.run_sequential(graph, inputs)
        else:
            environment = interpreter.run_lanes(graph, inputs, lanes)
        results = [environment[value] for value in graph.outputs.values() if value is not None]
        return [Unknown(each.reason, node) if isinstance(each, Unknown) else each for each in results]

    def graph(self, name: str, node: Node) -> Graph:
        key = repr([_typed(arg) for arg in node.args]), repr([(k, _typed(arg)) for k, arg in sorted(node.kwargs.items())])
        if key not in self._graphs:
            self._graphs[key] = self.trace(self.function, name, node)
        return self._graphs[key]


def keyed(dtypes: Iterable[str]) -> tuple[str, ...]:
    """The dtypes of operands, by which it is remembered in which a lemma holds. Positions may have 32 bits or 64."""
    return tuple("int64" if dtype == "int32" else dtype for dtype in dtypes)


def _kind(dtype: str) -> str:
    return "whole" if registry.is_whole(dtype) else "complex" if dtype.startswith("complex") else "real"


def _types(graph: Graph) -> str:
    return ", ".join(f"{value.dtype}{list(value.shape)}" for value in graph.outputs.values() if value) or "nothing"


def _typed(arg: Arg) -> Any:
    if type(arg) is Tensor:
        return arg.dtype, arg.shape
    return tuple(map(_typed, arg)) if type(arg) is tuple else arg


def registered() -> list[Lemma]:
    """The lemmas of this process and of what runs now, by operator."""
    known = by_operator()
    return [known[operator] for operator in sorted(known)]


def by_operator(lemmas: Iterable[Any] = ()) -> dict[str, Lemma]:
    """All lemmas that hold for a check: those given to it, and for other operators its own, those of its file, those of the
    process."""
    given: list[Any] = [lemmas] if isinstance(lemmas, (str, Lemma)) or not isinstance(lemmas, Iterable) else list(lemmas)
    for each in given:
        if not isinstance(each, Lemma):
            raise UsageError(f"lemmas= has {type(each).__name__}; write lemmas=[gg.lemma(name, rule)]")
    return known_lemmas() | {each.operator: each for each in given}


def qualified(operator: str) -> str:
    """`mylib::rms_norm` for `mylib.rms_norm.default`."""
    namespace, name, overload = operator.split(".")
    return f"{namespace}::{name}" if overload == "default" else f"{namespace}::{name}.{overload}"
