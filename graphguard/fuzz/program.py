"""A random program: the sequential side, and ranks that do the same with parts of the inputs, with communication and with steps
of their own in between. Whether that is a refinement nobody knows; what the prover says of it is compared with what it does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphguard.capture.torch.program import record_outputs
from graphguard.capture.torch.record.recorder import Recorder
from graphguard.capture.torch.relation.inputs import chunk
from graphguard.capture.torch.world import ranks
from graphguard.capture.torch.world.collectives import know_groups
from graphguard.capture.torch.world.waits import watch_waits
from graphguard.fuzz.steps import KINDS, Work, operands
from graphguard.graph.class_matching import world_of
from graphguard.graph.ir import Graph, Mesh
from graphguard.graph.matching import Joint, join
from graphguard.graph.prune import prune
from graphguard.graph.wellformed import require_wellformed
from graphguard.graph.world import World

MOST_ELEMENTS = 2048  # of a tensor
_SHAPES = ((4,), (4, 2), (2, 4), (4, 4), (8,), (4, 3), (2, 2, 2), (1, 4), (6,), ())
_INPUT_DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.int64, torch.bool, torch.uint8)
_MESHES = ({"world": 1}, {"world": 2}, {"world": 2}, {"world": 2}, {"world": 3}, {"world": 4}, {"a": 2, "b": 2})


@dataclass(frozen=True)
class Given:
    """An input: whole, or cut along a dim over an axis of the mesh. `high` declares 0 <= v < high."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: tuple[int, str] | None
    high: int | None

    def local(self, full: Tensor, mesh: Mesh, rank: int) -> Tensor:
        if self.cut is None:
            return full
        dim, axis = self.cut
        return chunk(full, dim, mesh.coordinate(rank)[axis], dict(mesh.axes)[axis])


@dataclass(frozen=True)
class Step:
    """The new tensor of each side is made of earlier ones; where a side does not take the step, it is the first of them.

    work: of the operands, for a step that all may take. talk: of the operand and a Talk, for one of the ranks alone.
    """

    name: str
    slots: tuple[int, ...]
    work: Work | None = None
    talk: Callable[[Tensor, Any], Tensor] | None = None
    ranks_only: bool = False
    only: int | None = None  # the one rank that takes it

    def on_sequential(self, tensors: Sequence[Tensor]) -> Tensor:
        if self.work is None or self.ranks_only:
            return tensors[self.slots[0]]
        return self.work(*(tensors[slot] for slot in self.slots))

    def on_rank(self, tensors: Sequence[Tensor], talk: Any) -> Tensor:
        if self.only is not None and self.only != talk.rank:
            return tensors[self.slots[0]]
        if self.talk is not None:
            return self.talk(tensors[self.slots[0]], talk)
        assert self.work is not None
        return self.work(*(tensors[slot] for slot in self.slots))


class Talk:
    """What a rank does with the others; here, to the shapes alone."""

    def __init__(self, mesh: Mesh, rank: int):
        self.mesh, self.rank = mesh, rank

    def size(self, axis: str) -> int:
        return dict(self.mesh.axes)[axis]

    def at(self, axis: str) -> int:
        return self.mesh.coordinate(self.rank)[axis]

    def all_reduce(self, x: Tensor, axis: str, reduce: str) -> Tensor:
        return x.clone()

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        return x.new_empty(x.shape[0] * self.size(axis), *x.shape[1:])

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        if x.shape[0] % self.size(axis):
            raise ValueError("it cannot be scattered")
        return x.new_empty(x.shape[0] // self.size(axis), *x.shape[1:])

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        if x.shape[0] % self.size(axis):
            raise ValueError("it cannot be dealt")
        return x.new_empty(x.shape)

    def broadcast(self, x: Tensor, axis: str, root: int) -> Tensor:
        return x.clone()

    def shift(self, x: Tensor, axis: str) -> Tensor:
        return x.new_empty(x.shape)


class Dist(Talk):
    """The same through torch.distributed."""

    def __init__(self, mesh: Mesh, rank: int, device_mesh: Any):
        super().__init__(mesh, rank)
        self.groups = {axis: device_mesh.get_group(axis) for axis in mesh.names}

    def all_reduce(self, x: Tensor, axis: str, reduce: str) -> Tensor:
        y = x.clone()
        dist.all_reduce(y, getattr(dist.ReduceOp, reduce), group=self.groups[axis])
        return y

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        whole = super().all_gather(x, axis)
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.groups[axis])
        return whole

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        part = super().reduce_scatter(x, axis)
        dist.reduce_scatter_tensor(part, x.contiguous(), group=self.groups[axis])
        return part

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        dealt = super().all_to_all(x, axis)
        dist.all_to_all_single(dealt, x.contiguous(), group=self.groups[axis])
        return dealt

    def broadcast(self, x: Tensor, axis: str, root: int) -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(y, dist.get_global_rank(self.groups[axis], root), group=self.groups[axis])
        return y

    def shift(self, x: Tensor, axis: str) -> Tensor:
        group, size, here = self.groups[axis], self.size(axis), self.at(axis)
        after, before = (dist.get_global_rank(group, (here + step) % size) for step in (1, -1))
        y = super().shift(x, axis)
        sent = dist.P2POp(dist.isend, x.contiguous(), after, group)
        received = dist.P2POp(dist.irecv, y, before, group)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()
        return y


