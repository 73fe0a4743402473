"""Captures a check along the path of a sample: what the programs read is what the graphs recorded so far have on it.

What a rank reads may depend on what other ranks send. It stops there; all ranks are replayed as far as they were captured, and
it is captured again with what it then receives, until every rank comes to its end.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from graphguard.aten.kernels import Kernels
from graphguard.capture.front import Captured, Progress
from graphguard.capture.torch import adapters
from graphguard.capture.torch.isolate import run_isolated
from graphguard.capture.torch.record.sampled import RankSample, Sample, is_numbered, reads_of, without_reads
from graphguard.capture.torch.session import Answer, Take, captured_of_ranks, difference, first_said, task_of, title
from graphguard.capture.torch.subject import Subject
from graphguard.capture.torch.world.objects import Sent
from graphguard.errors import CaptureError, GraphGuardError, MismatchError, ProgramError, ReplayError
from graphguard.graph.ir import Graph, Value
from graphguard.graph.matching import join
from graphguard.oracle.replay import run, run_as_far_as_it_goes
from graphguard.oracle.trial import seeded
from graphguard.scope import known_lemmas

MOST_ROUNDS = 64
Placed = Callable[[Captured], Sequence[Graph]]  # the ranks' input relations, of parameters, too
Tensors = Mapping[str, torch.Tensor]


class UndefinedPath(Exception):
    """The sequential program raises on the sample: nothing is claimed there."""

    def __init__(self, error: ProgramError):
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class CapturedAlong:
    """The graphs of a check on a path. reads: by program, the sequential one first, what it read of values."""

    captured: Captured
    reads: tuple[tuple[Value, ...], ...]
    rounds: int


def capture_along(subject: Subject, sample: Sample, placed: Placed, progress: Progress | None = None) -> CapturedAlong:
    """All graphs of a check along the path of a sample. Every rank is captured by itself."""
    begun = time.perf_counter()
    rounds = _Rounds(subject, sample, progress)
    sequential = rounds.alone()
    pairs = rounds.together(sequential, placed)
    rounds.look_again()
    captured = captured_of_ranks(sequential, pairs)
    graphs = [sequential, *captured.joint.graphs]
    reads = tuple(tuple(reads_of(graph)) for graph in graphs)
    for graph in graphs:
        without_reads(graph)
    assumed = {a for relation, graph in pairs for a in (*relation.assumptions, *graph.assumptions)}
    captured.assumptions = sorted({*captured.assumptions, *sequential.assumptions, *assumed})
    captured.seconds = time.perf_counter() - begun
    return CapturedAlong(captured, reads, rounds.count)


class _Rounds:
    def __init__(self, subject: Subject, sample: Sample, progress: Progress | None):
        subject.check()
        if subject.opaque is None:
            subject = replace(subject, opaque=frozenset(known_lemmas()))
        self.subject, self.sample, self.progress = subject, sample, progress
        self.holders, self.known = adapters.Holders(), dict[tuple[tuple[object, ...], int], bytes]()
        self.answers: dict[Take, Answer] = {}
        self.ranks = [RankSample() for _ in range(subject.mesh.size)]
        self.count = 0

    def alone(self) -> Graph:
        try:
            self._capture([Take(None)])
        except ProgramError as error:
            raise UndefinedPath(error) from None
        return self.answers[Take(None)].graphs[0]

    def together(self, sequential: Graph, placed: Placed) -> list[list[Graph]]:
        """The ranks' input relations and graphs."""
        takes = [Take(rank) for rank in range(self.subject.mesh.size)]
        pending = takes
        while pending:
            self.count += 1
            sent, arrived = len(self.known), [len(each.arrived) for each in self.ranks]
            given = self.ranks[0].given is not None
            self._capture(pending)
            pending = [take for take in takes if not self.answers[take].complete]
            if not pending:
                break
            graphs = [self.answers[take].graphs for take in takes]
            if self.ranks[0].given is None:
                self._place(sequential, graphs, placed)
            else:
                self._exchange([each[-1] for each in graphs])
            stuck = given and sent == len(self.known) and arrived == [len(each.arrived) for each in self.ranks]
            if stuck or self.count > MOST_ROUNDS:
                raise _never_come([each[-1] for each in graphs], pending)
        return [self.answers[take].graphs for take in takes]

    def look_again(self) -> None:
        """A program whose captures differ has no graph: the sequential one and the first rank are captured once more, and the
        ranks that ask for what differs between processes."""
        asking = [take.rank for take, answer in self.answers.items() if answer.asked]
        for rank in dict.fromkeys([None, 0, *asking]):
            self._capture([Take(rank, 1)])
            if self.answers[Take(rank, 1)].digests != self.answers[Take(rank)].digests:
                raise CaptureError(difference(rank, self.answers))

    def _capture(self, takes: Sequence[Take]) -> None:
        tasks = [
            task_of(self.subject, take, self.holders, self.known, True,
                    sample=self.sample if take.rank is None else self.ranks[take.rank])
            for take in takes
        ]  # fmt: skip
        failures: dict[Take, GraphGuardError] = {}
        for position, result in run_isolated(tasks):
            take = takes[position]
            if isinstance(result, GraphGuardError):
                failures[take] = result
                continue
            self.answers[take] = pickle.loads(result)
            if self.progress is not None:
                self.progress(title(take.rank), sum(a.complete for a in self.answers.values()), 1 + self.subject.mesh.size)
        if failures:
            raise first_said(failures, self.answers, [Take(None), *map(Take, range(self.subject.mesh.size)), *failures])
        new: Sent = {key: sent for take in takes if not take.turn for key, sent in self.answers[take].sent.items()}
        self.known |= new

    def _place(self, sequential: Graph, graphs: Sequence[Sequence[Graph]], placed: Placed) -> None:
        """Give the ranks their parts of the sample."""
        if any(len(each) < 2 for each in graphs):
            raise CaptureError("a rank reads a value while its inputs are placed; say in gg.Input how they are")
        relations, ranks = map(list, zip(*graphs, strict=True))
        relations = list(placed(Captured(sequential, ranks, relations, join(ranks))))
        full = {name: self.sample.input(name, value) for name, value in sequential.inputs.items()}
        for rank, relation in enumerate(relations):
            given = {name: full[name] for name in relation.inputs}
            outputs = run(relation, given, wide=True).outputs()
            self.ranks[rank].given = {name: tensor for name, tensor in outputs.items() if tensor is not None}

    def _exchange(self, graphs: Sequence[Graph]) -> None:
        """What each rank receives, as far as the ranks were captured."""
        given = [
            {name: (each.given or {})[name] for name in graph.inputs} for each, graph in zip(self.ranks, graphs, strict=True)
        ]
        try:
            with seeded(0):  # what a constructor draws is replayed, too
                states = run_as_far_as_it_goes(join(graphs), given, Kernels(wide=True))
        except ReplayError as error:
            raise CaptureError(f"the ranks cannot be replayed on the sample: {error}") from None
        for mine, state in zip(self.ranks, states, strict=True):
            talk = enumerate(node for node in state.graph.nodes if is_numbered(node))
            mine.arrived = {
                number: [state.values[value] for value in node.outputs]
                for number, node in talk
                if all(value in state.values for value in node.outputs)
            }


def _never_come(graphs: Sequence[Graph], pending: Sequence[Take]) -> GraphGuardError:
    """Ranks wait for values: a fault of the communication until then, if it does not fit together."""
    who = ", ".join(str(take.rank) for take in pending)
    text = f"ranks {who} read values that depend on what other ranks send, and these never do"
    findings = join(graphs).findings
    return MismatchError(text, findings[0]) if findings else CaptureError(text)
