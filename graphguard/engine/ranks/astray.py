"""How far a class of ranks has come with what is no part of any tensor of the sequential program.

Past a fault nothing that the ranks compute is known to the sequential program: no sum is found again, and every operation makes
a larger description of larger ones. Of a program that is right, what is related to nothing (the shift of a softmax, a partial
maximum) is soon part of something that is. So the work is counted along each way from what was last related, and after too
much of it the way is not followed any further. It only leaves descriptions out, which is always sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from graphguard.engine.store.table import Table
from graphguard.engine.terms.unknown import Described, Unknown
from graphguard.graph.ir import Node
from graphguard.graph.ir import Value as Tensor

REASON = "what it is made from is no part of any sequential tensor, and was not followed further"
_LITTLE = 8  # this part of the limit is not worth the question whether something is related


class Astray:
    """classes: how many there are of ranks. What goes around a ring meets all of them before it is whole.
    is_related: whether a value of these ranks is a part, or a multiple, of a sequential tensor."""

    def __init__(self, table: Table, classes: int, is_related: Callable[[Described], bool]):
        self._table, self._classes, self._is_related = table, classes, is_related
        self._behind: dict[Tensor, int] = {}  # the work since what was last related

    def behind(self, tensors: Iterable[Tensor]) -> int:
        """The work on the longest way to some tensors."""
        return max((self._behind.get(tensor, 0) for tensor in tensors), default=0)

    def checked(self, node: Node, results: Sequence[Described], work: int) -> list[Described]:
        """The results of an operation; those that lead too far away are not known. work: on the longest way to them."""
        return [self._checked(node, *each, work) for each in zip(node.outputs, results, strict=False)]

    def _checked(self, node: Node, tensor: Tensor, result: Described, work: int) -> Described:
        if not work or isinstance(result, Unknown):
            return result
        for_each = work // self._classes
        most = self._table.stops.allowed("astray", for_each)
        if for_each > most // _LITTLE:
            if self._asked(result):
                return result
            if for_each > most:
                self._table.over("astray", for_each)  # which is told
                return Unknown(REASON, node)
        self._behind[tensor] = work
        return result

    def _asked(self, result: Described) -> bool:
        """A question of ours, which is no work of the ranks and needs nothing of them."""
        work, needs = self._table.work, self._table.needs.count()
        try:
            return self._is_related(result)
        finally:
            self._table.work = work
            self._table.needs.forget_since(needs)
