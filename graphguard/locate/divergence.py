"""Where the values of two programs part, told in the words of both: which operation, which lines, which numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphguard.graph.ir import Graph, Mesh, Node, Value
from graphguard.graph.matching import Joint
from graphguard.locate.clue import Clue, clues_at
from graphguard.locate.first_wrong import Suspect, Suspects
from graphguard.oracle.difference import Divergence, Element, Number
from graphguard.oracle.grid import Grid, cut
from graphguard.oracle.trial import Trial

_MOST_PLACEMENTS = 64


def parting_of(suspects: Suspects, element: Element, shown: Trial | None = None) -> Divergence | None:
    """The place on the way to a wrong element where values part; None if there is none to be found.

    shown: the trial whose numbers are told, if that is another one.
    """
    teller = _Teller(suspects.sequential, suspects.joint, shown or suspects.trial, suspects.mesh)
    suspect = suspects.first(element.path)
    return teller.at_the_end(suspects, element) if suspect is None else teller.at(suspects, suspect, element)


def clues_of(parting: Divergence) -> Iterator[Clue]:
    """The lines of a place where values part."""
    here = "known to the end" if parting.at_the_end else "values part here"
    yield from clues_at(here, [parting.distributed], parting.backward, parting.words)
    yield from clues_at(f"{here}: beside", [parting.beside], parting.backward)
    yield from clues_at(f"{here}: callers", parting.callers, parting.backward, fades=0.7)


class _Teller:
    def __init__(self, sequential: Graph, joint: Joint, shown: Trial, mesh: Mesh):
        self.sequential, self.joint, self.shown = sequential, joint, shown
        self.grid = Grid(mesh, tuple(range(mesh.size)))

    def at(self, suspects: Suspects, suspect: Suspect, element: Element) -> Divergence:
        """At an operation of a rank whose result the sequential program does not have."""
        node, before = suspect.node, suspects.counterpart(suspect)
        expected, actual = self._numbers(before.outputs[0], suspect) if before is not None and before.outputs else (None, None)
        if suspect.value is self.joint.graphs[element.rank].outputs[element.path] and suspect.rank == element.rank:
            expected, actual = _real(element.expected), _real(element.actual)
        return Divergence(
            operator=(before or node).op.removesuffix(".default"),
            sequential=None if before is None else before.source,
            distributed=suspects.own_lines.of(node.source),
            ranks=(suspect.rank,),
            expected=expected,
            actual=actual,
            backward=node.backward,
            words=suspects.words(suspect),
            beside=suspects.beside(suspect),
            callers=tuple(suspects.callers(suspect)),
        )

    def at_the_end(self, suspects: Suspects, element: Element) -> Divergence | None:
        """All numbers are known, to the end: what is wrong is how the output is held."""
        output, local = self.sequential.outputs[element.path], self.joint.graphs[element.rank].outputs[element.path]
        before, after = _maker(self.sequential, output), _maker(self.joint.graphs[element.rank], local)
        made = before or after
        if made is None:
            return None
        since = None if local is None else suspects.summand_since((element.rank, local))
        moved = None if local is None or after is None else suspects.before(Suspect(element.rank, after, local))
        return Divergence(
            operator=made.op.removesuffix(".default"),
            sequential=None if before is None else before.source,
            distributed=None if after is None else suspects.own_lines.of(after.source),
            ranks=(element.rank,),
            expected=_real(element.expected),
            actual=_real(element.actual),
            backward=after is not None and after.backward,
            beside=None if since is None else suspects.own_lines.of(since.source),
            callers=() if moved is None else (moved,),
            at_the_end=True,
        )

    def _numbers(self, made: Value, suspect: Suspect) -> tuple[float | None, float | None]:
        """One number of each of two tensors at the same place, where they differ most; none where the shapes do not fit."""
        mine, its = self.shown.sequential.values.get(made), self.shown.ranks[suspect.rank].values.get(suspect.value)
        if mine is None or its is None or mine.is_complex() or its.is_complex() or not its.numel():
            return None, None
        for placements in self.grid.candidates(mine.shape, sums=False)[:_MOST_PLACEMENTS]:
            part = cut(mine, self.grid.spans(mine.shape, placements, suspect.rank))
            if part.shape == its.shape:
                distance = (part.to(torch.float64) - its.to(torch.float64)).abs().nan_to_num(0.0)
                place = int(distance.reshape(-1).argmax())
                if not float(distance.reshape(-1)[place]):
                    return None, None
                return float(part.reshape(-1)[place]), float(its.reshape(-1)[place])
        return None, None


def _maker(graph: Graph, value: Value | None) -> Node | None:
    return next((node for node in graph.nodes if value in node.outputs), None)


def _real(number: Number) -> float | None:
    return None if isinstance(number, complex) else float(number)
