"""Captures the ranks of a program by classes: one run for all of them, then for those that a run left behind."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import numpy as np
from torch.distributed.device_mesh import init_device_mesh

from graphguard.capture.torch import adapters
from graphguard.capture.torch.child import fresh_inputs, local_inputs, record
from graphguard.capture.torch.escapes.ambient import Ambient
from graphguard.capture.torch.lanes.groups import Teams
from graphguard.capture.torch.lanes.libraries import adjust_dtensor, adjust_fsdp, send_to_peers
from graphguard.capture.torch.lanes.megatron import share_megatron_groups
from graphguard.capture.torch.lanes.number import behave_as_ints, varying
from graphguard.capture.torch.lanes.objects import LaneObjects
from graphguard.capture.torch.lanes.parts import take_parts_by_numbers
from graphguard.capture.torch.lanes.recorder import LaneRecorder
from graphguard.capture.torch.lanes.run import NotByClasses, Numbers, Run, Split, begin
from graphguard.capture.torch.program import flat_inputs
from graphguard.capture.torch.subject import Subject
from graphguard.capture.torch.world import ranks as world_ranks
from graphguard.capture.torch.world.collectives import look_groups_up_with
from graphguard.capture.torch.world.objects import ObjectsMissing, Sent
from graphguard.graph.ir import Graph
from graphguard.graph.prune import prune
from graphguard.graph.rank_class import RankClass


@dataclass
class ClassAnswer:
    """What a run found: the ranks that it stands for, and those that it left. why_not: why they are captured one by one.
    sent: objects, to other ranks, too. lacking: ranks that wait for objects of others, and are to be run again."""

    found: RankClass | None = None
    splits: list[Split] = field(default_factory=list)
    why_not: str | None = None
    sent: Sent = field(default_factory=dict)
    lacking: Numbers | None = None


def record_class(subject: Subject, ranks: Numbers, holders: adapters.Holders, known: Sent, use_cache: bool) -> bytes:
    """In a process of its own: the program, for as many of these ranks as do the same. A pickle of the answer, in which no
    number may vary any more."""
    run, objects = begin(ranks), LaneObjects(known)
    try:
        return pickle.dumps(_recorded(subject, run, holders, objects, use_cache), pickle.HIGHEST_PROTOCOL)
    except NotByClasses as reason:
        return pickle.dumps(ClassAnswer(why_not=str(reason)))
    except ObjectsMissing:
        return pickle.dumps(ClassAnswer(splits=run.splits, sent=objects.sent_by_active(), lacking=run.ranks[run.active]))


def _recorded(subject: Subject, run: Run, holders: adapters.Holders, objects: LaneObjects, use_cache: bool) -> ClassAnswer:
    behave_as_ints()
    world_ranks.become_rank_of_world(run.witness, subject.mesh)
    teams = Teams()
    teams.install(holders)
    look_groups_up_with(teams.group_of)
    mesh = init_device_mesh("cpu", subject.mesh.shape, mesh_dim_names=subject.mesh.names)
    relation = LaneRecorder(Graph("inputs of a class", mesh=subject.mesh, rank=run.witness), teams, use_cache=use_cache)
    graph = Graph("class", mesh=subject.mesh, rank=run.witness)
    recorder = LaneRecorder(graph, teams, use_cache=use_cache, opaque=subject.opaque or ())
    ambient = Ambient(run.witness, 0)
    adapters.adjust(recorder, holders, objects)
    ambient.vary(holders)
    send_to_peers(recorder, teams)
    take_parts_by_numbers()
    adjust_dtensor()
    adjust_fsdp()
    share_megatron_groups(holders, teams)
    who = f"rank {run.witness}"
    places = np.unravel_index(run.ranks, subject.mesh.shape)
    coordinate = {name: varying(np.asarray(each)) for name, each in zip(subject.mesh.names, places, strict=True)}
    local = local_inputs(subject, coordinate, relation, who)
    relation.graph.outputs = {name: relation.value(tensor) for name, tensor in flat_inputs(local).items()}
    prune(relation.graph)
    fresh = fresh_inputs(subject, recorder, local)
    record(subject.distributed, recorder, fresh, mesh, who)
    ambient.finish()
    if graph.findings:
        raise NotByClasses("something that is told of one rank")
    graph.assumptions = tuple(sorted({*graph.assumptions, *ambient.lines()}))
    run.sealed = True
    found = RankClass(run.ranks, relation.graph, graph)
    found.keep(run.active)
    return ClassAnswer(found, run.splits, sent=objects.sent_by_active())