def _talks(chance: Random, x: Tensor, mesh: Mesh) -> tuple[str, Callable[[Tensor, Any], Tensor]]:
    """Communication, or something that each rank does with its own number."""
    axis, size = chance.choice(mesh.axes)
    reduce = chance.choice(["SUM", "SUM", "SUM", "AVG", "MAX", "MIN"] if x.is_floating_point() else ["SUM", "MAX", "MIN"])
    root = chance.randrange(size)
    found: dict[str, Callable[[Tensor, Any], Tensor]] = {
        "all_reduce": lambda x, talk: talk.all_reduce(x, axis, reduce),
        "all_reduce of a share": lambda x, talk: talk.all_reduce(x / size, axis, "SUM"),
        "broadcast": lambda x, talk: talk.broadcast(x, axis, root),
        "scale by the rank": lambda x, talk: x * (talk.rank + 1),
        "one rank's": lambda x, talk: x if talk.at(axis) == root else torch.zeros_like(x),
        "one rank's, summed": lambda x, talk: talk.all_reduce(x if talk.at(axis) == root else torch.zeros_like(x), axis, "SUM"),
        "shift": lambda x, talk: talk.shift(x, axis),
        "compare with the rank": lambda x, talk: x > talk.rank,
    }
    if x.dim():
        found |= {
            "all_gather": lambda x, talk: talk.all_gather(x, axis),
            "reduce_scatter": lambda x, talk: talk.reduce_scatter(x, axis),
            "all_to_all": lambda x, talk: talk.all_to_all(x, axis),
            "own part": lambda x, talk: chunk(x, x.dim() - 1, talk.at(axis), size),
            "gathered parts": lambda x, talk: talk.all_gather(chunk(x, 0, talk.at(axis), size), axis),
            "all_reduce ": lambda x, talk: talk.all_reduce(x, axis, "SUM"),
            "padded place": lambda x, talk: torch.cat([x * (place == talk.at(axis)) for place in range(size)]),
        }
    name = chance.choice(list(found))
    return name.strip(), found[name]


@dataclass
class RandomProgram:
    seed: int
    mesh: Mesh
    inputs: dict[str, Given]
    steps: list[Step] = field(default_factory=list)
    slots: tuple[int, ...] = ()  # of the outputs

    def sequential(self, **inputs: Tensor) -> dict[str, Tensor]:
        tensors = list(inputs.values())
        for step in self.steps:
            tensors.append(step.on_sequential(tensors))
        return {f"o{slot}": tensors[slot] for slot in self.slots}

    def distributed(self, talk: Talk, **inputs: Tensor) -> dict[str, Tensor]:
        tensors = list(inputs.values())
        for step in self.steps:
            tensors.append(step.on_rank(tensors, talk))
        return {f"o{slot}": tensors[slot] for slot in self.slots}

    @property
    def ranges(self) -> dict[str, tuple[int | None, int | None]]:
        return {name: (0, given.high) for name, given in self.inputs.items() if given.high is not None}

    def __str__(self) -> str:
        lines = [f"seed {self.seed} on {self.mesh}"]
        lines += [f"  input {name}: {given}" for name, given in self.inputs.items()]
        first = len(self.inputs)
        for number, step in enumerate(self.steps, first):
            where = f" on rank {step.only}" if step.only is not None else " on ranks" if step.ranks_only or step.talk else ""
            lines.append(f"  {number}: {step.name} of {step.slots}{where}")
        return "\n".join([*lines, f"  outputs {self.slots}"])


