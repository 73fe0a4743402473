"""What the process of one program does: it records the program, and ends."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphguard.capture.torch import adapters
from graphguard.capture.torch.escapes.ambient import Ambient
from graphguard.capture.torch.lanes.run import NotByClasses
from graphguard.capture.torch.program import Program, flat_inputs, record_outputs
from graphguard.capture.torch.record.recorder import Recorder
from graphguard.capture.torch.record.sampled import Sample, SampledFolder
from graphguard.capture.torch.relation.inputs import is_a_part, localise, upper_bounds
from graphguard.capture.torch.sources import is_user_file
from graphguard.capture.torch.subject import Subject
from graphguard.capture.torch.world import ranks
from graphguard.capture.torch.world.objects import ObjectExchange, ObjectsMissing
from graphguard.errors import CaptureError, InternalError, ProgramError, UsageError, first_line
from graphguard.graph.ir import Graph, Source
from graphguard.graph.prune import prune


def record_sequential(
    subject: Subject, holders: adapters.Holders, ambient: Ambient, use_cache: bool, sample: Sample | None = None
) -> Graph:
    ranks.leave_any_group()
    recorder = Recorder(Graph("sequential"), use_cache=use_cache, opaque=subject.opaque or ())
    _answer_from(recorder, sample)
    adapters.adjust(recorder, holders)
    ambient.vary(holders)
    recorder.below = upper_bounds(subject.inputs)
    inputs = {name: recorder.tensor_input(name, spec.shape, spec.dtype) for name, spec in subject.inputs.items()}
    return record(subject.sequential, recorder, inputs, None, "the sequential program")


def _answer_from(recorder: Recorder, sample: Sample | None) -> None:
    """What the program reads is answered from a sample of the inputs, if there is one."""
    if sample is not None:
        recorder.constants = SampledFolder(recorder.graph, recorder.constants.kernels, sample)


def record_rank(
    subject: Subject, rank: int, holders: adapters.Holders, ambient: Ambient, objects: ObjectExchange, use_cache: bool,
    sample: Sample | None = None,
) -> list[Graph]:  # fmt: skip
    mesh = ranks.become_rank(rank, subject.mesh)
    relation = Recorder(Graph(f"inputs of rank {rank}", mesh=subject.mesh, rank=rank), use_cache=use_cache)
    graph = Graph(f"rank {rank}", mesh=subject.mesh, rank=rank)
    recorder = Recorder(graph, use_cache=use_cache, opaque=subject.opaque or ())
    _answer_from(recorder, sample)
    adapters.adjust(recorder, holders, objects)
    ambient.vary(holders)
    local = local_inputs(subject, subject.mesh.coordinate(rank), relation, f"rank {rank}")
    relation.graph.outputs = {name: relation.value(tensor) for name, tensor in flat_inputs(local).items()}
    prune(relation.graph)
    fresh = fresh_inputs(subject, recorder, local)
    try:
        return [relation.graph, record(subject.distributed, recorder, fresh, mesh, f"rank {rank}")]
    except ObjectsMissing as error:
        error.relation = relation.graph
        raise


def local_inputs(subject: Subject, coordinate: dict[str, Any], relation: Recorder, who: str) -> dict[str, Any]:
    """Trace how the sequential inputs become this rank's."""
    full = {name: relation.tensor_input(name, spec.shape, spec.dtype) for name, spec in subject.inputs.items()}

    def part(tensor: torch.Tensor, key: str, index: int, count: int) -> torch.Tensor:
        relation.locate()
        value = relation.new_value(tensor.shape, tensor.dtype)
        relation.emit("gg.part", (relation.value(tensor), key, relation.number(index), count), {}, (value,))
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

    return _guarded(trace, relation, f"the input relation of {who}")  # type: ignore[no-any-return]


def fresh_inputs(subject: Subject, recorder: Recorder, local: dict[str, Any]) -> dict[str, Any]:
    """New, contiguous tensors of the local inputs' shapes; what is not a tensor stays."""
    names = iter(flat_inputs(local))

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return recorder.tensor_input(next(names), leaf.shape, leaf.dtype)

    found: dict[str, Any] = pytree.tree_map(fresh, local)
    if subject.local_inputs is not None:
        subject.distributed.check(list(found))
    else:
        recorder.below = upper_bounds(
            {name: spec for name, spec in subject.inputs.items() if is_a_part(name, spec, subject.mesh)}
        )
    return found


def record(program: Program, recorder: Recorder, inputs: dict[str, Any], mesh: Any, who: str) -> Graph:
    def run() -> None:
        record_outputs(recorder, program.run(recorder, inputs, mesh))

    recorder.is_program = True
    try:
        _guarded(run, recorder, who)
    except (ProgramError, ObjectsMissing) as error:
        talk = [node for node in recorder.graph.nodes if node.communicates]
        error.before = Graph(recorder.graph.name, nodes=talk, mesh=recorder.graph.mesh, rank=recorder.graph.rank)
        if isinstance(error, ObjectsMissing) and isinstance(recorder.constants, SampledFolder):
            error.before = recorder.graph  # which is replayed, to know what other ranks receive
        raise
    if isinstance(recorder.constants, SampledFolder):
        recorder.constants.keep_reads()
    prune(recorder.graph)
    return recorder.graph


def _guarded(function: Callable[[], Any], recorder: Recorder, who: str) -> Any:
    """Run code of the user's, and turn what it raises into one sentence with the user's own frames."""
    try:
        result = function()
    except (UsageError, InternalError):
        raise
    except (ObjectsMissing, NotByClasses, KeyboardInterrupt):
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
