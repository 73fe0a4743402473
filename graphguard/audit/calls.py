"""One call of an operator: executed by torch, described by its row, and compared."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphguard.aten.kernels import Kernels, tensors_in
from graphguard.aten.operators import DTYPE_NAMES, IRRELEVANT_KEYWORDS, operator, symbol
from graphguard.engine.interpret import Interpreter
from graphguard.engine.numeric.claims import _difference as difference
from graphguard.engine.numeric.evaluator import Evaluator, Malformed, TooLarge, Unlearned
from graphguard.engine.store.table import Table
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.graph.ir import Arg, Node
from graphguard.graph.ir import Value as Tensor
from graphguard.lemmas import known, registry
from graphguard.lemmas.dtypes import signature
from graphguard.lemmas.known import all_lemmas
from graphguard.oracle.indexed import lie_inside

TOLERANCES = {torch.float64: 1e-7, torch.float32: 2e-3}
COARSE = 0.05  # for floats of fewer bits
MOST_ELEMENTS = 1 << 12
MOST = {torch.int32: 2.0**31, torch.int64: 2.0**53}  # beyond, numbers are not compared


@dataclass(frozen=True)
class OperatorCall:
    """What an operator is called with, tensors and all."""

    operator: str  # `aten.add.Tensor`
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [each for arg in (*self.args, *self.kwargs.values()) for each in tensors_in(arg)]

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> OperatorCall:
        left = iter(tensors)

        def swap(arg: Any) -> Any:
            if isinstance(arg, torch.Tensor):
                return next(left)
            return type(arg)(map(swap, arg)) if type(arg) in (list, tuple) else arg

        return OperatorCall(self.operator, tuple(map(swap, self.args)), {name: swap(arg) for name, arg in self.kwargs.items()})

    def __str__(self) -> str:
        named = [f"{name}={_shown(arg)}" for name, arg in self.kwargs.items()]
        return f"{self.operator}({', '.join([*map(_shown, self.args), *named])})"


@dataclass(frozen=True)
class Verdict:
    """What became of a call. `wrong` is empty for a description that is right, and None if there is none to compare."""

    row: str
    signature: str
    wrong: str | None


def examined(call: OperatorCall, *, declared: bool = False) -> Verdict | None:
    """Whether torch gives what the row says; None if torch does not take the call, or no row is for it. `declared` says of
    integers between which numbers they lie."""
    row = known.lookup(call.operator)
    if row is None or row.draws or any(t.numel() > MOST_ELEMENTS or not _is_plain(t) for t in call.tensors):
        return None
    executed = execute(call)
    if executed is None:
        return None
    node, tensors, results = executed
    signatures = {signature(row.operator, each, node.op) for each in _elements(node)}
    if len(signatures) != 1:  # a list of several dtypes: nobody could say of which one it is wrong
        return None
    return Verdict(row.operator, signatures.pop(), _compared(node, tensors, results, declared))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"


def _elements(node: Node) -> list[Node]:
    """What a list operator does, one by one; else the node."""
    if "._foreach_" not in node.op:
        return [node]
    return [
        Node(node.op, tuple(arg[n] if isinstance(arg, tuple) else arg for arg in node.args), node.kwargs, (output,))
        for n, output in enumerate(node.outputs)
        if all(n < len(arg) for arg in node.args if isinstance(arg, tuple))
    ]


def execute(call: OperatorCall) -> tuple[Node, dict[Tensor, torch.Tensor], list[torch.Tensor]] | None:
    given: dict[Tensor, torch.Tensor] = {}

    def spelled(arg: Any) -> Arg:
        if isinstance(arg, torch.Tensor):
            value = Tensor(len(given), tuple(arg.shape), DTYPE_NAMES[arg.dtype])
            given[value] = arg.detach().clone()
            return value
        if isinstance(arg, (list, tuple)):
            return tuple(map(spelled, arg))
        return symbol(arg) or arg

    args = tuple(map(spelled, call.args))
    kwargs = {name: spelled(arg) for name, arg in call.kwargs.items() if name not in IRRELEVANT_KEYWORDS}
    function, _ = Kernels.function(call.operator)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = list(Kernels(wide=True).run(Node(call.operator, args, kwargs, ()), given.__getitem__))
    except Exception:  # what a kernel raises for dtypes that it does not take, nobody knows
        return None
    if any(not isinstance(result, torch.Tensor) for result in results) or not results:
        return None
    outputs = tuple(Tensor(len(given) + n, tuple(r.shape), DTYPE_NAMES[r.dtype]) for n, r in enumerate(results))
    writes = tuple(name for _, name, _ in operator(function).written)
    return Node(call.operator, args, kwargs, outputs, writes=writes), given, results


def _compared(node: Node, tensors: Mapping[Tensor, torch.Tensor], results: list[torch.Tensor], declared: bool) -> str | None:
    table = Table()
    interpreter = Interpreter(table, all_lemmas())
    values = {t: interpreter.input(str(t.id), registry.described_shape(t)) for t in tensors}
    if declared:
        _declare(table, values, tensors)

    def bound(arg: Any) -> Any:
        return values[arg] if type(arg) is Tensor else tuple(map(bound, arg)) if type(arg) is tuple else arg

    kwargs = {name: bound(arg) for name, arg in node.kwargs.items()}
    try:
        said = known.describe(table, node, bound(node.args), kwargs)
    except (Undescribed, AssertionError):
        return None
    except Exception as error:  # no row may raise anything but Undescribed
        return f"its description raises {type(error).__name__}: {error}"
    if said is None:
        return None
    if not _is_assumed(table, values, tensors):
        return None
    arrays = {str(t.id): as_array(tensor) for t, tensor in tensors.items()}
    evaluator = Evaluator(table, arrays, {})
    tolerance = max((_tolerance(t.dtype) for t in (*tensors.values(), *results)), default=0.0)
    compared = False
    for tensor, described, result in zip(node.outputs, said, results, strict=False):
        if isinstance(described, Value) and result.numel() and described.shape == registry.described_shape(tensor):
            wrong = _difference(evaluator, described, result, tolerance, list(tensors.values()))
            if wrong:
                return wrong
            compared |= wrong is not None
    return "" if compared else None


def _declare(table: Table, values: Mapping[Tensor, Value], tensors: Mapping[Tensor, torch.Tensor]) -> None:
    for tensor, held in tensors.items():
        for term in values[tensor].terms:
            atom = term.factors[0].atom
            if held.dtype == torch.bool:
                atom.indicator = atom.nonnegative = True
            elif not (held.is_floating_point() or held.is_complex()) and held.numel():
                table.facts.declare(atom, int(held.min()), int(held.max()) + 1)


def _is_assumed(table: Table, values: Mapping[Tensor, Value], tensors: Mapping[Tensor, torch.Tensor]) -> bool:
    """Whether integers lie where the description takes them to lie, such as inside of what they index, and are exact here."""
    for tensor, held in tensors.items():
        if held.numel() and not held.is_complex() and bool((held.double().abs() >= MOST[torch.int32]).any()):
            return False
        for term in values[tensor].terms:
            known = table.facts.ranges().get(term.factors[0].atom.id)
            if known is not None and held.numel() and not lie_inside(held, known):
                return False
    return True


def _difference(
    evaluator: Evaluator, described: Value, result: torch.Tensor, tolerance: float, operands: list[torch.Tensor]
) -> str | None:
    held = as_array(result)
    try:
        evaluator.learn(described, 0, held)
        said = evaluator.value(described)
    except Malformed as error:
        return f"its description means nothing: {error}"
    except (Unlearned, TooLarge):
        return None
    apart = difference(said, held)
    if result.dtype in MOST:  # which are taken not to overflow
        apart = np.where(np.abs(said) < MOST[result.dtype], apart, 0.0)
    if all(bool(t.isfinite().all()) for t in operands):  # not defined there, as 0 / 0: nothing is claimed
        apart = np.where(np.isfinite(held), apart, 0.0)
        if not np.isfinite(held).any():
            return None
    if apart.max() <= (tolerance if result.is_floating_point() or result.is_complex() else 1e-7):
        return ""
    place = np.unravel_index(int(apart.argmax()), apart.shape)
    return f"{held[place]:.9g} at {list(map(int, place))} is described as {said[place]:.9g}"


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype, COARSE) if dtype.is_floating_point or dtype.is_complex else 1e-7


def as_array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64).numpy(force=True)


def _shown(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return f"{DTYPE_NAMES[arg.dtype]}{list(arg.shape)}" + (f" {arg.tolist()}" if arg.numel() <= 4 else "")
    return f"[{', '.join(map(_shown, arg))}]" if isinstance(arg, (list, tuple)) else repr(arg)


# ---------------------------------------------------------------------- calls of a program
def called(node: Node, values: Mapping[Tensor, torch.Tensor]) -> OperatorCall:
    """The call that a node makes."""
    given = Kernels(True)
    args = tuple(given.argument(arg, values.__getitem__) for arg in node.args)
    return OperatorCall(node.op, args, {name: given.argument(arg, values.__getitem__) for name, arg in node.kwargs.items()})


class Listening(TorchDispatchMode):
    """Notes the operators that a program calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if known.lookup(str(func)) is not None:
            kept = OperatorCall(str(func), tuple(args), dict(kwargs or {}))
            self.calls.append(kept.with_tensors([t.detach().clone() for t in kept.tensors]))
        return func(*args, **(kwargs or {}))


def calls_of(program: Any, *args: Any, **kwargs: Any) -> Iterator[OperatorCall]:
    """The calls that a program makes, as far as it runs."""
    listening = Listening()
    try:
        with listening, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program(*args, **kwargs)
    except Exception:  # whatever it does not take
        pass
    return iter(listening.calls)


__all__ = ["OperatorCall", "Verdict", "as_array", "calls_of", "examined", "execute"]