# ---------------------------------------------------------------------- growing
class _Growth:
    """A program, and the shapes that it has so far."""

    def __init__(self, seed: int):
        self.chance = Random(seed)
        mesh = Mesh.of(self.chance.choice(_MESHES))
        inputs = {f"x{n}": self._input(mesh) for n in range(self.chance.randint(2, 4))}
        self.program = RandomProgram(seed, mesh, inputs)
        whole = {name: torch.empty(given.shape, dtype=given.dtype, device="meta") for name, given in inputs.items()}
        self.sequential = list(whole.values())
        self.ranks = [[given.local(whole[n], mesh, rank) for n, given in inputs.items()] for rank in range(mesh.size)]
        self.talks = [Talk(mesh, rank) for rank in range(mesh.size)]

    def _input(self, mesh: Mesh) -> Given:
        chance = self.chance
        shape, dtype, (axis, size) = chance.choice(_SHAPES), chance.choice(_INPUT_DTYPES), chance.choice(mesh.axes)
        dims = [dim for dim, extent in enumerate(shape) if extent % size == 0]
        cut = (chance.choice(dims), axis) if dims and chance.random() < 0.5 else None
        declared = dtype == torch.int64 and chance.random() < 0.6
        return Given(shape, dtype, cut, chance.randint(1, 5) if declared else None)

    def grow(self, count: int) -> RandomProgram:
        for _ in range(8 * count):
            if len(self.program.steps) >= count:
                break
            step = self._drawn()
            if step is not None:
                self._take(step)
        made = range(len(self.program.inputs), len(self.sequential))
        self.program.slots = tuple(sorted(self.chance.sample(made, min(4, len(made)))))
        return self.program

    def _drawn(self) -> Step | None:
        chance = self.chance
        if self.program.mesh.size > 1 and chance.random() < 0.3:
            slot = chance.randrange(len(self.sequential))
            name, talk = _talks(chance, self.sequential[slot], self.program.mesh)
            return Step(name, (slot,), talk=talk)
        kind = chance.choices(KINDS, [each.often for each in KINDS])[0]
        slots = operands(chance, kind, self.sequential)
        if slots is None:
            return None
        work = kind.draw(chance, *(self.sequential[slot] for slot in slots))
        if work is None:
            return None
        alone = kind.partial or kind.name == "nothing" or chance.random() < 0.1
        only = chance.randrange(self.program.mesh.size) if alone and chance.random() < 0.2 else None
        return Step(kind.name, tuple(slots), work, ranks_only=alone, only=only)

    def _take(self, step: Step) -> None:
        """Keep a step that all sides can take."""
        try:
            with torch.device("meta"):
                whole = step.on_sequential(self.sequential)
                parts = [step.on_rank(tensors, talk) for tensors, talk in zip(self.ranks, self.talks, strict=True)]
        except Exception:  # whatever torch says to a step that does not fit
            return
        alike = len({(part.shape, part.dtype) for part in parts}) == 1
        if max(whole.numel(), *(part.numel() for part in parts)) > MOST_ELEMENTS or not alike or whole.dim() > 5:
            return
        self.program.steps.append(step)
        self.sequential.append(whole)
        for tensors, part in zip(self.ranks, parts, strict=True):
            tensors.append(part)


def grown(seed: int) -> RandomProgram:
    """The program of a number."""
    chance = Random(f"length {seed}")
    return _Growth(seed).grow(chance.randint(3, 14))


# ---------------------------------------------------------------------- graphs
@dataclass(frozen=True)
class Graphs:
    sequential: Graph
    joint: Joint
    relations: list[Graph]

    def world(self) -> World:
        return world_of(self.joint, self.relations)


def graphs_of(program: RandomProgram) -> Graphs:
    """Both sides as capture records them, all in this process: the steps leave nothing behind. But torch is patched, so that
    the process is good for nothing else."""
    with _quiet():
        ranks.leave_any_group()
        sequential = _recorded(Graph("sequential"), program.inputs, program.sequential)
        relations, graphs = [], []
        for rank in range(program.mesh.size):
            device_mesh = ranks.become_rank(rank, program.mesh)
            know_groups()
            relations.append(_relation(program, rank))
            local = {
                name: Given(value.shape, program.inputs[name].dtype, None, None)
                for name, value in relations[-1].outputs.items()
                if value is not None
            }
            talk = Dist(program.mesh, rank, device_mesh)
            run = lambda talk=talk, **inputs: program.distributed(talk, **inputs)  # noqa: E731
            graphs.append(_recorded(Graph(f"rank {rank}", mesh=program.mesh, rank=rank), local, run))
        ranks.leave_any_group()
    return Graphs(sequential, join(graphs), relations)


def _relation(program: RandomProgram, rank: int) -> Graph:
    local = lambda **full: {name: given.local(full[name], program.mesh, rank) for name, given in program.inputs.items()}  # noqa: E731
    return _recorded(Graph(f"inputs of rank {rank}", mesh=program.mesh, rank=rank), program.inputs, local)


def _recorded(graph: Graph, inputs: dict[str, Given], run: Callable[..., dict[str, Tensor]]) -> Graph:
    recorder = Recorder(graph)
    recorder.is_program = True
    watch_waits(recorder)
    given = {name: recorder.tensor_input(name, each.shape, each.dtype) for name, each in inputs.items()}
    with recorder:
        outputs = run(**given)
    record_outputs(recorder, outputs)
    if recorder.failure is not None:
        raise recorder.failure
    prune(graph)
    require_wellformed(graph)
    return graph


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
