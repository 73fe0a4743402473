"""What the engine claims about every tensor, against what the tensors held in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphguard.engine.interpret import Interpretation
from graphguard.engine.numeric.evaluator import Array, Evaluator, Malformed, TooLarge, Unlearned
from graphguard.engine.terms.term import Value
from graphguard.engine.terms.unknown import Environment, Unknown
from graphguard.graph.ir import Graph, Node
from graphguard.graph.ir import Value as Tensor

TOLERANCE = 1e-7
Held = Mapping[Tensor, Array]  # what the tensors of one graph held


@dataclass(frozen=True)
class Wrong:
    """A tensor that is not what its description says. `rank` is None for the sequential program.

    rounded: what it is made from is only nearly what its descriptions say, so that rounding may be all there is to it.
    undefined: it holds nan or an infinity there. said_undefined: its description does.
    """

    tensor: Tensor
    node: Node | None
    rank: int | None
    difference: float
    reason: str
    rounded: bool = False
    undefined: bool = False
    said_undefined: bool = False

    def __str__(self) -> str:
        where = "sequential" if self.rank is None else f"rank {self.rank}"
        return f"{where}: {self.node or f'input or constant {self.tensor}'}: {self.reason}"


@dataclass
class Audit:
    """How many claims were compared, which are wrong, and what could not be evaluated, by reason."""

    wrong: list[Wrong] = field(default_factory=list)
    compared: int = 0
    undescribed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)


def audit(
    found: Interpretation,
    sequential: tuple[Graph, Held],
    ranks: Sequence[tuple[Graph, Held]],
    inputs: Mapping[str, Array],
    constants: Mapping[Any, Array],
) -> Audit:
    """Compare every description with what a run on the given inputs held."""
    auditor = _Auditor(Evaluator(found.table, inputs, constants))
    for stream, environment in found.streams:  # what an input is part of is known from the inputs alone
        for lane, rank in enumerate(stream.members):
            graph, held = ranks[rank]
            for mine, its in zip(stream.graph.inputs.values(), graph.inputs.values(), strict=True):
                auditor.learn(environment.get(mine), lane, held.get(its))
    auditor.check(sequential[0], sequential[0], found.sequential, sequential[1], 0, None)
    for stream, environment in found.streams:
        for lane, rank in enumerate(stream.members):
            auditor.check(stream.graph, ranks[rank][0], environment, ranks[rank][1], lane, rank)
    return auditor.result


class _Auditor:
    def __init__(self, evaluator: Evaluator):
        self.evaluator, self.result = evaluator, Audit()
        self.exact: set[Tensor] = set()  # tensors that hold to the last bit what they are described as

    def learn(self, described: Any, lane: int, held: Array | None) -> None:
        if isinstance(described, Value) and held is not None:
            self.evaluator.learn(described, lane, held)

    def check(self, first: Graph, graph: Graph, environment: Environment, held: Held, lane: int, rank: int | None) -> None:
        """One rank. Its descriptions are filed under the tensors of the first rank of its class."""
        makers = {tensor: node for node in graph.nodes for tensor in node.outputs}
        for described, tensor in zip(first.values(), graph.values(), strict=True):
            claim = environment.get(described)
            if claim is None or isinstance(claim, Unknown):
                self.result.undescribed += 1
            elif tensor in held:
                self._compare(claim, tensor, makers.get(tensor), held[tensor], lane, rank)

    def _compare(self, claim: Value, tensor: Tensor, node: Node | None, held: Array, lane: int, rank: int | None) -> None:
        try:
            self.evaluator.learn(claim, lane, held)
            said = self.evaluator.value(claim, lane)
        except Malformed as error:
            self.result.wrong.append(Wrong(tensor, node, rank, float("inf"), f"malformed: {error}"))
            return
        except (Unlearned, TooLarge) as error:
            reason = f"{type(error).__name__} {error}".strip()
            self.result.skipped[reason] = self.result.skipped.get(reason, 0) + 1
            return
        self.result.compared += 1
        if said.shape != held.shape:
            self.result.wrong.append(Wrong(tensor, node, rank, float("inf"), f"described as {said.shape}, not {held.shape}"))
            return
        difference = _difference(said, held)
        if not difference.any():
            self.exact.add(tensor)
        elif difference.max() > TOLERANCE:
            place = np.unravel_index(int(difference.argmax()), difference.shape)
            reason = f"{held[place]:.9g} at {tuple(map(int, place))} is described as {said[place]:.9g}"
            rounded = node is not None and any(operand not in self.exact for operand in node.operands())
            undefined = [not bool(np.isfinite(each[place])) for each in (held, said)]
            self.result.wrong.append(Wrong(tensor, node, rank, float(difference.max()), reason, rounded, *undefined))


def _difference(a: Array, b: Array) -> Array:
    """Elementwise, relative to the larger of 1 and the largest finite element; infinities and NaNs equal themselves."""
    finite = np.isfinite(b)
    size = max(1.0, float(np.abs(b[finite]).max(initial=0.0)))
    with np.errstate(all="ignore"):
        apart = np.abs(a - b) / size
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))
