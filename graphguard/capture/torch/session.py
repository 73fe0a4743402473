"""Captures a check: the sequential program and every rank, each in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple

import torch._dynamo  # noqa: F401 # meta kernels import it on first use: once here, rather than in every fork

from graphguard.capture.front import Captured, Progress, are_ranks_apart, captured_by_classes
from graphguard.capture.torch import adapters
from graphguard.capture.torch.child import record_rank, record_sequential
from graphguard.capture.torch.escapes.ambient import Ambient
from graphguard.capture.torch.isolate import run_isolated
from graphguard.capture.torch.lanes.classes import ByClass, capture_classes
from graphguard.capture.torch.program import Program
from graphguard.capture.torch.record.sampled import Sample
from graphguard.capture.torch.relation.inputs import Input
from graphguard.capture.torch.subject import Subject
from graphguard.capture.torch.world.objects import ObjectExchange, ObjectsMissing, Sent, same_objects
from graphguard.errors import (
    CaptureError,
    GraphGuardError,
    MismatchError,
    ProgramError,
    first_line,
)
from graphguard.graph import json as graph_json
from graphguard.graph.class_matching import join_classes, rejoined
from graphguard.graph.ir import Graph, Mesh, Source
from graphguard.graph.matching import first_mismatch, join, made_by_some
from graphguard.graph.prune import settled, settled_classes
from graphguard.graph.rank_class import same_graph
from graphguard.graph.wellformed import require_wellformed
from graphguard.scope import known_lemmas


def capture_sequential(program: Program, inputs: Mapping[str, Input], *, use_cache: bool = True) -> Graph:
    """The graph of one program on its own."""
    subject = Subject(program, program, Mesh.of({"world": 1}), inputs)
    subject.sequential.check(list(inputs))
    return capture_takes(subject, [Take(None)], None, use_cache, None, {})[Take(None)].graphs[0]


@dataclass
class Answer:
    """What a fork found. Digests are equal if the graphs are; a pickle of a graph is not fit for that. As its class says: the
    graphs are those that the rank's class has, and are left out."""

    graphs: list[Graph]
    digests: list[str]
    sent: Sent
    complete: bool
    asked: dict[str, Source | None] = field(default_factory=dict)  # for what differs between processes
    as_its_class_says: bool = False


class Take(NamedTuple):
    """One capture of a program; of the sequential one if `rank` is None. Every turn has another ambient state."""

    rank: int | None
    turn: int = 0


WRITTEN_OUT = 32  # ranks, at the most, that are matched one by one where classes are known
BY_CLASS_FROM = 5  # ranks: of fewer, as many processes are needed for a class and its witnesses
# If two captures of one program differ, no graph speaks for it. These are captured twice whatever they ask for, in case it is
# for something that is not known to differ between processes.
CAPTURED_TWICE: tuple[Take, ...] = (Take(None, 1), Take(0, 1))


def capture(
    subject: Subject,
    *,
    progress: Progress | None = None,
    use_cache: bool = True,
    workers: int | None = None,
    accept_unstable: bool = False,
) -> Captured:
    """All graphs of a check. Each program is recorded from the state that this process has now. Graphs that `accept_unstable`
    lets through hold for one state of each rank's process: they may refute, and verify nothing. Where ranks are many, those
    that do the same are captured at once, unless they are wanted apart."""
    begun = time.perf_counter()
    subject.check()
    world = subject.mesh.size
    options = (progress, use_cache, workers)
    by_class = None if are_ranks_apart() or world < BY_CLASS_FROM else capture_classes(subject, use_cache, workers)
    answers: dict[Take, Answer] = {}
    if by_class is not None and by_class.classes:
        answers = _with_witnesses(subject, by_class, options)
    if by_class is not None and by_class.why_not is None:
        once = []  # no rank is another program than its class says
        captured = _of_classes(answers[Take(None)].graphs[0], by_class, subject.mesh)
    else:
        once = list(range(world))
        answers = _capture_each(subject, [Take(None), *map(Take, once)], options)
        captured = captured_of_ranks(answers[Take(None)].graphs[0], [answers[Take(rank)].graphs for rank in once])
    different = next((difference(rank, answers) for rank in (None, *once) if _differs(rank, answers)), None)
    captured.seconds = time.perf_counter() - begun
    if by_class is not None:
        captured.classes, captured.by_rank = len(by_class.classes) or None, by_class.why_not
    if different is not None:
        if not accept_unstable or _differs(None, answers):
            raise CaptureError(different)
        captured.unstable = different
    assumed = {a for each in captured.held for graph in (each.relation, each.graph) for a in graph.assumptions}
    captured.assumptions = sorted({*captured.assumptions, *captured.sequential.assumptions, *assumed})
    return captured


