"""A counterexample as a script that needs torch alone: both graphs written out, collectives as arithmetic, then an assert.

Only what the wrong element depends on is written.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence

from graphguard.aten.operators import BUILT_IN
from graphguard.counterexample.collective_code import exchanged
from graphguard.counterexample.operator_code import HELPERS, Constants, Names, lines_of
from graphguard.graph.ancestry import needed_alone, needed_of_ranks
from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.matching import Joint, Match
from graphguard.graph.placement import Partial, Placements
from graphguard.oracle import mixture
from graphguard.oracle.difference import Element
from graphguard.oracle.draws import Draw
from graphguard.oracle.grid import Grid
from graphguard.oracle.indexed import Placed
from graphguard.oracle.trial import Trial
from graphguard.relation.expectation import FULL, LOCAL, Expectation

_REDUCED: dict[str, Callable[[list[str]], str]] = {
    "sum": lambda items: f"({' + '.join(items)})",
    "avg": lambda items: f"({' + '.join(items)}) / {len(items)}",
    "max": lambda items: f"max({', '.join(items)})",
    "min": lambda items: f"min({', '.join(items)})",
}


_MIXTURES = {
    each.__name__: f"\n{inspect.getsource(each)}" for each in (mixture.mixed, mixture.mixed_whole, mixture.mixed_truth)
}


def script_of(
    sequential: Graph,
    joint: Joint,
    relations: Sequence[Graph],
    trial: Trial,
    element: Element,
    allowed: float,
    *,
    stated: Expectation | None = None,
    reduced: tuple[Grid, Placements] | None = None,
) -> str:
    """The text. `reduced` says over which ranks the numbers are reduced before they are compared."""
    return _Script(sequential, joint, relations, trial).text(element, allowed, stated, reduced)


def _of_users(code: str) -> list[str]:
    """A line for operators that torch does not have by itself."""
    named = dict.fromkeys(
        f"{space}::{name}" for space, name in re.findall(r"torch\.ops\.(\w+)\.(\w+)", code) if space not in BUILT_IN
    )
    return ["", f"# Import what defines {', '.join(named)} here."] if named else []


class _Script:
    def __init__(self, sequential: Graph, joint: Joint, relations: Sequence[Graph], trial: Trial):
        self.sequential, self.joint, self.relations, self.trial = sequential, joint, relations, trial
        self.constants = Constants()
        self.names: Names = {}
        self.body: list[str] = []

    def text(
        self, element: Element, allowed: float, stated: Expectation | None, reduced: tuple[Grid, Placements] | None
    ) -> str:
        self._inputs()
        whole = self.sequential.outputs[element.path]
        assert whole is not None
        self._section("the sequential program")
        self._alone(self.sequential, "s", [whole])
        ranks = [element.rank] if reduced is None else list(reduced[0].ranks)
        self._section("the ranks, in one process")
        self._ranks(ranks, element.path)
        self._section("the numbers that differ")
        self._verdict(whole, element, allowed, stated, reduced)
        head = [
            '"""Shows where two programs differ: the sequential one, and what the ranks of a distributed one compute.',
            "",
            "It needs torch alone: the captured operations are written out in float64, the ranks run in one process, and their",
            'communication is arithmetic. The assert at the end fails."""',
            "",
            "import torch",
            "",
            "torch.set_default_dtype(torch.float64)",
        ]
        used = "\n".join([*self.constants.lines, *self.body])
        helpers = [text for name, text in {**HELPERS, **_MIXTURES}.items() if f"{name}(" in used]
        return "\n".join([*head, *_of_users(used), *helpers, *self.constants.lines, *self.body]) + "\n"

    def _section(self, title: str) -> None:
        self.body += ["", f"# {title}"]

    def _inputs(self) -> None:
        self._section("inputs")
        if any(isinstance(draw, (Draw, Placed)) for draw in self.trial.draws.values()):
            self.body.append(f"g = torch.Generator().manual_seed({self.trial.seed})")
        for number, (name, draw) in enumerate(self.trial.draws.items()):
            first, *others = draw.lines(f"x{number}")
            self.body += [f"{first}  # {name}", *others]

    def _given(self, graph: Graph) -> None:
        """Name the sequential inputs of a graph."""
        numbers = {name: number for number, name in enumerate(self.trial.draws)}
        self.names |= {value: f"x{numbers[name]}" for name, value in graph.inputs.items() if value not in self.names}

    def _constants(self, graph: Graph, needed: set[Value]) -> None:
        self.names |= {value: self.constants.name(c) for value, c in graph.constants.items() if value in needed}

    # ------------------------------------------------------------------ graphs
    def _alone(self, graph: Graph, prefix: str, wanted: Sequence[Value]) -> None:
        """A graph that does not communicate, as far as some values need it."""
        self._given(graph)
        needed = needed_alone(graph, wanted)
        self._constants(graph, needed)
        for node in graph.nodes:
            if any(value in needed for value in node.outputs):
                self._write(node, prefix)

    def _write(self, node: Node, prefix: str) -> None:
        self.names |= {value: f"{prefix}{value.id}" for value in node.outputs}
        source = f"  # {node.source}" if node.source is not None else ""
        lines = lines_of(node, self.names, self.trial.outside.get(node))
        self.body += [*lines[:-1], lines[-1] + source]

    def _ranks(self, ranks: Sequence[int], path: str) -> None:
        wanted = {(rank, self.joint.graphs[rank].outputs[path]) for rank in ranks}
        _, needed = needed_of_ranks(self.joint, wanted)  # type: ignore[arg-type]
        for rank, graph in enumerate(self.joint.graphs):
            relation = self.relations[rank]
            inputs = {name: value for name, value in graph.inputs.items() if value in needed}
            if inputs:
                outputs = [relation.outputs[name] for name in inputs]
                self._alone(relation, f"i{rank}_", [value for value in outputs if value is not None])
                self.names |= {value: self.names[relation.outputs[name]] for name, value in inputs.items()}  # type: ignore[index]
            self._constants(graph, needed)
        self._play(needed)

    def _play(self, needed: set[Value]) -> None:
        """Write all ranks, each as far as its values are there."""
        pending = [[n for n in graph.nodes if any(v in needed for v in n.outputs)] for graph in self.joint.graphs]
        delivered: set[int] = set()
        while any(pending):
            for rank, nodes in enumerate(pending):
                left = []
                for node in nodes:
                    if node.communicates:
                        match = self.joint.match_of(rank, node)
                        if match.id not in delivered and self._is_ready(match):
                            delivered.add(match.id)
                            self._deliver(match, needed)
                        if match.id not in delivered:
                            left.append(node)
                    elif all(value in self.names for value in node.operands()):
                        self._write(node, f"r{rank}_")
                    else:
                        left.append(node)
                pending[rank] = left

    def _is_ready(self, match: Match) -> bool:
        return all(value in self.names for node in match.nodes.values() for value in node.operands())

    def _deliver(self, match: Match, needed: set[Value]) -> None:
        for rank, node in match.nodes.items():
            self.names |= {value: f"r{rank}_{value.id}" for value in node.outputs}
        lines = exchanged(match, self.names, needed)
        source = f"  # {match.op} at {match.any_node.source}"
        self.body += [lines[0] + source, *lines[1:]]

    # ------------------------------------------------------------------ the end
    def _verdict(
        self,
        whole: Value,
        element: Element,
        allowed: float,
        stated: Expectation | None,
        reduced: tuple[Grid, Placements] | None,
    ) -> None:
        expected, index = self.names[whole], element.index if element.within is None else element.within
        if stated is not None and stated.graphs is not None:
            graph = stated.graphs[element.rank]
            assert graph is not None
            local = graph.outputs[LOCAL]
            assert local is not None
            self.names[graph.inputs[FULL]] = expected
            self._alone(graph, "e", [local])
            expected = self.names[local]
        if reduced is not None:
            grid, placements = reduced
            lane = grid.ranks.index(element.rank)
            actual = self._reduced(element, grid, placements, lane, 0)
        else:
            actual = self._element(element.rank, element)
        beyond = element.shape is not None and element.expected != element.expected
        self.body += [
            f"expected = {_NOTHING if beyond else _at(expected, index)}",
            f"actual = {actual}",
            f"print({f'{element.path}: the sequential program has'!r}, expected, 'and rank {element.rank} has', actual)",
            f"assert abs(expected - actual) <= {allowed!r}, f'{{expected}} is not {{actual}}'",
        ]

    def _element(self, rank: int, element: Element) -> str:
        value = self.joint.graphs[rank].outputs[element.path]
        assert value is not None
        inside = len(element.index) == len(value.shape)
        if not inside or any(place >= size for place, size in zip(element.index, value.shape, strict=True)):
            return f"float('nan')  # {self.names[value]} has the shape {value.shape}"
        return _at(self.names[value], element.index)

    def _reduced(self, element: Element, grid: Grid, placements: Placements, lane: int, axis: int) -> str:
        """The numbers of the ranks, reduced over the axes from one on."""
        if axis == len(placements):
            return self._element(grid.ranks[lane], element)
        placement = placements[axis]
        if not isinstance(placement, Partial):
            return self._reduced(element, grid, placements, lane, axis + 1)
        items = [self._reduced(element, grid, placements, other, axis + 1) for other in grid.lanes_along(axis, lane)]
        return _REDUCED[placement.reduce](items)


_NOTHING = "float('nan')  # nothing is expected there"


def _at(name: str, index: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, index))}].item()" if index else f"{name}.item()"
