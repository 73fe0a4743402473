"""Captures a check: the sequential program and every rank, each in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # meta kernels import it on first use: once here, rather than in every fork
from torch.distributed.tensor.placement_types import Replicate
from torch.utils import _pytree as pytree

from graphguard import graph_json
from graphguard.capture import adapters, ranks
from graphguard.capture.isolate import run_isolated
from graphguard.capture.objects import ObjectExchange, ObjectsMissing, Sent
from graphguard.capture.program import Program, flat_inputs, record_outputs
from graphguard.capture.recorder import Recorder
from graphguard.capture.sources import is_user_file
from graphguard.errors import (
    CaptureError,
    GraphGuardError,
    InternalError,
    MismatchError,
    ProgramError,
    UsageError,
    first_line,
)
from graphguard.ir import Graph, Mesh, Source
from graphguard.joint import Joint, first_mismatch, join, made_by_some
from graphguard.prune import prune, settled
from graphguard.relation import Input, check_placements, localise
from graphguard.wellformed import require_wellformed

Progress = Callable[[str, int, int], None]
LocalInputs = Callable[[dict[str, torch.Tensor], dict[str, int]], Mapping[str, Any]]


@dataclass(frozen=True)
class Subject:
    """Two programs and the input relation between them."""

    sequential: Program
    distributed: Program
    mesh: Mesh
    inputs: Mapping[str, Input]
    local_inputs: LocalInputs | None = None

    def check(self) -> None:
        for name, spec in self.inputs.items():
            if not isinstance(spec, Input):
                raise UsageError(f"input {name!r} is {type(spec).__name__}; write gg.Input(shape, placement)")
            if self.local_inputs is not None and (spec.local or not isinstance(spec.placement, Replicate)):
                raise UsageError(f"input {name!r} has a placement beside local_inputs=, which already says what ranks get")
            check_placements(name, spec, self.mesh)
        self.sequential.check(list(self.inputs))
        self.distributed.check(list(self.inputs) if self.local_inputs is None else None)


@dataclass
class Captured:
    """The graphs of a check. `relations[r]` takes the sequential inputs to rank r's."""

    sequential: Graph
    ranks: list[Graph]
    relations: list[Graph]
    joint: Joint
    seconds: float = 0.0
    assumptions: list[str] = field(default_factory=list)


def capture_sequential(program: Program, inputs: Mapping[str, Input], *, use_cache: bool = True) -> Graph:
    """The graph of one program on its own."""
    subject = Subject(program, program, Mesh.of({"world": 1}), inputs)
    subject.sequential.check(list(inputs))
    return _capture_all(subject, [None], None, use_cache, None)[0].graphs[0]


@dataclass
class _Answer:
    """What a fork found. Texts are equal if the graphs are; a pickle of a graph is not fit for that."""

    graphs: list[Graph]
    texts: list[str]
    sent: Sent
    complete: bool


# The sequential program and rank 0: if two captures of one differ, no graph speaks for the program.
CAPTURED_TWICE: tuple[int | None, ...] = (None, 0)


def capture(
    subject: Subject, *, progress: Progress | None = None, use_cache: bool = True, workers: int | None = None
) -> Captured:
    """All graphs of a check. Each program is recorded from the state that this process has now."""
    begun = time.perf_counter()
    subject.check()
    world = subject.mesh.size
    whats: list[int | None] = [None, *range(world), *CAPTURED_TWICE]
    answers = _capture_all(subject, whats, progress, use_cache, workers)
    for what, again in zip(CAPTURED_TWICE, answers[1 + world :], strict=True):
        first = answers[whats.index(what)]
        if first.texts != again.texts:
            raise CaptureError(_difference(first.graphs[-1], again.graphs[-1], what))
    sequential = answers[0].graphs[0]
    relations, graphs = map(list, zip(*(answer.graphs for answer in answers[1 : 1 + world]), strict=True))
    joint, left_out = join(graphs), made_by_some(graphs)
    if not joint.findings:  # only now, as what a module's constructor sends must fit together too
        joint = settled(joint)
    captured = Captured(sequential, graphs, relations, joint, time.perf_counter() - begun)
    assumed = {a for graph in [sequential, *relations, *graphs] for a in graph.assumptions}
    captured.assumptions = sorted(assumed if left_out is None else {*assumed, left_out})
    return captured