def captured_of_ranks(sequential: Graph, pairs: Sequence[Sequence[Graph]]) -> Captured:
    """The ranks one by one, matched."""
    relations, graphs = map(list, zip(*pairs, strict=True))
    joint, left_out = join(graphs), made_by_some(graphs)
    if not joint.findings:  # only now, as what a module's constructor sends must fit together too
        joint = settled(joint)
    return Captured(sequential, graphs, relations, joint, assumptions=[] if left_out is None else [left_out])


def _of_classes(sequential: Graph, by_class: ByClass, mesh: Mesh) -> Captured:
    """The ranks by classes. Few ranks are written out, and matched one by one."""
    if mesh.size <= WRITTEN_OUT:
        graphs = by_class.graphs()
        return captured_of_ranks(sequential, [graphs[rank] for rank in range(mesh.size)])
    left_out = made_by_some([each.graph for each in by_class.classes])
    world = join_classes(by_class.classes, mesh)
    captured = captured_by_classes(sequential, world if world.findings else rejoined(settled_classes(world)))
    captured.assumptions = [] if left_out is None else [left_out]
    return captured


_Options = tuple[Progress | None, bool, int | None]  # as `capture_takes` has them


def _capture_each(subject: Subject, once: list[Take], options: _Options) -> dict[Take, Answer]:
    """Every one of these, and again those that ask for what differs between processes."""
    known: Sent = {}
    answers = capture_takes(subject, [*once, *CAPTURED_TWICE], *options, known)
    again = [Take(rank, 1) for rank, _ in once if answers[Take(rank)].asked and Take(rank, 1) not in answers]
    return answers | capture_takes(subject, again, *options, known) if again else answers


def _with_witnesses(subject: Subject, by_class: ByClass, options: _Options) -> dict[Take, Answer]:
    """The sequential program; and of each class the first rank by itself, and the last one by itself in another state, as what
    differs between processes must not matter. Where one is another program than its class says, or cannot be captured, the
    classes say nothing."""
    ends = [(int(each.ranks[0]), int(each.ranks[-1])) for each in by_class.classes]
    witnesses = sorted({*((first, 0) for first, last in ends if first != last), *((last, 1) for _, last in ends)})
    try:
        takes = [Take(None), Take(None, 1), *(Take(*each) for each in witnesses)]
        answers = capture_takes(subject, takes, *options, dict(by_class.sent), by_class)
    except GraphGuardError as error:  # which is told as it is of all ranks
        by_class.give_up(first_line(error))
        return {}
    for rank, turn in witnesses:
        alone = answers[Take(rank, turn)]
        if not same_objects(alone.sent, by_class.sent_by(rank)) or not alone.as_its_class_says:
            by_class.give_up(f"rank {rank} alone is captured as another program")
            return {}
    return answers


def _differs(rank: int | None, answers: dict[Take, Answer]) -> bool:
    again = answers.get(Take(rank, 1))
    return again is not None and again.digests != answers[Take(rank)].digests


def capture_takes(
    subject: Subject, takes: list[Take], progress: Progress | None, use_cache: bool, workers: int | None, known: Sent,
    by_class: ByClass | None = None,
) -> dict[Take, Answer]:  # fmt: skip
    """`known` are the objects that ranks have sent; it is added to. by_class: what the ranks are compared with."""
    adapters.warn_of_versions()
    holders = adapters.Holders()
    if subject.opaque is None:
        subject = replace(subject, opaque=frozenset(known_lemmas()))
    answers: dict[Take, Answer] = {}
    pending = takes
    while pending:
        tasks = [task_of(subject, take, holders, known, use_cache, by_class) for take in pending]
        failures: dict[Take, GraphGuardError] = {}
        for position, result in run_isolated(tasks, workers):
            take = pending[position]
            if isinstance(result, GraphGuardError):
                failures[take] = result  # the others still run, so that the error shown is the same every time
                continue
            with _uncollected():
                answers[take] = pickle.loads(result)
            if progress is not None:
                progress(title(take.rank), sum(a.complete for a in answers.values()), len(takes))
        if failures:
            raise first_said(failures, answers, takes)
        before = len(known)
        for take in pending:
            known |= {key: sent for key, sent in answers[take].sent.items() if take.turn == 0}
        pending = [take for take in pending if not answers[take].complete]
        if pending and len(known) == before:
            raise _never_sent(answers, sorted({str(take.rank) for take in pending}))
    return answers


