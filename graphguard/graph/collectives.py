"""What every operator of the `dist` namespace is: one row each, from which the other tables follow.

A row says what a rank reads and fills, which arguments it needs and how its memory must lie; how ranks must agree follows. What
an operator computes is said three times, each time anew: in descriptions (engine/ranks/collective_call.py), in tensors
(oracle/collectives.py) and in lines of a script (counterexample/collective_code.py), registered by the row's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TypeVar

WAIT, NEW_GROUP = "dist.wait", "dist.new_group"  # they move no tensors: they have no row
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")  # in torch's order


class Count(Enum):
    """How many tensors a rank gives, or gets: at least, and at most."""

    NONE = (0, 0)
    ONE = (1, 1)
    PER_RANK = (1, None)  # one for each rank of the group
    PER_RANK_AT_ROOT = (0, None)  # the same on the root, none elsewhere

    def __init__(self, least: int, most: int | None):
        self.least, self.most, self.is_list = least, most, most is None


class Share(Enum):
    """How much of one tensor, where a rank reads one and fills one, is another rank's."""

    WHOLE = "whole"  # what is read and what is filled are alike, element by element
    GATHERED = "gathered"  # what is filled is one part from each rank
    SCATTERED = "scattered"  # what is read is one part for each rank
    SPLIT = "split"  # both, in as many rows as the arguments say


@dataclass(frozen=True)
class Collective:
    """One operator.

    needs: the arguments that it must have, beside its group: "reduce", "root", "peer", "tag", "input_splits", "output_splits".
    contiguous: of "reads" and "fills", those whose memory must be in row-major order: backends disagree on, or refuse, strided
        ones. Where there is none, the elements only need to lie alike on all ranks, without gaps.
    """

    name: str
    reads: Count
    fills: Count
    share: Share | None = None
    needs: tuple[str, ...] = ()
    contiguous: tuple[str, ...] = ()

    @property
    def rooted(self) -> bool:
        return "root" in self.needs

    @cached_property
    def is_message(self) -> bool:
        """Whether it is from one rank to another: the group only says where the two are."""
        return "peer" in self.needs

    @cached_property
    def pairwise(self) -> bool:
        """Whether a rank must be compared with every other: what one sends is what the other expects. Where all do the same,
        to agree with one is to agree with all."""
        return self.is_message or self.reads.is_list or self.fills.is_list or self.share is Share.SPLIT


_NONE, _ONE, _PER_RANK, _AT_ROOT = Count
_WHOLE, _GATHERED, _SCATTERED, _SPLIT = Share
_BOTH = ("reads", "fills")
COLLECTIVES: dict[str, Collective] = {
    row.name: row
    for row in (
        Collective("dist.all_reduce", _ONE, _ONE, _WHOLE, ("reduce",)),
        Collective("dist.reduce", _ONE, _ONE, _WHOLE, ("root", "reduce")),
        Collective("dist.broadcast", _ONE, _ONE, _WHOLE, ("root",)),
        Collective("dist.all_gather", _ONE, _PER_RANK, contiguous=("reads",)),
        Collective("dist.all_gather_into_tensor", _ONE, _ONE, _GATHERED, contiguous=_BOTH),
        Collective("dist.reduce_scatter", _PER_RANK, _ONE, needs=("reduce",), contiguous=("fills",)),
        Collective("dist.reduce_scatter_tensor", _ONE, _ONE, _SCATTERED, ("reduce",), _BOTH),
        Collective("dist.all_to_all", _PER_RANK, _PER_RANK, contiguous=_BOTH),
        Collective("dist.all_to_all_single", _ONE, _ONE, _SPLIT, ("output_splits", "input_splits"), _BOTH),
        Collective("dist.gather", _ONE, _AT_ROOT, needs=("root",), contiguous=_BOTH),
        Collective("dist.scatter", _AT_ROOT, _ONE, needs=("root",), contiguous=_BOTH),
        Collective("dist.send", _ONE, _NONE, needs=("peer", "tag")),
        Collective("dist.recv", _NONE, _ONE, needs=("peer", "tag")),
        Collective("dist.barrier", _NONE, _NONE),
    )
}
MESSAGES = tuple(name for name, row in COLLECTIVES.items() if row.is_message)


def of_share(share: Share) -> frozenset[str]:
    """The operators of one tensor that is shared in a way."""
    return frozenset(name for name, row in COLLECTIVES.items() if row.share is share)


Meaning = TypeVar("Meaning", bound=Callable[..., object])


class Meanings(dict[str, Meaning]):
    """What collectives mean in one room, by the name of their row."""

    def of(self, *names: str) -> Callable[[Meaning], Meaning]:
        """Registers a function as the meaning of rows that have none yet."""

        def register(meaning: Meaning) -> Meaning:
            for name in names:
                if name not in COLLECTIVES or name in self:
                    raise ValueError(f"{name} is no collective without a meaning")
                self[name] = meaning
            return meaning

        return register