def _capture_all(
    subject: Subject, whats: list[int | None], progress: Progress | None, use_cache: bool, workers: int | None
) -> list[_Answer]:
    adapters.warn_of_versions()
    holders = adapters.Holders()
    known: Sent = {}
    answers: dict[int, _Answer] = {}
    pending = list(range(len(whats)))
    while pending:
        tasks = [_task(subject, whats, index, holders, known, use_cache) for index in pending]
        failures: dict[int, GraphGuardError] = {}
        for position, result in run_isolated(tasks, workers):
            index = pending[position]
            if isinstance(result, GraphGuardError):
                failures[index] = result  # the others still run, so that the error shown is the same every time
                continue
            with _uncollected():
                answers[index] = pickle.loads(result)
            if progress is not None:
                progress(_title(whats[index]), sum(a.complete for a in answers.values()), len(whats))
        if failures:
            raise _first_said(failures, answers, whats)
        before = len(known)
        for index in pending:
            known |= answers[index].sent
        pending = [index for index in pending if not answers[index].complete]
        if pending and len(known) == before:
            raise _never_sent(answers, whats, sorted({str(whats[index]) for index in pending}))
    return [answers[index] for index in range(len(whats))]


def _never_sent(answers: dict[int, _Answer], whats: list[int | None], stuck: list[str]) -> GraphGuardError:
    """Ranks wait for objects: a fault of the communication until then, if it does not fit together."""
    text = f"ranks {', '.join(stuck)} wait in an object collective for objects that no rank sends"
    graphs = {rank: answers[index].graphs[-1] for index, rank in enumerate(whats) if rank is not None}
    findings = join([graphs[rank] for rank in sorted(graphs)]).findings
    return MismatchError(text, findings[0]) if findings else CaptureError(text)


def _first_said(failures: dict[int, GraphGuardError], answers: dict[int, _Answer], whats: list[int | None]) -> GraphGuardError:
    """What went wrong first: an exception, or communication before it that does not fit together."""
    error = failures[min(failures)]
    graphs: dict[int, Graph] = {}
    for index, rank in enumerate(whats):
        failure, answer = failures.get(index), answers.get(index)
        if rank is not None and isinstance(failure, ProgramError) and failure.before is not None:
            graphs[rank] = failure.before
        elif rank is not None and answer is not None and answer.complete:
            graphs[rank] = answer.graphs[-1]
    world = len({rank for rank in whats if rank is not None})
    raised = [rank for rank in map(whats.__getitem__, failures) if rank is not None]
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


def _title(rank: int | None) -> str:
    return "the sequential program" if rank is None else f"rank {rank}"


def _task(
    subject: Subject, whats: list[int | None], index: int, holders: adapters.Holders, known: Sent, use_cache: bool
) -> Callable[[], bytes]:
    rank, twice = whats[index], whats.count(whats[index]) > 1

    def task() -> bytes:
        if whats.index(rank) < index:  # what a program prints is shown once
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        objects = ObjectExchange(known)
        try:
            if rank is None:
                graphs = [_sequential(subject, holders, use_cache)]
            else:
                graphs = _rank(subject, rank, holders, objects, use_cache)
        except ObjectsMissing as missing:
            return pickle.dumps(_Answer([missing.before] if missing.before else [], [], objects.sent, False))
        for graph in graphs:
            require_wellformed(graph)
        texts = [graph_json.dumps(graph) for graph in graphs] if twice else []
        return pickle.dumps(_Answer(graphs, texts, objects.sent, True), pickle.HIGHEST_PROTOCOL)

    return task


# ---------------------------------------------------------------------- in the child
def _sequential(subject: Subject, holders: adapters.Holders, use_cache: bool) -> Graph:
    ranks.leave_any_group()
    recorder = Recorder(Graph("sequential"), use_cache=use_cache)
    adapters.adjust(recorder, holders)
    inputs = {name: recorder.tensor_input(name, spec.shape, spec.dtype) for name, spec in subject.inputs.items()}
    return _record(subject.sequential, recorder, inputs, None, "the sequential program")


def _rank(subject: Subject, rank: int, holders: adapters.Holders, objects: ObjectExchange, use_cache: bool) -> list[Graph]:
    mesh = ranks.become_rank(rank, subject.mesh)
    relation = Recorder(Graph(f"inputs of rank {rank}", mesh=subject.mesh, rank=rank), use_cache=use_cache)
    recorder = Recorder(Graph(f"rank {rank}", mesh=subject.mesh, rank=rank), use_cache=use_cache)
    adapters.adjust(recorder, holders, objects)
    local = _local_inputs(subject, rank, relation)
    relation.graph.outputs = {name: relation.value(tensor) for name, tensor in flat_inputs(local).items()}
    prune(relation.graph)
    fresh = _fresh_inputs(recorder, local)
    if subject.local_inputs is not None:
        subject.distributed.check(list(fresh))
    return [relation.graph, _record(subject.distributed, recorder, fresh, mesh, f"rank {rank}")]


