"""torch.distributed for many ranks at once: whoever asks a group about ranks is answered for all lanes.

The ranks of one run stand in different groups of one kind. Behind them stands one fake ProcessGroup, that of the witness; a
`Team` says which group each lane is in, and at which place of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from graphguard.capture.torch.adapters.holders import Holders
from graphguard.capture.torch.lanes.number import numbers_of, one_for_all, settled, varies, varying
from graphguard.capture.torch.lanes.run import NotByClasses, Numbers, current
from graphguard.graph.rank_class import Groups, PerRank

Site = tuple[tuple[CodeType, int], ...]
_RANK_NAMES = ("RANK", "LOCAL_RANK", b"RANK", b"LOCAL_RANK")  # of the environment


class Team:
    """Groups of one size that do not overlap. What they are to lanes in none of them is not said."""

    def __init__(self, members: Numbers, channels: Sequence[int]):
        self.members = members
        world = max(int(members.max()), int(current().ranks.max())) + 1
        self._row, self._place = np.full(world, -1), np.full(world, -1)
        rows, places = np.indices(members.shape)
        self._row[members], self._place[members] = rows, places
        self.rows, self.places = self._row[current().ranks], self._place[current().ranks]
        self.channels = np.array(channels)[np.maximum(self.rows, 0)]

    @property
    def size(self) -> int:
        return int(self.members.shape[1])

    def member(self, place: Any) -> Any:
        """The rank at a place of each lane's group."""
        return varying(self.members[self.rows, numbers_of(place)])

    def ranks(self) -> RankList:
        return RankList(self.member(place) for place in range(self.size))

    def place_of(self, rank: Any) -> Any:
        ranks = current().over_lanes(numbers_of(rank))
        inside = (ranks >= 0) & (ranks < len(self._row))
        ranks = np.where(inside, ranks, 0)
        if not current().forced(inside & (self._row[ranks] == self.rows), "a rank of a group"):
            raise ValueError(f"Global rank {rank} is not part of group")
        return varying(self._place[ranks])


class RankList(list[Any]):
    """The ranks of each lane's own group. Whether a rank is one of them is asked of all at once: each by itself would split."""

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, (int, torch.SymInt)):
            return super().__contains__(rank)
        return bool(current().forced(self._at(rank) >= 0, "membership of a group"))

    def index(self, rank: Any, *bounds: Any) -> Any:
        return super().index(rank, *bounds) if bounds or rank not in self else varying(self._at(rank))

    def _at(self, rank: Any) -> Numbers:
        """The place of a rank in each lane's list; -1 where it has none."""
        places = np.full(len(current().ranks), -1)
        for place, member in reversed(list(enumerate(self))):
            places[current().over_lanes(numbers_of(member) == numbers_of(rank))] = place
        return places


class LaneGroup:
    """What the recording of a collective asks of a group, as `world.collectives.Group` has it."""

    def __init__(self, team: Team):
        self._team = team
        self.attributes: dict[str, Any] = {"group": Groups(team.members, team.rows)}
        if team.channels.any():
            self.attributes["channel"] = PerRank(team.channels)

    def __len__(self) -> int:
        return self._team.size

    def __iter__(self) -> Iterator[Any]:
        raise NotByClasses("the ranks of a group are gone through")

    def members_of(self, lane: int) -> tuple[int, ...]:
        return tuple(self._team.members[self._team.rows[lane]].tolist())

    def channel_of(self, lane: int) -> int:
        return int(self._team.channels[lane])

    def member(self, number: Any) -> Any:
        run = current()
        numbers = run.over_lanes(numbers_of(number))
        if not run.forced((numbers >= 0) & (numbers < len(self)), "a member of a group"):
            raise ValueError(f"the group has no rank {number} to send to or receive from")
        ranks = self._team.members[self._team.rows, np.clip(numbers, 0, len(self) - 1)]
        return run.of_witness(ranks) if run.agree(ranks) else PerRank(ranks)


