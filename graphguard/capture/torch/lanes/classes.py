"""All ranks of a program by classes: one run for all of them, then one for each set of ranks that a run left behind."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from graphguard.capture.torch import adapters
from graphguard.capture.torch.isolate import run_isolated
from graphguard.capture.torch.lanes.capture import ClassAnswer, record_class
from graphguard.capture.torch.lanes.run import Numbers
from graphguard.capture.torch.subject import Subject
from graphguard.errors import GraphGuardError, InternalError, first_line
from graphguard.graph.alike import joined
from graphguard.graph.ir import Graph
from graphguard.graph.rank_class import RankClass, same_graph
from graphguard.graph.wellformed import require_wellformed
from graphguard.scope import known_lemmas

_WITNESSES = 2  # of a class: if these and all runs for classes are more than the ranks, ranks are captured one by one


@dataclass
class ByClass:
    """why_not: why the ranks are captured one by one after all."""

    classes: list[RankClass] = field(default_factory=list)
    why_not: str | None = None

    def give_up(self, reason: str) -> None:
        self.classes, self.why_not = [], reason

    def at(self, rank: int) -> list[Graph]:
        """A rank's input relation and its program."""
        graphs = next(each for each in self.classes if rank in each.ranks).at(rank)
        for graph in graphs:
            require_wellformed(graph)
        return graphs

    def graphs(self) -> dict[int, list[Graph]]:
        """Of every rank."""
        return {rank: self.at(rank) for each in self.classes for rank in each.members}


def capture_classes(subject: Subject, use_cache: bool, workers: int | None) -> ByClass:
    """What is not expected of many ranks at once is told by `why_not`: a capture of each rank then says what is wrong."""
    if subject.opaque is None:
        subject = replace(subject, opaque=frozenset(known_lemmas()))
    holders, world = adapters.Holders(), subject.mesh.size
    found, waiting, runs = ByClass(), [np.arange(world)], 0
    while waiting:
        runs += len(waiting)
        if _is_too_much(runs, len(found.classes) or 1, world):
            found.give_up(f"the ranks do at least {runs} different things")
            return found
        answers = _answers([(ranks, 0) for ranks in waiting], subject, holders, use_cache, workers)
        made = [answer.found for answer in answers if answer.found is not None]
        again = [each.ranks for answer, each in zip(answers, made, strict=False) if answer.asked]
        others = _answers([(ranks, 1) for ranks in again], subject, holders, use_cache, workers)
        why_not = next((answer.why_not for answer in (*answers, *others) if answer.why_not is not None), None)
        if why_not is None and not all(any(_are_same(other.found, each) for each in made) for other in others):
            why_not = "what differs between processes changes what the ranks do"
        if why_not is not None:
            found.give_up(why_not)
            return found
        found.classes = joined(sorted([*found.classes, *made], key=lambda each: int(each.ranks[0])), exactly=True)
        waiting = [ranks for answer in answers for split in answer.splits for ranks in split.ranks]
    held = np.sort(np.concatenate([each.ranks for each in found.classes]))
    if not np.array_equal(held, np.arange(world)):
        raise InternalError("the classes of ranks are no partition of them; please report it")
    return found


def _is_too_much(runs: int, classes: int, world: int) -> bool:
    return runs + _WITNESSES * classes > world


def _answers(
    runs: list[tuple[Numbers, int]], subject: Subject, holders: adapters.Holders, use_cache: bool, workers: int | None
) -> list[ClassAnswer]:
    def task(ranks: Numbers, turn: int) -> Callable[[], bytes]:
        return lambda: pickle.dumps(record_class(subject, ranks, turn, holders, use_cache), pickle.HIGHEST_PROTOCOL)

    results = dict(run_isolated([task(*each) for each in runs], workers))
    answers = []
    for _, result in sorted(results.items()):
        failed = isinstance(result, GraphGuardError)
        answers.append(ClassAnswer(why_not=first_line(result)) if failed else pickle.loads(result))  # type: ignore[arg-type]
    return answers


def _are_same(one: RankClass | None, other: RankClass) -> bool:
    if one is None or not np.array_equal(one.ranks, other.ranks):
        return False
    return same_graph(one.graph, other.graph) and same_graph(one.relation, other.relation)
