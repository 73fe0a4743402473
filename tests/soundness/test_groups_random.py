"""Random programs that make groups, overlapping ones too, and communicate over them: what matching says against real gloo.

A program is a list of events per rank. Some are right; in others one rank makes its groups in another order, leaves one out, or
leaves out a call. Those that fit together must give on real ranks what replay gives; those that hang or raise there must have
a finding. `GRAPHGUARD_GROUP_PROGRAMS=500 GRAPHGUARD_GROUP_SEED=7 pytest tests/soundness/test_groups_random.py` runs more.
"""

from __future__ import annotations

import datetime
import os
import pickle
import random
import signal
import tempfile
import time
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import assert_same, capture_ranks, flat, join_both_ways, rank_inputs

import graphguard as gg
from graphguard.capture.torch import session
from graphguard.errors import MismatchError
from graphguard.oracle.replay import replay_joint

COUNT = int(os.environ.get("GRAPHGUARD_GROUP_PROGRAMS", "20"))
SEED = int(os.environ.get("GRAPHGUARD_GROUP_SEED", "3"))
PROVED = 4  # of the programs that fit together, so many in the suite are verified as well
PATIENCE, HANGS_AFTER = 120, 3  # seconds: for programs that must come to their end, and for those that must not
AT_ONCE = 8


@dataclass(frozen=True)
class Event:
    """What a rank does: make a group, or take part in a communication over one."""

    what: str
    group: tuple[int, ...]
    number: int = 0  # which of the groups it is; the world has the number -1
    local: bool = False  # whether only the members make it
    root: int = 0
    sorts: bool = True


@dataclass
class Groups:
    """A program of some ranks: for each, its events."""

    events: list[list[Event]]

    @property
    def size(self) -> int:
        return len(self.events)

    def __call__(self, x):
        made: dict[int, Any] = {-1: None}
        y = x * 1
        for event in self.events[dist.get_rank()]:
            if event.what == "make":
                options = {"use_local_synchronization": event.local, "sort_ranks": event.sorts}
                made[event.number] = dist.new_group(list(event.group), **options)
            elif event.number in made:
                y = communicated(event, made[event.number], y)
        return y


@pytest.fixture(autouse=True)
def matched_by_classes_too(monkeypatch):
    """Whatever is matched here is also matched by classes of ranks, and both must say the same."""
    monkeypatch.setattr(session, "join", join_both_ways)


def communicated(event: Event, group: Any, y: torch.Tensor) -> torch.Tensor:
    rank, root = dist.get_rank(), event.group[event.root]
    z = (y * 1).reshape(-1) if event.what == "other shape" and rank == root else y * 1
    if event.what in ("all_reduce", "other shape"):
        dist.all_reduce(z, group=group)
    elif event.what == "broadcast":
        dist.broadcast(z, root, group=group)
        z = z + y
    elif event.what == "reduce":
        dist.reduce(z, root, group=group)
        z = z if rank == root else y
    elif event.what == "all_gather":
        parts = [torch.empty_like(z) for _ in event.group]
        dist.all_gather(parts, z, group=group)
        z = sum(part * (place + 1) for place, part in enumerate(parts))
    elif event.what == "message":
        other = event.group[event.root - 1]
        if rank == root:
            dist.send(z, other, group=group)
        elif rank == other:
            dist.recv(z, root, group=group)
            z = z * 2 + y
    return z.reshape(y.shape)


CALLS = ("all_reduce", "broadcast", "reduce", "all_gather", "message", "other shape")


# ---------------------------------------------------------------------- drawing programs
def drawn(draw: random.Random) -> Groups:
    size = draw.choice((3, 4))
    local = draw.random() < 0.2
    groups = [tuple(sorted(draw.sample(range(size), draw.choice((1, 2, 2, 2, 3))))) for _ in range(draw.randint(2, 4))]
    story = [Event("make", group, number, local) for number, group in enumerate(groups)]
    for _ in range(draw.randint(2, 5)):
        number = draw.randrange(-1, len(groups))
        group = groups[number] if number >= 0 else tuple(range(size))
        what = draw.choice(CALLS if len(group) > 1 else ("all_reduce", "broadcast"))
        call = Event(what, group, number, root=draw.randrange(len(group)))
        story.insert(draw.randint(number + 1, len(story)) if draw.random() < 0.3 else len(story), call)
    made = {event.number: place for place, event in enumerate(story) if event.what == "make"}
    story = [e for place, e in enumerate(story) if e.what == "make" or made.get(e.number, -1) < place]
    events = [[e for e in story if rank in e.group or (e.what == "make" and not local)] for rank in range(size)]
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        disturb(draw, events)
    return Groups(events)


def disturb(draw: random.Random, events: list[list[Event]]) -> None:
    """One rank does something else than the others."""
    rank = draw.randrange(len(events))
    its = events[rank]
    makes = [n for n, event in enumerate(its) if event.what == "make"]
    if not makes:
        return
    kind = draw.choice(("swap", "leave out a group of others", "leave out", "turn", "alone"))
    at = draw.choice(makes)
    if kind == "swap" and len(makes) > 1:
        one, other = draw.sample(makes, 2)
        its[one], its[other] = its[other], its[one]
    elif kind == "leave out a group of others":
        strange = [n for n in makes if rank not in its[n].group]
        if strange:
            del its[draw.choice(strange)]
    elif kind == "leave out":
        del its[draw.randrange(len(its))]
    elif kind == "turn" and len(its[at].group) > 1:
        its[at] = Event("make", its[at].group[::-1], its[at].number, its[at].local, sorts=False)
    elif kind == "alone":
        its.insert(at, Event("make", (rank,), 100 + at))


