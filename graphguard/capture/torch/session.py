"""Captures a check: the sequential program and every rank, each in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch._dynamo  # meta kernels import it on first use: once here, rather than in every fork
from torch.distributed.tensor.placement_types import Replicate
from torch.utils import _pytree as pytree

from graphguard.capture.front import Captured, Progress
from graphguard.capture.torch import adapters
from graphguard.capture.torch.escapes.ambient import Ambient
from graphguard.capture.torch.isolate import run_isolated
from graphguard.capture.torch.program import Program, flat_inputs, record_outputs
from graphguard.capture.torch.record.recorder import Recorder
from graphguard.capture.torch.relation.inputs import Input, check_placements, localise
from graphguard.capture.torch.sources import is_user_file
from graphguard.capture.torch.world import ranks
from graphguard.capture.torch.world.objects import ObjectExchange, ObjectsMissing, Sent
from graphguard.errors import (
    CaptureError,
    GraphGuardError,
    InternalError,
    MismatchError,
    ProgramError,
    UsageError,
    first_line,
)
from graphguard.graph import json as graph_json
from graphguard.graph.ir import Graph, Mesh, Source
from graphguard.graph.matching import first_mismatch, join, made_by_some
from graphguard.graph.prune import prune, settled
from graphguard.graph.wellformed import require_wellformed
from graphguard.scope import known_lemmas

LocalInputs = Callable[[dict[str, torch.Tensor], dict[str, int]], Mapping[str, Any]]


@dataclass(frozen=True)
class Subject:
    """Two programs and the input relation between them."""

    sequential: Program
    distributed: Program
    mesh: Mesh
    inputs: Mapping[str, Input]
    local_inputs: LocalInputs | None = None
    opaque: frozenset[str] | None = None  # operators with a lemma, which are not looked into; None: those of the process

    def check(self) -> None:
        for name, spec in self.inputs.items():
            if not isinstance(spec, Input):
                raise UsageError(f"input {name!r} is {type(spec).__name__}; write gg.Input(shape, placement)")
            if self.local_inputs is not None and (spec.local or not isinstance(spec.placement, Replicate)):
                raise UsageError(f"input {name!r} has a placement beside local_inputs=, which already says what ranks get")
            check_placements(name, spec, self.mesh)
        self.sequential.check(list(self.inputs))
        self.distributed.check(list(self.inputs) if self.local_inputs is None else None)


def capture_sequential(program: Program, inputs: Mapping[str, Input], *, use_cache: bool = True) -> Graph:
    """The graph of one program on its own."""
    subject = Subject(program, program, Mesh.of({"world": 1}), inputs)
    subject.sequential.check(list(inputs))
    return capture_takes(subject, [Take(None)], None, use_cache, None, {})[Take(None)].graphs[0]


@dataclass
class _Answer:
    """What a fork found. Texts are equal if the graphs are; a pickle of a graph is not fit for that."""

    graphs: list[Graph]
    texts: list[str]
    sent: Sent
    complete: bool
    asked: dict[str, Source | None] = field(default_factory=dict)  # for what differs between processes


class Take(NamedTuple):
    """One capture of a program; of the sequential one if `rank` is None. Every turn has another ambient state."""

    rank: int | None
    turn: int = 0


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
    lets through hold for one state of each rank's process: they may refute, and verify nothing."""
    begun = time.perf_counter()
    subject.check()
    world = subject.mesh.size
    once = [Take(None), *map(Take, range(world))]
    known: Sent = {}
    answers = capture_takes(subject, [*once, *CAPTURED_TWICE], progress, use_cache, workers, known)
    again = [Take(rank, 1) for rank, _ in once if answers[Take(rank)].asked and Take(rank, 1) not in answers]
    if again:
        answers |= capture_takes(subject, again, progress, use_cache, workers, known)
    different = next((_difference(take.rank, answers) for take in once if _differs(take.rank, answers)), None)
    sequential = answers[Take(None)].graphs[0]
    relations, graphs = map(list, zip(*(answers[Take(rank)].graphs for rank in range(world)), strict=True))
    joint, left_out = join(graphs), made_by_some(graphs)
    if not joint.findings:  # only now, as what a module's constructor sends must fit together too
        joint = settled(joint)
    captured = Captured(sequential, graphs, relations, joint, time.perf_counter() - begun)
    if different is not None:
        if not accept_unstable or _differs(None, answers):
            raise CaptureError(different)
        captured.unstable = different
    assumed = {a for graph in [sequential, *relations, *graphs] for a in graph.assumptions}
    captured.assumptions = sorted(assumed if left_out is None else {*assumed, left_out})
    return captured


def _differs(rank: int | None, answers: dict[Take, _Answer]) -> bool:
    again = answers.get(Take(rank, 1))
    return again is not None and again.texts != answers[Take(rank)].texts


