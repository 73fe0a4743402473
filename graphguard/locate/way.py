"""Where the ranks go wrong on the way to their outputs: the operation that is wrong first, and the lines on the way from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from graphguard.graph.ir import Source
from graphguard.graph.lines import OwnLines
from graphguard.graph.operators import name_of
from graphguard.locate.clue import Clue, clues_at
from graphguard.locate.difference import difference_of
from graphguard.locate.first_wrong import PASSED_OVER
from graphguard.locate.intended import Intended, Step, given_there, wants_of
from graphguard.locate.repair import Repairs, first_use
from graphguard.locate.rerun import At, Change, Edit


@dataclass(frozen=True)
class Way:
    """lines: of the operation that is wrong first, as far as that can be seen, and on the way from there.

    sure: its operands are right, and its result is not. before: lines between right tensors and those that it reads, if not.
    heals: with what the sequential program has in place of its result, which was tried, all outputs are right.
    """

    lines: tuple[Source, ...]
    before: tuple[Source, ...]
    sure: bool
    heals: bool
    backward: bool
    tried: Source  # the line whose result was put right
    inner: Source | None = None  # the line of the operation itself, where a function that both programs call has it
    words: str | None = None  # how the result differs from what it should be
    repeated: Source | None = None  # the line that reduces the result over ranks, where that gives a multiple of what it should

    def clues(self) -> Iterator[Clue]:
        lead = f"first wrong{', surely' if self.sure else ''}{', and healed there' if self.heals else ''}"
        yield from clues_at(lead, self.lines[:1], self.backward, self.words)
        yield from clues_at(f"{lead}: on the way from there", self.lines[1:], self.backward, fades=0.5)
        yield from clues_at("first wrong: before it", self.before, self.backward, fades=0.5)
        yield from clues_at("first wrong: inside", [self.inner], self.backward)
        yield from clues_at("reduced to a multiple", [self.repeated], self.backward)


def way_of(repairs: Repairs) -> Way | None:
    """None where nothing is found that should have been otherwise."""
    wanted = Intended(repairs.suspects, repairs.rerun)
    groups: dict[object, Group] = {}
    with torch.no_grad():
        for number, path in enumerate([path for path in repairs.wrong if path in repairs.ends], 1):
            if repairs.suspects.stops.over("wrong_outputs", number):
                break
            want = next(wants_of(wanted, repairs.rights[path]), None)
            fresh = set()
            for top in wanted.tops(dict(repairs.ends[path]), want) if want is not None else ():
                line = repairs.suspects.own_lines.of(top.node.source)
                if line is not None:
                    groups.setdefault(line.place, Group()).add(path, top)
                    fresh.add(line.place)
            for place in fresh:
                group = groups[place]
                if not group.tops[0].lost and repairs.heals(group.edit(wanted)) is False:
                    return _told(repairs, wanted, group.tops[0], True)
        if not groups:
            return None
        for group in groups.values():
            group.heals = group.tops[0].lost != () and repairs.heals(group.edit(wanted)) is False
        best = max(groups.values(), key=lambda group: (not group.tops[0].lost, group.heals, len(group.paths)))
        return _told(repairs, wanted, best.tops[0], best.heals)


@dataclass
class Group:
    """First wrong places that one line has."""

    tops: list[Step] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    heals: bool = False

    def add(self, path: str, top: Step) -> None:
        self.tops.append(top)
        self.paths.add(path)

    def edit(self, wanted: Intended) -> Edit:
        edit: dict[At, Change] = {}
        for top in self.tops:
            edit.update(given_there(wanted, top))
        return edit


def _told(repairs: Repairs, wanted: Intended, top: Step, heals: bool) -> Way:
    own_lines, suspects = repairs.suspects.own_lines, repairs.suspects
    here = own_lines.of(top.node.source)
    assert here is not None
    first = suspects.first_before(top.lost)
    before = [None if first is None else first.node, suspects.first_sum_before(top.lost)]
    lines: list[Source | None] = [here, *_after(top, own_lines)]
    reduction = _reduction(top)
    if reduction is not None and not top.lost and top.summed:
        lines.insert(0, own_lines.of(reduction.node.source))  # it does not sum what it should
    if top.node.backward:  # what arrives there comes of the line that uses the result
        scaled = not top.lost and top.is_multiple(wanted.held(top.lanes))
        lines.insert(1 if scaled else len(lines), first_use(repairs.joint, top.node, own_lines, until=top.node))
    forgotten = wanted.left_out(top)
    if forgotten is not None:
        lines.insert(0, own_lines.of(forgotten.source))
    found = tuple(_distinct(lines))
    return Way(
        found,
        tuple(_distinct(own_lines.of(node.source) for node in before if node is not None)),
        not top.lost,
        heals,
        top.node.backward,
        here,
        top.node.source if found[0].place == here.place and reduction is None else None,
        "the gradient that should come of this line is left out" if forgotten is not None else difference_of(wanted, top),
        own_lines.of(reduction.node.source) if reduction and reduction.is_multiple(wanted.held(reduction.lanes)) else None,
    )


def _reduction(top: Step) -> Step | None:
    """The reduction over ranks that is next, which may be where the fault is."""
    later = [step for step in top.way() if step is not top and name_of(step.node.op) not in PASSED_OVER | {"view"}]
    return later[0] if later and "reduce" in later[0].node.kwargs else None


def _after(top: Step, own_lines: OwnLines) -> Iterator[Source]:
    """The lines on the way to the output, as the program that is checked calls for them."""
    for step in top.way():
        line = own_lines.of(step.node.source)
        if line is not None and (step is top or name_of(step.node.op) not in PASSED_OVER):
            *_, outermost = line.outwards()
            yield next(each for each in line.outwards() if each.file == outermost.file)


def _distinct(lines: Iterable[Source | None]) -> Iterator[Source]:
    seen: set[tuple[str, int]] = set()
    for line in lines:
        if line is not None and line.place not in seen:
            seen.add(line.place)
            yield line