def _never_sent(answers: dict[Take, Answer], stuck: list[str]) -> GraphGuardError:
    """Ranks wait for objects: a fault of the communication until then, if it does not fit together."""
    text = f"ranks {', '.join(stuck)} wait in an object collective for objects that no rank sends"
    graphs = {
        take.rank: each.graphs[-1] for take, each in answers.items() if take.rank is not None and each.graphs and not take.turn
    }
    findings = join([graphs[rank] for rank in sorted(graphs)]).findings
    return MismatchError(text, findings[0]) if findings else CaptureError(text)


def first_said(failures: dict[Take, GraphGuardError], answers: dict[Take, Answer], takes: list[Take]) -> GraphGuardError:
    """What went wrong first: an exception, or communication before it that does not fit together."""
    error = next(failures[take] for take in takes if take in failures)
    graphs: dict[int, Graph] = {}
    for take in takes:
        rank, failure, answer = take.rank, failures.get(take), answers.get(take)
        if rank is not None and isinstance(failure, ProgramError) and failure.before is not None:
            graphs.setdefault(rank, failure.before)
        elif rank is not None and answer is not None and answer.complete and answer.graphs:
            graphs.setdefault(rank, answer.graphs[-1])
    world = len({take.rank for take in takes if take.rank is not None})
    raised = [take.rank for take in failures if take.rank is not None]
    finding = first_mismatch([graphs[rank] for rank in range(world)], raised) if len(graphs) == world else None
    if finding is not None:
        return MismatchError(str(error), finding)
    if isinstance(error, ProgramError):
        error.before = None
    return error


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Graphs are many small objects that all live: collecting them in vain takes longer than loading them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def title(rank: int | None) -> str:
    return "the sequential program" if rank is None else f"rank {rank}"


def task_of(
    subject: Subject, take: Take, holders: adapters.Holders, known: Sent, use_cache: bool, by_class: ByClass | None = None,
    sample: Sample | None = None,
) -> Callable[[], bytes]:  # fmt: skip
    rank = take.rank

    def task() -> bytes:
        ambient = Ambient(*take)
        if take.turn > 0:  # what a program prints is shown once
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        objects = ObjectExchange(known)
        try:
            if rank is None:
                graphs = [record_sequential(subject, holders, ambient, use_cache, sample)]
            else:
                graphs = record_rank(subject, rank, holders, ambient, objects, use_cache, sample)
        except ObjectsMissing as missing:
            so_far = [graph for graph in (missing.relation, missing.before) if graph is not None]
            return pickle.dumps(Answer(so_far, [], objects.sent, False))
        for graph in graphs:
            require_wellformed(graph)
        ambient.finish()
        digests = list(map(_digest, graphs)) if ambient.asked or not rank else []
        graphs[-1].assumptions = tuple(sorted({*graphs[-1].assumptions, *ambient.lines()}))
        answer = Answer(graphs, digests, objects.sent, True, ambient.asked)
        if rank is not None and by_class is not None and all(map(same_graph, by_class.at(rank), graphs)):
            answer.graphs, answer.as_its_class_says = [], True
        return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)

    return task


def _digest(graph: Graph) -> str:
    return sha256(graph_json.dumps(graph).encode()).hexdigest()


def difference(rank: int | None, answers: dict[Take, Answer]) -> str:
    """Where two captures of one program part, and what it asked for that differs between processes."""
    one, other = answers[Take(rank)], answers[Take(rank, 1)]
    pairs = list(zip(one.graphs, other.graphs, strict=True))
    a, b = next((pair for pair in pairs if graph_json.dumps(pair[0]) != graph_json.dumps(pair[1])), pairs[-1])
    asked = {**other.asked, **one.asked}
    located = [f"{what} at {where}" for what, where in asked.items() if where is not None]
    reason = ", ".join(located or asked) or "time, addresses, unordered sets"
    advice = f"remove what changes between runs and between ranks ({reason})"
    for mine, its in zip(a.nodes, b.nodes, strict=False):
        if str(mine) != str(its):
            return (
                f"{title(rank)} is not deterministic: two captures of it differ at {mine.source or its.source} "
                f"({mine.op} against {its.op}); {advice}"
            )
    return (
        f"{title(rank)} is not deterministic: two captures of it have {len(a.nodes)} and {len(b.nodes)} operations, or "
        f"different constants; {advice}"
    )
