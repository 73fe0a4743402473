"""Elements of whole-number inputs that index in the sequential program: of the numbers that are drawn for them, those on which
it is defined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch

from graphguard.aten.operators import DTYPES
from graphguard.engine.interpret import Interpreter
from graphguard.engine.store.places import Run
from graphguard.engine.store.ranges import Numbers, Ranges, common, declared_span
from graphguard.engine.store.table import Table
from graphguard.graph.ir import Graph, Value
from graphguard.graph.labels import may_be_ignored
from graphguard.lemmas.known import all_lemmas
from graphguard.oracle.draws import Bound, Given

_Box = tuple[Run, ...]
_SHARE = 4  # one in so many is a number apart from the others, such as the label that is ignored


class IndexedPart(NamedTuple):
    """Elements of an input, and the numbers that they may be."""

    at: tuple[slice, ...]
    numbers: Numbers

    def choices(self) -> torch.Tensor:
        spans = [torch.arange(low, high).repeat(times) for low, high, times in self._often()]
        return torch.cat(spans)

    def _often(self) -> list[tuple[int, int, int]]:
        """The spans, the longest first; those of one number are repeated."""
        longest = max(high - low for low, high in self.numbers)
        order = sorted(self.numbers, key=lambda span: span[0] - span[1])
        return [(low, high, max(1, longest // _SHARE) if high - low == 1 else 1) for low, high in order]

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        choices = self.choices()
        result = tensor.clone()
        result[self.at] = choices[tensor[self.at].long() % len(choices)].to(tensor.dtype)
        return result

    def line(self, name: str, dtype: str) -> str:
        spans = [f"torch.arange({low}, {high})" + (f".repeat({n})" if n > 1 else "") for low, high, n in self._often()]
        choices = spans[0] if len(spans) == 1 else f"torch.cat([{', '.join(spans)}])"
        part = f"{name}[{', '.join(map(_slice, self.at))}]" if self.at else f"{name}[...]"
        return f"{part} = {choices}[{part}.long() % {len(self.choices())}].to({DTYPES[dtype]})"


def _slice(at: slice) -> str:
    first, stop = at.start or "", at.stop
    return f"{first}:{stop}" + (f":{at.step}" if at.step not in (None, 1) else "")


@dataclass(frozen=True)
class Placed:
    """An input as it is drawn, with the elements that index among the numbers that they may be."""

    draw: Given
    parts: tuple[IndexedPart, ...]
    dtype: str

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        tensor = self.draw.tensor(generator)
        for part in self.parts:
            tensor = part.placed(tensor)
        return tensor

    def lines(self, name: str) -> list[str]:
        return [*self.draw.lines(name), *(part.line(name, self.dtype) for part in self.parts)]


@dataclass(frozen=True)
class Indexed:
    """What the whole-number inputs of a program may be, so that it is defined."""

    bounds: Mapping[str, tuple[Bound, Bound]]  # of all elements, to draw from
    parts: Mapping[str, tuple[IndexedPart, ...]]

    def placed(self, sequential: Graph, draws: Mapping[str, Given]) -> dict[str, Given]:
        found = {name: self.parts.get(name, ()) for name in draws}
        return {
            name: Placed(draw, found[name], sequential.inputs[name].dtype) if found[name] else draw
            for name, draw in draws.items()
        }


def indexed(sequential: Graph, bounds: Mapping[str, tuple[Bound, Bound]], ranks: Sequence[Graph]) -> Indexed:
    """The bounds that were stated, and what the sequential program indexes with which elements."""
    whole = {name: value for name, value in sequential.inputs.items() if is_whole(value)}
    if not whole:
        return Indexed(bounds, {})
    table = Table()
    table.ignores_by_default = may_be_ignored(ranks)
    interpreter = Interpreter(table, all_lemmas())
    part = _of_integers(sequential)
    inputs = {name: interpreter.input(name, value.shape) for name, value in part.inputs.items()}
    for name in whole:
        low, high = (
            None if bound is None or not math.isfinite(bound) else math.ceil(bound) for bound in bounds.get(name, (None, None))
        )
        for term in inputs[name].terms if (low, high) != (None, None) else ():
            table.facts.declare(term.factors[0].atom, *declared_span(low, high))
    interpreter.run_sequential(part, inputs)
    atoms = {key: atom.id for (kind, key), atom in table.atoms() if kind == "input"}
    known = {name: table.facts.ranges().get(atoms[name], Ranges()) for name in whole if name in atoms}
    parts = {name: parts_of(ranges) for name, ranges in known.items()}
    result = dict(bounds)
    for name, ranges in known.items():
        if bounds.get(name, (None, None)) == (None, None) and parts[name] and ranges.covers(whole[name].shape):
            result[name] = (0, max(len(each.choices()) for each in parts[name]))
    return Indexed(
        result, {name: tuple(p for p in found if not _is_drawn(p, result.get(name))) for name, found in parts.items()}
    )


def _is_drawn(part: IndexedPart, bounds: tuple[Bound, Bound] | None) -> bool:
    """Whether all numbers between the bounds are allowed, and all of those are drawn."""
    low, high = bounds or (None, None)
    return low is not None and high is not None and part.numbers == ((math.ceil(low), math.ceil(high)),)


def parts_of(ranges: Ranges) -> tuple[IndexedPart, ...]:
    """What is known of some elements, the more special last."""
    boxes = [(box, numbers) for numbers, places in ranges.inferred.items() for box in places.boxes]
    both = [(_intersection(a, b), common(its, other)) for (a, its), (b, other) in combinations(boxes, 2)]
    boxes += [(box, numbers) for box, numbers in both if box is not None]
    known = [(box, numbers if ranges.declared is None else common(numbers, ranges.declared)) for box, numbers in boxes]
    return tuple(
        IndexedPart(tuple(slice(r.first, r.last + 1, r.step) for r in box), numbers) for box, numbers in known if numbers
    )


def lie_inside(tensor: torch.Tensor, ranges: Ranges) -> bool:
    """Whether all elements are among the numbers that they are declared or taken to be."""
    boxes = [(box, numbers) for numbers, places in ranges.inferred.items() for box in places.boxes]
    parts = [(tensor[tuple(slice(r.first, r.last + 1, r.step) for r in box)], numbers) for box, numbers in boxes]
    parts += [] if ranges.declared is None else [(tensor, ranges.declared)]
    return all(
        bool(torch.stack([(part >= low) & (part < high) for low, high in numbers]).any(0).all()) for part, numbers in parts
    )


def _intersection(a: _Box, b: _Box) -> _Box | None:
    runs = [Run(max(x.first, y.first), min(x.last, y.last)) for x, y in zip(a, b, strict=True)]
    plain = all(run.step == 1 for run in (*a, *b))
    return tuple(runs) if plain and all(run.first <= run.last for run in runs) else None


def _of_integers(sequential: Graph) -> Graph:
    """The operations that use whole numbers made from inputs; what else they use is given to them."""
    inputs = {name: value for name, value in sequential.inputs.items() if is_whole(value)}
    part = Graph("what is indexed", inputs=dict(inputs), constants=sequential.constants)
    whole = set(inputs.values())
    known = whole | set(sequential.constants)
    for node in sequential.nodes:
        if not any(value in whole for value in node.operands()):
            continue
        for value in node.operands():
            if value not in known:
                part.inputs[f"%{value.id}"] = value
                known.add(value)
        part.nodes.append(node)
        known.update(node.outputs)
        whole.update(value for value in node.outputs if is_whole(value) or value.dtype == "bool")
    return part


def is_whole(value: Value) -> bool:
    kind = DTYPES[value.dtype]
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