class Teams:
    """All groups, by the name of the witness's, and torch's functions that are asked about them."""

    def __init__(self) -> None:
        self._teams: dict[str, Team] = {}
        self._known: dict[str, LaneGroup] = {}
        self._counts: Counter[tuple[int, ...]] = Counter()  # of groups over the same ranks
        self._plainly = 0  # above zero, torch's own code runs as the witness alone
        self._made: list[MadeGroup] = []  # groups, since the witness alone began to make some

    # ------------------------------------------------------------------ groups
    @contextlib.contextmanager
    def as_witness(self) -> Iterator[None]:
        self._plainly += 1
        try:
            yield
        finally:
            self._plainly -= 1

    def _channel(self, ranks: Sequence[int]) -> int:
        """Which of the groups over the same ranks a new one is."""
        self._counts[tuple(ranks)] += 1
        return self._counts[tuple(ranks)] - 1

    def of(self, group: Any) -> Team:
        group = c10d._get_default_group() if group is None else group
        name = group if isinstance(group, str) else group.group_name
        if name not in self._teams:
            raise NotByClasses("a group that was not made for many ranks")
        return self._teams[name]

    def group_of(self, given: Any) -> LaneGroup:
        """A group, given by its name, as a ProcessGroup, or in the boxed form that operators receive."""
        given = ProcessGroup.unbox(given) if isinstance(given, torch.ScriptObject) else given
        name = given if isinstance(given, str) else given.group_name
        if name not in self._known:
            self._known[name] = LaneGroup(self.of(given))
        return self._known[name]

    # ------------------------------------------------------------------ what torch asks
    def install(self, holders: Holders) -> None:
        """Patches torch for the rest of this process, which is the witness's."""
        world = range(dist.get_world_size())
        self._teams[c10d._get_default_group().group_name] = Team(np.array([world]), [self._channel(world)])
        bare_rank, teams = ProcessGroup.rank, self
        ProcessGroup.rank = lambda self: (  # type: ignore[method-assign]
            bare_rank(self) if teams._plainly else varying(teams.of(self).places)
        )
        for function, answer in (
            (c10d.get_process_group_ranks, self._ranks),
            (c10d.get_global_rank, self._global_rank),
            (c10d.get_group_rank, self._group_rank),
            (c10d.new_subgroups, self._new_subgroups),
            (c10d.new_subgroups_by_enumeration, self._new_subgroups),
        ):
            holders.replace(function, self._unless_plain(function, answer))
        holders.replace(c10d.new_group, self._unless_plain(c10d.new_group, self._new_group, self._noted))
        self._install_meshes()
        self._install_environment()

    def _unless_plain(
        self, bare: Callable[..., Any], answer: Callable[..., Any], plainly: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            if not self._plainly:
                return answer(bare, *args, **kwargs)
            return bare(*args, **kwargs) if plainly is None else plainly(bare, *args, **kwargs)

        return function

    def _ranks(self, bare: Callable[..., Any], group: Any) -> list[Any]:
        return self.of(group).ranks()

    def _global_rank(self, bare: Callable[..., Any], group: Any, group_rank: Any) -> Any:
        team = self.of(group)
        numbers = current().over_lanes(numbers_of(group_rank))
        if not current().forced((numbers >= 0) & (numbers < team.size), "a rank of a group"):
            with self.as_witness():
                return bare(group, one_for_all(group_rank, "a rank of a group"))
        return team.member(varying(np.clip(numbers, 0, team.size - 1)))

    def _group_rank(self, bare: Callable[..., Any], group: Any, global_rank: Any) -> Any:
        return self.of(group).place_of(global_rank)

    # ------------------------------------------------------------------ new groups
    def made_together(self, make: Callable[[], Any]) -> tuple[Any, list[MadeGroup]]:
        """Run code of torch or of a library that makes groups and keeps those that it is in, as the witness. Then each lane has
        its own of the groups that were made at one place. Lanes that are in none, or in one of another size, leave the run."""
        with self.as_witness():
            before, self._made = self._made, []
            try:
                result, made = make(), self._made
            finally:
                self._made = before
        kinds: dict[Site, list[MadeGroup]] = {}
        for group in made:
            kinds.setdefault(group.site, []).append(group)
        for groups in kinds.values():
            self._share(groups)
        return result, made

    def _share(self, groups: list[MadeGroup]) -> None:
        """One of these groups for each lane, under the name of the witness's."""
        size_of = np.zeros(dist.get_world_size(), dtype=np.int64)
        for group in groups:
            if size_of[list(group.ranks)].any():
                raise NotByClasses("groups that are made at one place and share ranks")
            size_of[list(group.ranks)] = len(group.ranks)
        size = current().forced(size_of[current().ranks], "membership of new groups")
        alike = [group for group in groups if len(group.ranks) == size]
        members = np.array([group.ranks for group in alike], dtype=np.int64)
        for group in alike:
            if group.name is not None:
                self._teams[group.name] = Team(members, [each.channel for each in alike])

    def _new_group(self, bare: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and any(varies(rank) for rank in ranks):
            raise NotByClasses("a group whose ranks depend on the rank that makes it")
        plain = None if ranks is None else [int(one_for_all(rank, "a new group")) for rank in ranks]
        return self.made_together(lambda: self._noted(bare, plain, *args, **kwargs))[0]

    def _noted(self, bare: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A group that is made as the witness."""
        group = bare(ranks, *args, **kwargs)
        members = range(dist.get_world_size()) if ranks is None else sorted(ranks)
        name = group.group_name if isinstance(group, ProcessGroup) else None
        if name not in self._teams:
            self._made.append(MadeGroup(_site(), tuple(members), self._channel(members), name))
        return group

    def _new_subgroups(self, bare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = one_for_all(args, "new groups"), {name: one_for_all(arg, name) for name, arg in kwargs.items()}
        (own, groups), made = self.made_together(lambda: bare(*args, **kwargs))
        row_of = np.full(dist.get_world_size(), -1)
        for row, group in enumerate(made):
            row_of[list(group.ranks)] = row
        return own, _Subgroups(own, groups, row_of[current().ranks])

    def _install_meshes(self) -> None:
        bare_init, bare_one = DeviceMesh.__init__, DeviceMesh._init_one_process_group
        teams = self

        def init_one(*args: Any) -> Any:
            return teams.made_together(lambda: bare_one(*args))[0]

        def init(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
            with teams.as_witness():
                bare_init(mesh, *args, **kwargs)
                full = mesh._layout.remap_to_tensor(mesh._rank_map).numpy()
            places = _places(full)
            ranks = current().ranks
            if not current().forced(places[0][ranks] >= 0 if len(places) else ranks >= 0, "membership of a mesh"):
                return
            mesh._rank = varying(ranks)
            mesh._coordinate_on_dim = tuple(varying(each[ranks]) for each in places)

        def own_part(full: torch.Tensor, current_rank: Any = None) -> torch.Tensor:
            if full.size(0) == 1:
                return full[0]
            rows = _places(full.numpy(), first=0)[0][current().ranks]
            plainly = bool(teams._plainly)
            return full[current().of_witness(rows) if plainly else current().forced(rows, "the ranks of a mesh")]

        DeviceMesh.__init__ = init
        DeviceMesh._init_one_process_group = staticmethod(init_one)
        DeviceMesh._get_mesh_tensor_from_full_mesh = staticmethod(own_part)

    def mesh_ranks(self, mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """The shape of a mesh, and its ranks, which are others for each lane if it is part of a larger one."""
        full = mesh._layout.remap_to_tensor(mesh._rank_map).numpy()
        rows = _places(full, first=0)[0][current().ranks]
        own = full.reshape(len(full), -1)[rows]
        ranks = (own[:, place] for place in range(own.shape[1]))
        return full.shape[1:], tuple(current().of_witness(each) if current().agree(each) else PerRank(each) for each in ranks)

    def _install_environment(self) -> None:
        """A text cannot vary: who reads a rank in the environment is one of those that have it."""
        bare = type(os.environ).__getitem__

        def getitem(environ: Any, key: Any) -> Any:
            if key in _RANK_NAMES and not self._plainly:
                rank = str(current().forced(current().ranks, "a rank of the environment"))
                return rank if isinstance(key, str) else rank.encode()
            return bare(environ, key)

        type(os.environ).__getitem__ = getitem  # type: ignore[method-assign]


class _Subgroups(list[Any]):
    """Groups that do not overlap, of which each lane is in one: whoever takes any of them is in the same one as all others."""

    def __init__(self, own: Any, groups: Sequence[Any], rows: Numbers):
        super().__init__(groups)
        self._own, self._rows = own, rows

    def __getitem__(self, index: Any) -> Any:
        if varies(index) and bool((numbers_of(index) == self._rows)[current().active].all()):
            return self._own
        current().forced(self._rows, "one of the new groups")
        return super().__getitem__(settled(index))

    def __iter__(self) -> Iterator[Any]:
        current().forced(self._rows, "one of the new groups")
        return super().__iter__()


@dataclass(frozen=True)
class MadeGroup:
    """A group that was made as the witness: where, and how it is called there if the witness is in it."""

    site: Site
    ranks: tuple[int, ...]
    channel: int
    name: str | None


def _site() -> Site:
    """The lines that are being executed, from where groups are made together."""
    frame: FrameType | None = sys._getframe(2)
    lines = []
    while frame is not None and frame.f_code is not Teams.made_together.__code__:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def _places(full: Numbers, first: int = 1) -> list[Numbers]:
    """By dim from the first on, the place of each rank of the world; -1 of those that the mesh lacks."""
    found = []
    for dim in range(first, full.ndim):
        places = np.full(max(int(full.max()), int(current().ranks.max())) + 1, -1)
        places[full] = np.indices(full.shape)[dim]
        found.append(places)
    return found