def _local_inputs(subject: Subject, rank: int, relation: Recorder) -> dict[str, Any]:
    """Trace how the sequential inputs become this rank's."""
    coordinate = subject.mesh.coordinate(rank)
    full = {name: relation.tensor_input(name, spec.shape, spec.dtype) for name, spec in subject.inputs.items()}

    def part(tensor: torch.Tensor, key: str, index: int, count: int) -> torch.Tensor:
        relation.locate()
        value = relation.new_value(tensor.shape, tensor.dtype)
        relation.emit("gg.part", (relation.value(tensor), key, index, count), {}, (value,))
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        relation.aliases.bind(fresh, value)
        return fresh

    def trace() -> dict[str, Any]:
        with relation:
            if subject.local_inputs is None:
                return {
                    name: localise(name, full[name], spec, subject.mesh, coordinate, part)
                    for name, spec in subject.inputs.items()
                }
            local = subject.local_inputs(dict(full), dict(coordinate))
            if not isinstance(local, Mapping):
                raise UsageError(f"local_inputs= returned {type(local).__name__}, not a dict of inputs")
            return dict(local)

    return _guarded(trace, relation, f"the input relation of rank {rank}")  # type: ignore[no-any-return]


def _fresh_inputs(recorder: Recorder, local: dict[str, Any]) -> dict[str, Any]:
    """New, contiguous tensors of the local inputs' shapes; what is not a tensor stays."""
    names = iter(flat_inputs(local))

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return recorder.tensor_input(next(names), leaf.shape, leaf.dtype)

    return pytree.tree_map(fresh, local)  # type: ignore[no-any-return]


def _record(program: Program, recorder: Recorder, inputs: dict[str, Any], mesh: Any, who: str) -> Graph:
    def run() -> None:
        record_outputs(recorder, program.run(recorder, inputs, mesh))

    recorder.is_program = True
    try:
        _guarded(run, recorder, who)
    except (ProgramError, ObjectsMissing) as error:
        talk = [node for node in recorder.graph.nodes if node.communicates]
        error.before = Graph(recorder.graph.name, nodes=talk, mesh=recorder.graph.mesh, rank=recorder.graph.rank)
        raise
    prune(recorder.graph)
    return recorder.graph


def _guarded(function: Callable[[], Any], recorder: Recorder, who: str) -> Any:
    """Run code of the user's, and turn what it raises into one sentence with the user's own frames."""
    try:
        result = function()
    except (UsageError, InternalError):
        raise
    except (ObjectsMissing, KeyboardInterrupt):
        raise
    except BaseException as error:
        if recorder.failure is not None:
            raise recorder.failure.located(who) from None
        if isinstance(error, CaptureError):  # of another recorder's: what an input relation must not do
            raise error.located(who) from None
        raise _program_error(error, who) from None
    if recorder.failure is not None:  # the program caught our error and went on: what it did then is not its real path
        raise recorder.failure.located(who)
    return result


def _program_error(error: BaseException, who: str) -> ProgramError:
    frames = tuple(
        (frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if is_user_file(frame.filename)
    )
    where = f" at {Source(*frames[-1][:2])} in {frames[-1][2]}" if frames else ""
    if isinstance(error, SystemExit):
        return ProgramError(f"{who} called sys.exit(){where}", frames)
    text = first_line(error)
    if "expected device cpu but got meta" in text:
        text = ("a gradient is taken of a tensor from outside the program, which is a constant here; pass it as an input, or "
                "create the module inside the program")  # fmt: skip
    return ProgramError(f"{who} raised {type(error).__name__}{where}: {text}", frames)


def _difference(a: Graph, b: Graph, rank: int | None) -> str:
    """Where two captures of one program part."""
    for mine, its in zip(a.nodes, b.nodes, strict=False):
        if str(mine) != str(its):
            return (
                f"{_title(rank)} is not deterministic: two captures of it differ at {mine.source or its.source} "
                f"({mine.op} against {its.op}); remove what changes between runs (time, addresses, unordered sets)"
            )
    return (
        f"{_title(rank)} is not deterministic: two captures of it have {len(a.nodes)} and {len(b.nodes)} operations, or "
        "different constants; remove what changes between runs (time, addresses, unordered sets)"
    )