# ---------------------------------------------------------------------- real ranks
class Real:
    """Processes that run programs one after another, each in a world of its own."""

    def __init__(self, programs: dict[int, Groups], seconds: float):
        self.programs, self.seconds, self.folder = programs, seconds, tempfile.TemporaryDirectory()
        self.size = max(program.size for program in programs.values())
        self.children, self.deadline = [], time.monotonic() + seconds
        for rank in range(self.size):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pid = os.fork()
            if pid == 0:
                self._run(rank)
            self.children.append(pid)

    def _run(self, rank: int) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        for number, program in self.programs.items():
            if rank >= program.size:
                continue
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{self.folder.name}/store{number}", rank=rank, world_size=program.size,
                    timeout=datetime.timedelta(seconds=self.seconds),
                )  # fmt: skip
                result: Any = flat(program(torch.eye(program.size, dtype=torch.float64)[rank : rank + 1]))
            except BaseException as error:
                result = f"{type(error).__name__}: {error}"
            with open(self._path(number, rank, ".part"), "wb") as file:
                pickle.dump(result, file)
            os.rename(self._path(number, rank, ".part"), self._path(number, rank))
            while not all(os.path.exists(self._path(number, other)) for other in range(program.size)):
                time.sleep(0.005)  # a rank that leaves closes its connections
            dist.destroy_process_group()
        os._exit(0)

    def _path(self, number: int, rank: int, suffix: str = "") -> str:
        return f"{self.folder.name}/{number}.{rank}{suffix}"

    def results(self) -> dict[int, list[Any]]:
        """What the ranks of each program gave: outputs, the words of an exception, or None if they hang."""
        alive = set(self.children)
        while alive and time.monotonic() < self.deadline:
            alive -= {pid for pid in alive if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.01)
        found = {number: [self._result(number, rank) for rank in range(p.size)] for number, p in self.programs.items()}
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.folder.cleanup()
        return found

    def _result(self, number: int, rank: int) -> Any:
        try:
            with open(self._path(number, rank), "rb") as file:
                return pickle.load(file)
        except FileNotFoundError:
            return None


# ---------------------------------------------------------------------- what is claimed
@dataclass
class Claim:
    """What matching says of a program: a finding, or what every rank returns."""

    finding: str | None
    outputs: list[dict[str, torch.Tensor]]


def claimed(program: Groups) -> Claim:
    inputs = {"x": gg.Input((program.size, program.size), gg.Shard(0), torch.float64)}
    try:
        captured = capture_ranks(program, program.size, inputs)
    except MismatchError as error:
        return Claim(error.finding.message, [])
    if captured.joint.findings:
        return Claim(captured.joint.findings[0].message, [])
    mine = rank_inputs(captured, {"x": torch.eye(program.size, dtype=torch.float64)})
    return Claim(None, replay_joint(captured.joint, mine))


@pytest.fixture(scope="module")
def claims() -> dict[int, tuple[Groups, Claim]]:
    draw = random.Random(SEED)
    programs = [drawn(draw) for _ in range(COUNT)]
    return {number: (program, claimed(program)) for number, program in enumerate(programs)}


def verdict(program: Groups, weights: torch.Tensor) -> str:
    inputs = {"x": gg.Input((program.size, program.size), gg.Shard(0), torch.float64)}
    rows = [[float(weight) for weight in row] for row in weights]

    def sequential(x):
        return torch.cat([sum(x[n : n + 1] * weight for n, weight in enumerate(row)) for row in rows])

    return gg.verify(sequential, program, mesh=program.size, inputs=inputs, outputs={"out": gg.Shard(0)}).verdict


@pytest.mark.gloo
def test_programs_that_fit_together_give_on_real_ranks_what_replay_gives(claims):
    fitting = {number: program for number, (program, claim) in claims.items() if claim.finding is None}
    assert len(fitting) >= COUNT // 4
    for number, results in Real(fitting, PATIENCE).results().items():
        program, claim = claims[number]
        for rank, (have, want) in enumerate(zip(claim.outputs, results, strict=True)):
            assert isinstance(want, dict), f"program {number}, {program.events}: rank {rank} {want or 'hangs'}"
            assert_same(have, want, who=f"program {number}, rank {rank}")


@pytest.mark.gloo
def test_programs_with_a_finding_do_not_come_to_their_end_on_real_ranks(claims):
    faulty = {number: program for number, (program, claim) in claims.items() if claim.finding is not None}
    assert len(faulty) >= COUNT // 6
    left = list(faulty.items())
    while left:
        running = [Real({number: program}, HANGS_AFTER) for number, program in left[:AT_ONCE]]
        left = left[AT_ONCE:]
        for real in running:
            for number, results in real.results().items():
                finding = claims[number][1].finding
                ends = all(isinstance(result, dict) for result in results)
                # groups that are made under one name may find their own members, by luck
                assert not ends or "a group of ranks" in str(finding), (number, faulty[number].events, finding)


def test_the_proof_knows_what_overlapping_groups_compute(claims):
    """Some stay unproven: a reduction that only its root holds, beside more of what single ranks sent."""
    fitting = [number for number, (_, claim) in claims.items() if claim.finding is None]
    chosen = fitting[:PROVED] if "GRAPHGUARD_GROUP_PROGRAMS" not in os.environ else fitting
    verdicts = []
    for number in chosen:
        program, claim = claims[number]
        weights = torch.cat([outputs["out"] for outputs in claim.outputs])
        verdicts.append(verdict(program, weights))
        assert verdicts[-1] != "refuted", program.events
        wrong = weights.clone()
        wrong[-1, 0] += 1
        assert verdict(program, wrong) == "refuted", program.events
    assert verdicts.count("verified") >= 0.75 * len(verdicts), verdicts
