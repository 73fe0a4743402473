"""Lemmas of the user's own, for operators that have no row: an index rule, or a definition in plain torch.

gg.lemma("mylib::rms_norm", "... h, h -> ... h", whole="h")
gg.lemma("mylib::swiglu", lambda g, u: torch.nn.functional.silu(g) * u)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphguard.engine.interpret import Interpreter, leaves
from graphguard.engine.term import Undescribed, Value
from graphguard.engine.unknown import Described, Unknown
from graphguard.errors import CaptureError, ProgramError, UsageError
from graphguard.ir import Arg, Graph, Node, Symbol
from graphguard.ir import Value as Tensor
from graphguard.lemmas import registry
from graphguard.lemmas.rule import Rule, parse, spelled
from graphguard.scope import keeper_of_lemmas, lemmas_in_scope


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
    """A function in plain torch that gives what the operator gives. It is traced for each kind of arguments that it meets."""

    function: Callable[..., Any]
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
            self._graphs[key] = self._traced(name, node)
        return self._graphs[key]

    def _traced(self, name: str, node: Node) -> Graph:
        from graphguard.aten.operators import DTYPES
        from graphguard.capture.program import FunctionProgram
        from graphguard.capture.session import capture_sequential
        from graphguard.relation import Input

        if not binds(self.function, node.args, node.kwargs):
            raise UsageError(
                f"the lemma of {name} does not take the arguments with which {node.source} calls the operator; "
                "give the definition the parameters that the operator has"
            )
        inputs = {str(n): Input(tensor.shape, dtype=DTYPES[tensor.dtype]) for n, tensor in enumerate(node.operands())}

        def program(**given: Any) -> Any:
            tensors = iter(given[str(number)] for number in range(len(given)))
            args = [_concrete(arg, tensors) for arg in node.args]
            return self.function(*args, **{key: _concrete(arg, tensors) for key, arg in node.kwargs.items()})

        try:
            return capture_sequential(FunctionProgram(program, "sequential"), inputs)
        except (CaptureError, ProgramError) as error:
            text = str(error).replace("the sequential program", f"the lemma of {name}")
            raise UsageError(f"{text} (for the call at {node.source})") from None


def keyed(dtypes: Iterable[str]) -> tuple[str, ...]:
    """The dtypes of operands, by which it is remembered in which a lemma holds. Positions may have 32 bits or 64."""
    return tuple("int64" if dtype == "int32" else dtype for dtype in dtypes)


def binds(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a builtin, which has no signature
        return True
    return True


def _kind(dtype: str) -> str:
    return "whole" if registry.is_whole(dtype) else "complex" if dtype.startswith("complex") else "real"


def _types(graph: Graph) -> str:
    return ", ".join(f"{value.dtype}{list(value.shape)}" for value in graph.outputs.values() if value) or "nothing"


def _typed(arg: Arg) -> Any:
    if type(arg) is Tensor:
        return arg.dtype, arg.shape
    return tuple(map(_typed, arg)) if type(arg) is tuple else arg


def _concrete(arg: Arg, tensors: Iterable[Any]) -> Any:
    from graphguard.aten.operators import DTYPES

    if type(arg) is Tensor:
        return next(tensors)  # type: ignore[call-overload]
    if type(arg) is tuple:
        return [_concrete(each, tensors) for each in arg]
    if isinstance(arg, Symbol):
        return DTYPES.get(arg.name, arg.name)
    return arg


# ---------------------------------------------------------------------- registration
_REGISTERED: dict[str, Lemma] = {}


def lemma(
    name: str,
    meaning: str | Callable[..., Any],
    *,
    whole: str | Iterable[str] = (),
    sample: Sequence[Any] | None = None,
) -> Lemma:
    """Say what a custom operator does: inside of a check for this check, else for all checks of this process. A later lemma of
    the same name takes its place.

    meaning: an index rule, `"... h, h -> ... h"`, one pattern for each tensor; or a function in plain torch that takes the
        operator's arguments and gives what it gives.
    whole: the axes of an index rule that the operator must see whole.
    sample: arguments to try the operator on, where small random tensors will not do.

    The lemma is compared with the operator's own CPU kernel first; if they differ, it is refused with the counterexample.
    """
    from graphguard.oracle.vetting import vetted

    operator = overload_name(name)
    if registry.lookup(operator) is not None:
        raise UsageError(
            f"{qualified(operator)} has a lemma of its own (`graphguard lemmas ls`); only operators without one take yours"
        )
    found: Rule | Definition
    if isinstance(meaning, str):
        found = parse(meaning, whole)
    elif not callable(meaning):
        raise UsageError(f"the lemma of {name} is {type(meaning).__name__}; write an index rule or a function in torch")
    elif whole:
        raise UsageError(f"whole= is for index rules; the definition of {name} says by itself what must be whole")
    else:
        found = Definition(meaning)
    made = vetted(Lemma(operator, found), sample)
    keeper = keeper_of_lemmas()
    (_REGISTERED if keeper is None else keeper)[operator] = made
    return made


def registered() -> list[Lemma]:
    """The lemmas of this process and of what runs now, by operator."""
    known = by_operator()
    return [known[operator] for operator in sorted(known)]


def registered_by(files: Iterable[str]) -> list[Lemma]:
    """The lemmas of this process, after files of the user's were imported."""
    from graphguard.discovery import load

    for file in files:
        load(file)
    return registered()


def by_operator(lemmas: Iterable[Any] = ()) -> dict[str, Lemma]:
    """All lemmas that hold for a check: those given to it, and for other operators its own, those of its file, those of the
    process."""
    given: list[Any] = [lemmas] if isinstance(lemmas, (str, Lemma)) or not isinstance(lemmas, Iterable) else list(lemmas)
    for each in given:
        if not isinstance(each, Lemma):
            raise UsageError(f"lemmas= has {type(each).__name__}; write lemmas=[gg.lemma(name, rule)]")
    return _REGISTERED | lemmas_in_scope() | {each.operator: each for each in given}


def qualified(operator: str) -> str:
    """`mylib::rms_norm` for `mylib.rms_norm.default`."""
    namespace, name, overload = operator.split(".")
    return f"{namespace}::{name}" if overload == "default" else f"{namespace}::{name}.{overload}"


def overload_name(name: str) -> str:
    """`mylib.rms_norm.default` for `mylib::rms_norm`, if there is such an operator."""
    import torch

    namespace, _, rest = name.replace("::", ".", 1).partition(".") if isinstance(name, str) else ("", "", "")
    packet, _, overload = rest.partition(".")
    if not namespace or not packet:
        raise UsageError(f"{name!r} is not the name of an operator, such as 'mylib::rms_norm'")
    found = getattr(getattr(torch.ops, namespace), packet, None) if packet.isidentifier() else None
    if found is None:
        raise UsageError(f"torch knows no operator {namespace}::{packet}; import or define it before its lemma")
    if (overload or "default") not in found.overloads():
        raise UsageError(f"{namespace}::{packet} has the overloads {', '.join(found.overloads())}; name one, as in "
                         f"'{namespace}::{packet}.{found.overloads()[0]}'")  # fmt: skip
    return f"{namespace}.{packet}.{overload or 'default'}"
