"""What `graph/operators.py` says of operators, executed: their classes, and the other sets, on calls that samples make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from graphguard.aten.kernels import tensors_in
from graphguard.audit.calls import OperatorCall, as_array, execute
from graphguard.engine.interpret import Interpreter
from graphguard.engine.numeric.evaluator import Evaluator
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import collapse
from graphguard.engine.terms.term import Undescribed
from graphguard.graph import operators
from graphguard.graph.operators import class_of, linear_in, name_of
from graphguard.lemmas import known
from graphguard.lemmas.dtypes import audited, may_lose
from graphguard.lemmas.known import all_lemmas
from graphguard.lemmas.registry import described_shape

TOLERANCE = 1e-9
PLACES = 6  # of an operand, that are made undefined one by one
Tensors = Sequence[torch.Tensor]


def wrongs(calls: Iterable[OperatorCall], seed: int = 0) -> Iterator[str]:
    """What is said of operators, and does not hold for calls of them."""
    for call in calls:
        generator = torch.Generator().manual_seed(seed)
        drawn = call.with_tensors([_drawn(tensor, generator) for tensor in call.tensors])
        if (results := _results(drawn)) and all(t.numel() for t in (*drawn.tensors, *results)):
            found = Trial(drawn, results, generator)
            yield from (f"{drawn}: {text}" for check in _checks(drawn) if (text := check(found)))


def _checks(call: OperatorCall) -> Iterator[Callable[[Trial], str | None]]:
    """The claims about an operator, each as what is wrong with it."""
    name, its_class = name_of(call.operator), class_of(call.operator)
    if its_class in ("reshapes", "reorders", "takes", "joins", "writes") and not _adds(call):
        yield Trial.computes
    if its_class in ("reshapes", "reorders"):
        yield Trial.loses
    if its_class == "elementwise":
        yield Trial.minds_places
    if its_class == "creates":
        yield Trial.depends
    if linear_in(call.operator, len(call.tensors)):
        yield Trial.bends
    if name in operators.EXACT and its_class != "creates":
        yield Trial.rounds
    if name in operators.SHOWS | operators.KEEPS | operators.KEEPS_FIRST:
        yield Trial.hides
    if not may_lose(call.operator, "n>n") and "dtype" not in call.kwargs and not _adds(call) and _takes_few_bits(call):
        yield Trial.grows
    if name in operators.VARYING:
        yield Trial.varies_wrongly


class Trial:
    """One call, and what it gives."""

    def __init__(self, call: OperatorCall, results: Tensors, generator: torch.Generator):
        self.call, self.results, self.generator = call, results, generator
        self.tensors = call.tensors

    def _with(self, tensors: Iterable[torch.Tensor]) -> Tensors | None:
        return _results(self.call.with_tensors(tensors))

    # ------------------------------------------------------------------ classes
    def computes(self) -> str | None:
        known = torch.cat([_numbers(self.tensors), _arguments(self.call)])
        made = _numbers(filter(_is_float, self.results))
        return None if bool(torch.isin(made, known).all()) else "a number of its result is none of its operands"

    def loses(self) -> str | None:
        if not _is_float(self.tensors[0]) or not _is_float(self.results[0]):
            return None
        kept = torch.isin(_numbers(self.tensors[:1]), _numbers(self.results))
        return None if bool(kept.all()) else "an element of its operand is not in its result"

    def minds_places(self) -> str | None:
        """Elementwise: where the elements of all operands change places, those of the result do."""
        shape = self.results[0].shape
        try:
            spread = [tensor.expand(shape).reshape(-1) for tensor in self.tensors]
        except RuntimeError:
            return "its operands do not have the shape of its result"
        order = torch.randperm(shape.numel(), generator=self.generator)
        moved = self._with([tensor[order].reshape(shape) for tensor in spread])
        same = moved is None or _close(moved[:1], [self.results[0].reshape(-1)[order].reshape(shape)])
        return None if same else "elements in other places give other numbers"

    def depends(self) -> str | None:
        other = self._with([~tensor if tensor.dtype == torch.bool else tensor + 1 for tensor in self.tensors])
        return None if other is None or _close(self.results, other) else "its result depends on numbers of an operand"

    # ------------------------------------------------------------------ what else is said
    def bends(self) -> str | None:
        """Linear: f(a x + b y) = a f(x) + b f(y), x and y being all operands of a set."""
        for group in linear_in(self.call.operator, len(self.tensors)):
            chosen = [self.tensors[each] for each in group]
            if not all(map(_is_float, (*chosen, *self.results))) or _adds_a_number(self.call):
                continue
            other = [_random(t, self.generator) if n in group else t for n, t in enumerate(self.tensors)]
            mixed = [2.5 * t - 1.5 * other[n] if n in group else t for n, t in enumerate(self.tensors)]
            one, both = self._with(other), self._with(mixed)
            if one and both and not _close(both, [2.5 * x - 1.5 * y for x, y in zip(self.results, one, strict=True)]):
                return f"it is not linear in its operands {sorted(group)}"
        return None

    def rounds(self) -> str | None:
        made = _numbers(filter(_is_float, self.results))
        known = torch.cat([_numbers(self.tensors), _arguments(self.call)])
        exact = torch.isin(made.abs(), known.abs()) | (made == made.round())
        return None if bool(exact.all()) else "a number of its result is rounded"

    def hides(self) -> str | None:
        if not _is_float(self.results[0]) or 0 in (self.call.kwargs.get("alpha"), self.call.kwargs.get("beta")):
            return None
        for number, tensor in enumerate(self.tensors):
            if any(tensor is written for written in tensors_in(self.call.kwargs.get("out"))):
                continue
            places = torch.randperm(tensor.numel(), generator=self.generator)[:PLACES] if _is_float(tensor) else ()
            for place, each in product(places, _shown_of(name_of(self.call.operator), number)):
                undefined = tensor.flatten().index_fill(0, place, each).reshape(tensor.shape)
                found = self._with([undefined if n == number else t for n, t in enumerate(self.tensors)])
                if found and bool(found[0].isfinite().all()):
                    return f"it hides an element of operand {number} that is {each}"
        return None

    def grows(self) -> str | None:
        """Of numbers of 8 bits it makes such numbers, where nothing else is said."""
        ends = self._with([torch.where(t > 0, 127, -128) if t.is_floating_point() else t for t in self.tensors])
        made = _numbers(result for result in ends or () if not _is_float(result))
        return "numbers of 8 bits give others that do not fit" if bool(((made < -128) | (made > 127)).any()) else None

    def varies_wrongly(self) -> str | None:
        """Described at once for two ranks with different numbers, it is what torch computes with each of them."""
        call, places = self.call, operators.VARYING[name_of(self.call.operator)]
        places = tuple(place for place in places if place < len(call.args) and type(call.args[place]) is int)
        for step in (1, -1) if places else ():
            other = OperatorCall(
                call.operator, tuple(a + step if n in places else a for n, a in enumerate(call.args)), call.kwargs
            )
            runs = [execute(call), execute(other)]
            shapes = {tuple(result.shape for result in run[2]) for run in runs if run is not None}
            if None not in runs and len(shapes) == 1 and not _described(runs, places):
                return f"it is not what is described where ranks differ in arguments {list(places)}"
        return None


def _shown_of(name: str, operand: int) -> tuple[float, ...]:
    """What is no number, and is said to be seen in the result of an operator."""
    infinite = name in operators.KEEPS or (name in operators.KEEPS_FIRST and operand == 0)
    return (math.nan,) * (name in operators.SHOWS) + (math.inf, -math.inf) * infinite


def _described(runs: Sequence[Any], places: Sequence[int]) -> bool:
    """Whether one description is right in each of its lanes; or there is none."""
    (node, given, _), table = runs[0], Table()
    values = {t: Interpreter(table, all_lemmas()).input(str(t.id), described_shape(t)) for t in given}
    args = [values[arg] if type(arg).__name__ == "Value" else arg for arg in node.args]
    for place in places:
        args[place] = collapse(np.array([run[0].args[place] for run in runs], dtype=np.int64))
    try:
        said = known.describe(table, node, tuple(args), dict(node.kwargs))
    except Undescribed:
        return True
    assert said is not None
    evaluator = Evaluator(table, {str(t.id): as_array(tensor) for t, tensor in given.items()}, {})
    return all(
        np.allclose(evaluator.value(said[0], lane), as_array(run[2][0]), rtol=TOLERANCE, atol=TOLERANCE)
        for lane, run in enumerate(runs)
    )


# ---------------------------------------------------------------------- tensors
def _results(call: OperatorCall) -> Tensors | None:
    executed = execute(call)
    return None if executed is None else [result.resolve_conj().resolve_neg() for result in executed[2]]


def _is_float(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _random(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


def _drawn(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other floats, no two of them alike, and none negative unless some were."""
    if not _is_float(tensor):
        return tensor
    drawn = _random(tensor, generator)
    return drawn if tensor.is_complex() or bool((tensor < 0).any()) else drawn.abs() + 0.1