def capture_takes(
    subject: Subject, takes: list[Take], progress: Progress | None, use_cache: bool, workers: int | None, known: Sent
) -> dict[Take, _Answer]:
    """`known` are the objects that ranks have sent; it is added to."""
    adapters.warn_of_versions()
    holders = adapters.Holders()
    if subject.opaque is None:
        subject = replace(subject, opaque=frozenset(known_lemmas()))
    answers: dict[Take, _Answer] = {}
    pending = takes
    while pending:
        tasks = [_task(subject, take, holders, known, use_cache) for take in pending]
        failures: dict[Take, GraphGuardError] = {}
        for position, result in run_isolated(tasks, workers):
            take = pending[position]
            if isinstance(result, GraphGuardError):
                failures[take] = result  # the others still run, so that the error shown is the same every time
                continue
            with _uncollected():
                answers[take] = pickle.loads(result)
            if progress is not None:
                progress(_title(take.rank), sum(a.complete for a in answers.values()), len(takes))
        if failures:
            raise _first_said(failures, answers, takes)
        before = len(known)
        for take in pending:
            known |= {key: sent for key, sent in answers[take].sent.items() if take.turn == 0}
        pending = [take for take in pending if not answers[take].complete]
        if pending and len(known) == before:
            raise _never_sent(answers, sorted({str(take.rank) for take in pending}))
    return answers


def _never_sent(answers: dict[Take, _Answer], stuck: list[str]) -> GraphGuardError:
    """Ranks wait for objects: a fault of the communication until then, if it does not fit together."""
    text = f"ranks {', '.join(stuck)} wait in an object collective for objects that no rank sends"
    graphs = {
        take.rank: each.graphs[-1] for take, each in answers.items() if take.rank is not None and each.graphs and not take.turn
    }
    findings = join([graphs[rank] for rank in sorted(graphs)]).findings
    return MismatchError(text, findings[0]) if findings else CaptureError(text)


def _first_said(failures: dict[Take, GraphGuardError], answers: dict[Take, _Answer], takes: list[Take]) -> GraphGuardError:
    """What went wrong first: an exception, or communication before it that does not fit together."""
    error = next(failures[take] for take in takes if take in failures)
    graphs: dict[int, Graph] = {}
    for take in takes:
        rank, failure, answer = take.rank, failures.get(take), answers.get(take)
        if rank is not None and isinstance(failure, ProgramError) and failure.before is not None:
            graphs.setdefault(rank, failure.before)
        elif rank is not None and answer is not None and answer.complete:
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


def _title(rank: int | None) -> str:
    return "the sequential program" if rank is None else f"rank {rank}"


def _task(subject: Subject, take: Take, holders: adapters.Holders, known: Sent, use_cache: bool) -> Callable[[], bytes]:
    rank = take.rank

    def task() -> bytes:
        ambient = Ambient(*take)
        if take.turn > 0:  # what a program prints is shown once
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        objects = ObjectExchange(known)
        try:
            if rank is None:
                graphs = [_sequential(subject, holders, ambient, use_cache)]
            else:
                graphs = _rank(subject, rank, holders, ambient, objects, use_cache)
        except ObjectsMissing as missing:
            return pickle.dumps(_Answer([missing.before] if missing.before else [], [], objects.sent, False))
        for graph in graphs:
            require_wellformed(graph)
        ambient.finish()
        texts = [graph_json.dumps(graph) for graph in graphs] if ambient.asked or not rank else []
        graphs[-1].assumptions = tuple(sorted({*graphs[-1].assumptions, *ambient.lines()}))
        return pickle.dumps(_Answer(graphs, texts, objects.sent, True, ambient.asked), pickle.HIGHEST_PROTOCOL)

    return task


# ---------------------------------------------------------------------- in the child
def _sequential(subject: Subject, holders: adapters.Holders, ambient: Ambient, use_cache: bool) -> Graph:
    ranks.leave_any_group()
    recorder = Recorder(Graph("sequential"), use_cache=use_cache, opaque=subject.opaque or ())
    adapters.adjust(recorder, holders)
    ambient.vary(holders)
    inputs = {name: recorder.tensor_input(name, spec.shape, spec.dtype) for name, spec in subject.inputs.items()}
    return _record(subject.sequential, recorder, inputs, None, "the sequential program")


def _rank(
    subject: Subject, rank: int, holders: adapters.Holders, ambient: Ambient, objects: ObjectExchange, use_cache: bool
) -> list[Graph]:
    mesh = ranks.become_rank(rank, subject.mesh)
    relation = Recorder(Graph(f"inputs of rank {rank}", mesh=subject.mesh, rank=rank), use_cache=use_cache)
    graph = Graph(f"rank {rank}", mesh=subject.mesh, rank=rank)
    recorder = Recorder(graph, use_cache=use_cache, opaque=subject.opaque or ())
    adapters.adjust(recorder, holders, objects)
    ambient.vary(holders)
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


def _difference(rank: int | None, answers: dict[Take, _Answer]) -> str:
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
                f"{_title(rank)} is not deterministic: two captures of it differ at {mine.source or its.source} "
                f"({mine.op} against {its.op}); {advice}"
            )
    return (
        f"{_title(rank)} is not deterministic: two captures of it have {len(a.nodes)} and {len(b.nodes)} operations, or "
        f"different constants; {advice}"
    )
