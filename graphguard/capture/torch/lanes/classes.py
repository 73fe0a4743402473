"""All ranks of a program by classes: one run for all of them, then one for each set of ranks that a run left behind."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from graphguard.capture.torch import adapters
from graphguard.capture.torch.isolate import run_isolated
from graphguard.capture.torch.lanes.capture import ClassAnswer, record_class
from graphguard.capture.torch.lanes.run import NotByClasses, Numbers
from graphguard.capture.torch.subject import Subject
from graphguard.capture.torch.world.objects import Sent, is_same_object
from graphguard.errors import GraphGuardError, InternalError, first_line
from graphguard.graph.alike import joined
from graphguard.graph.ir import Graph
from graphguard.graph.rank_class import RankClass
from graphguard.graph.wellformed import require_wellformed
from graphguard.scope import known_lemmas

_WITNESSES = 2  # of a class


@dataclass
class ByClass:
    """why_not: why the ranks are captured one by one after all. sent: the objects that ranks have sent."""

    classes: list[RankClass] = field(default_factory=list)
    why_not: str | None = None
    sent: Sent = field(default_factory=dict)

    def give_up(self, reason: str) -> None:
        self.classes, self.why_not = [], reason

    def sent_by(self, rank: int) -> Sent:
        return {(key, sender): data for (key, sender), data in self.sent.items() if sender == rank}

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
    capturing = _Capturing(subject, use_cache, workers)
    try:
        capturing.run()
    except NotByClasses as reason:
        capturing.found.give_up(str(reason))
        return capturing.found
    held = np.sort(np.concatenate([each.ranks for each in capturing.found.classes]))
    if not np.array_equal(held, np.arange(subject.mesh.size)):
        raise InternalError("the classes of ranks are no partition of them; please report it")
    return capturing.found


class _Capturing:
    """All runs of a program by classes."""

    def __init__(self, subject: Subject, use_cache: bool, workers: int | None):
        self._subject, self._use_cache, self._workers = subject, use_cache, workers
        self._holders = adapters.Holders()
        self.found = ByClass()

    def run(self) -> None:
        waiting, ended = [np.arange(self._subject.mesh.size)], 0
        while waiting:
            if _is_too_much(ended + len(waiting), len(self.found.classes) or 1, self._subject.mesh.size):
                raise NotByClasses(f"the ranks do at least {ended + len(waiting)} different things")
            answers = self._answers(waiting)
            made = [answer.found for answer in answers if answer.found is not None]
            told = self._hear(answers)
            left = [ranks for answer in answers for split in answer.splits for ranks in split.ranks]
            lacking = [answer.lacking for answer in answers if answer.lacking is not None]
            if lacking and not (told or made or left):
                raise NotByClasses("ranks wait for objects that no rank sends")
            ended += len(made)
            self.found.classes = joined(sorted([*self.found.classes, *made], key=_first), exactly=True)
            waiting = [*left, *lacking]

    def _hear(self, answers: list[ClassAnswer]) -> bool:
        """Whether objects were sent that were not known."""
        before = len(self.found.sent)
        for answer in answers:
            for which, data in answer.sent.items():
                if not is_same_object(self.found.sent.setdefault(which, data), data):
                    raise NotByClasses("a rank sends other objects when it is run again")
        return len(self.found.sent) > before

    def _answers(self, runs: list[Numbers]) -> list[ClassAnswer]:
        def task(ranks: Numbers) -> Callable[[], bytes]:
            return lambda: record_class(self._subject, ranks, self._holders, self.found.sent, self._use_cache)

        results = dict(run_isolated(list(map(task, runs)), self._workers))
        answers: list[ClassAnswer] = []
        for _, result in sorted(results.items()):
            if isinstance(result, GraphGuardError):
                raise NotByClasses(first_line(result))
            answers.append(pickle.loads(result))
            if answers[-1].why_not is not None:
                raise NotByClasses(answers[-1].why_not)
        return answers


def _is_too_much(runs: int, classes: int, world: int) -> bool:
    """Whether it takes more processes than there are ranks."""
    return runs + _WITNESSES * classes > world


def _first(held: RankClass) -> int:
    return int(held.ranks[0])