def _numbers(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(part.reshape(-1).double() for part in parts)])


def _arguments(call: OperatorCall) -> torch.Tensor:
    """The numbers that are arguments, and zero."""
    lists = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in (*call.args, *call.kwargs.values())]
    numbers = [float(each) for arg in lists for each in arg if isinstance(each, (int, float))]
    return torch.tensor([0.0, *numbers], dtype=torch.float64)


def _adds(call: OperatorCall) -> bool:
    return "index_put" in call.operator and True in (*call.args[3:], call.kwargs.get("accumulate"))


def _takes_few_bits(call: OperatorCall) -> bool:
    """Whether a row answers for narrow whole numbers, here for those in place of floats alone: `n % 0` ends the process."""
    row = known.lookup(call.operator)
    signatures = audited().get(row.operator, ()) if row is not None and all(map(_is_float, call.tensors)) else ()
    return any("n" in signature.rpartition(">")[2] for signature in signatures)


def _adds_a_number(call: OperatorCall) -> bool:
    """Whether there is a number where a tensor of the sum could be: `x + 2`."""
    missing = {each for group in linear_in(call.operator, 3) for each in group} - set(range(len(call.tensors)))
    return any(place < len(call.args) and isinstance(call.args[place], (int, float)) for place in missing)


def _close(ones: Tensors, others: Tensors) -> bool:
    pairs = zip(map(as_array, ones), map(as_array, others), strict=True)
    return all(np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True) for a, b in pairs)
