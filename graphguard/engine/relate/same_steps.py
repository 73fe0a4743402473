"""Where the ranks do with what may be undefined just what the sequential program does with it.

`torch.where(x != 0, y / x, 0)` is defined where the quotient is not, and so is `(y / scale).round().clamp(-8, 7)`. No algebra
holds of what is no number. But if the ranks take the same operations of the same elements, they get the same, number or not.
Once they hold what an output of the sequential program shows, it is a number wherever that program is defined. So what may be
undefined is followed, operation by operation, up to there. Each step is a function of which nothing is known but its name: it
is the same atom on both sides if it is the same function of the same elements, and only then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphguard.engine.algebra.function import apply
from graphguard.engine.interpret import Interpretation, Interpreter, arguments, bound, leaves
from graphguard.engine.relate.needs import Needs
from graphguard.engine.store.places import Places, place_of
from graphguard.engine.terms.term import ONE, Term, Undescribed, Value
from graphguard.engine.terms.unknown import Described, Environment
from graphguard.graph.exposure import Exposure, Shown
from graphguard.graph.ir import Graph, Node
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.operators import ELEMENTWISE, REORDERS, RESHAPES, TAKES, name_of
from graphguard.graph.rank_class import RankClass

_BY_ELEMENT = ELEMENTWISE | {"where", "masked_fill", "_to_copy"}
_MOVES = (RESHAPES | REORDERS | TAKES) - {"_to_copy"}

Steps = dict[Tensor, Value | None]
"""What may be undefined, as the steps that made it; None where they cannot be told."""


class SameSteps:
    def __init__(self, found: Interpretation, sequential: Graph, unmet: Collection[Node]):
        """`unmet`: operations of the ranks that may be undefined."""
        self._interpreter, self._needs = Interpreter(found.table, found.lemmas), Needs(found.table)
        self._shown: dict[int, Places] = defaultdict(Places)  # of the steps up to what an output shows, by their atoms
        count = found.table.needs.count()
        self._follow_sequential(sequential, found.sequential, {name_of(node.op) for node in unmet})
        self._same: set[Node] = set()
        for held, environment in found.streams if self._shown else ():
            self._follow_ranks(held, environment, unmet)
        found.table.needs.forget_since(count)

    def are_taken_from(self, node: Node) -> bool:
        """Whether all that is made of an operation's result is the same on both sides, up to what is shown."""
        return node in self._same

    # ------------------------------------------------------------------ both programs
    def _follow_sequential(self, graph: Graph, environment: Environment, seeds: Collection[str]) -> None:
        exposure, steps = Exposure(graph), Steps()
        for node in graph.nodes:
            follows = any(tensor in steps for tensor in node.operands())
            if not follows and not (name_of(node.op) in seeds and self._may_be_undefined(node, environment)):
                continue
            made = self._made(node, node.args, dict(node.kwargs), environment, steps, 1)
            if exposure.of(node) < Shown.ALL:
                steps |= zip(node.outputs, made, strict=False)
                continue
            for term in _terms(made):
                place = place_of(term.factors[0].at, term.ranges)
                if place is not None:
                    self._shown[term.factors[0].atom.id].note(place)

    def _may_be_undefined(self, node: Node, environment: Environment) -> bool:
        """Whether an operation of the sequential program would be, if only the ranks did it."""
        table = self._interpreter.table
        before = table.needs.count()
        self._interpreter.describe(node, *bound((node.args, dict(node.kwargs)), environment), 1)
        return any(True for _ in self._needs.unmet(table.needs.since(before)))

    def _follow_ranks(self, held: RankClass, environment: Environment, unmet: Collection[Node]) -> None:
        graph, steps = held.graph, Steps()
        reached: list[Node] = []
        for node in graph.nodes:
            if node in unmet or any(tensor in steps for tensor in node.operands()):
                made = [] if node.communicates else self._made(node, *arguments(node), environment, steps, held.lanes)
                reached.append(node)
                if self._are_shown(made):
                    self._same.add(node)
                else:
                    steps |= dict.fromkeys(node.outputs) | dict(zip(node.outputs, made, strict=False))
        used = defaultdict[Tensor, list[Node]](list)
        for node in reached:
            for tensor in set(node.operands()):
                used[tensor].append(node)
        returned = set(graph.outputs.values())
        for node in reversed(reached):
            uses = [use for tensor in node.outputs for use in used[tensor]]
            if uses and self._same.issuperset(uses) and returned.isdisjoint(node.outputs):
                self._same.add(node)

    def _are_shown(self, made: Sequence[Value | None]) -> bool:
        return bool(made) and all(value is not None and all(map(self._is_shown, value.terms)) for value in made)

    def _is_shown(self, term: Term) -> bool:
        if not _is_step(term) or term.factors[0].atom.id not in self._shown:
            return False
        return self._shown[term.factors[0].atom.id].covers(term.factors[0].at, term.ranges)

    # ------------------------------------------------------------------ one step
    def _made(
        self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], environment: Environment, steps: Steps, lanes: int
    ) -> list[Value | None]:
        """The results of an operation as steps, given those of its operands."""
        known: Mapping[Tensor, Described | None] = {
            tensor: steps[tensor] if tensor in steps else environment.get(tensor) for tensor in node.operands()
        }
        nothing: list[Value | None] = [None] * len(node.outputs)
        if not all(isinstance(value, Value) for value in known.values()) or _is_complex(node):
            return nothing
        name = name_of(node.op)
        try:
            if name in _BY_ELEMENT and len(node.outputs) == 1:
                return [self._by_element(node, (args, kwargs), known)]
            if name in _MOVES:
                given, named = bound((args, kwargs), known)
                made = self._interpreter.describe(node, given, named, lanes)
                return [value if isinstance(value, Value) else None for value in made]
        except Undescribed:
            pass
        return nothing

    def _by_element(self, node: Node, given: tuple[Any, ...], known: Mapping[Tensor, Any]) -> Value:
        args, kwargs = given
        written = {key.partition(".")[0] for key in node.writes}
        all_args = [*leaves(args), *(leaf for key, arg in kwargs.items() if key not in written for leaf in (key, *leaves(arg)))]
        if any(isinstance(arg, np.ndarray) for arg in all_args):
            raise Undescribed("a number that differs between ranks")
        words = tuple(arg.dtype if isinstance(arg, Tensor) else repr(arg) for arg in all_args)
        operands = [known[arg] for arg in all_args if isinstance(arg, Tensor)]
        values = [self._interpreter.ops.expand(value, node.outputs[0].shape) for value in operands]
        return apply(self._interpreter.table, f"same {name_of(node.op)}", values, (words, node.outputs[0].dtype))


def _terms(made: Sequence[Value | None]) -> Iterator[Term]:
    return (term for value in made if value is not None for term in value.terms if _is_step(term))


def _is_step(term: Term) -> bool:
    """Whether a term is one element of one atom, and nothing else."""
    return term.coefficient == ONE and len(term.factors) == 1 and term.factors[0].power == ONE and not term.summed


def _is_complex(node: Node) -> bool:
    return any(tensor.dtype.startswith("complex") for tensor in (*node.operands(), *node.outputs))
