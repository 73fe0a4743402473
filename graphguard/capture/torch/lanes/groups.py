"""torch.distributed for many ranks at once: whoever asks a group about ranks is answered for all lanes.

The ranks of one run stand in different groups of one kind. Behind them stands one fake ProcessGroup, that of the witness; a
`Team` says which group each lane is in, and at which place of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from graphguard.capture.torch.adapters.holders import Holders
from graphguard.capture.torch.lanes.number import numbers_of, one_for_all, varies, varying
from graphguard.capture.torch.lanes.run import NotByClasses, Numbers, current
from graphguard.graph.rank_class import Groups, PerRank

_RANK_NAMES = ("RANK", "LOCAL_RANK")  # of the environment


class Team:
    """Groups of one size that do not overlap. What they are to lanes in none of them is not said."""

    def __init__(self, members: Numbers, channels: Numbers):
        self.members = members
        world = max(int(members.max()), int(current().ranks.max())) + 1
        self._row, self._place = np.full(world, -1), np.full(world, -1)
        rows, places = np.indices(members.shape)
        self._row[members], self._place[members] = rows, places
        self.rows, self.places = self._row[current().ranks], self._place[current().ranks]
        self.channels = channels[np.maximum(self.rows, 0)]

    @property
    def size(self) -> int:
        return int(self.members.shape[1])

    def member(self, place: Any) -> Any:
        """The rank at a place of each lane's group."""
        return varying(self.members[self.rows, numbers_of(place)])

    def ranks(self) -> list[Any]:
        return [self.member(place) for place in range(self.size)]

    def place_of(self, rank: Any) -> Any:
        ranks = current().over_lanes(numbers_of(rank))
        inside = (ranks >= 0) & (ranks < len(self._row))
        ranks = np.where(inside, ranks, 0)
        if not current().forced(inside & (self._row[ranks] == self.rows), "a rank of a group"):
            raise ValueError(f"Global rank {rank} is not part of group")
        return varying(self._place[ranks])


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
        self._counts: dict[bytes, int] = {}  # of groups over the same ranks
        self._plainly = 0  # above zero, torch's own code runs as the witness alone

    # ------------------------------------------------------------------ groups
    @contextlib.contextmanager
    def as_witness(self) -> Iterator[None]:
        self._plainly += 1
        try:
            yield
        finally:
            self._plainly -= 1

    def register(self, name: str, members: Numbers) -> None:
        counts = []
        for row in members:
            counts.append(self._counts.get(row.tobytes(), 0))
            self._counts[row.tobytes()] = counts[-1] + 1
        self._teams[name] = Team(np.ascontiguousarray(members), np.array(counts))

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
        self.register(c10d._get_default_group().group_name, np.arange(dist.get_world_size())[None])
        bare_rank, teams = ProcessGroup.rank, self
        ProcessGroup.rank = lambda self: (  # type: ignore[method-assign]
            bare_rank(self) if teams._plainly else varying(teams.of(self).places)
        )
        for function, answer in (
            (c10d.get_process_group_ranks, self._ranks),
            (c10d.get_global_rank, self._global_rank),
            (c10d.get_group_rank, self._group_rank),
            (c10d.new_group, self._new_group),
            (c10d.new_subgroups, self._new_subgroups),
            (c10d.new_subgroups_by_enumeration, self._new_subgroups_by_enumeration),
        ):
            holders.replace(function, self._unless_plain(function, answer))
        self._install_meshes()
        self._install_environment()

    def _unless_plain(self, bare: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return bare(*args, **kwargs) if self._plainly else answer(bare, *args, **kwargs)

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
    def _new_group(self, bare: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        """One group for all lanes. One that some lanes are in, and others are not, splits the run."""
        run = current()
        if ranks is not None and any(varies(rank) for rank in ranks):
            raise NotByClasses("a group whose ranks depend on the rank that makes it")
        with self.as_witness():
            plain = None if ranks is None else [int(one_for_all(rank, "a new group")) for rank in ranks]
            members = np.arange(dist.get_world_size()) if plain is None else np.array(sorted(plain), dtype=np.int64)
            inside = run.forced(np.isin(run.ranks, members), "membership of a new group")
            group = bare(plain, *args, **kwargs)
        if inside and group.group_name not in self._teams:
            self.register(group.group_name, members[None])
        return group

    def _new_subgroups(self, bare: Callable[..., Any], group_size: Any = None, *args: Any, **kwargs: Any) -> Any:
        raise NotByClasses("dist.new_subgroups")

    def _new_subgroups_by_enumeration(
        self, bare: Callable[..., Any], rows: Sequence[Sequence[int]], *args: Any, **kwargs: Any
    ) -> Any:
        """Each lane is in one of the groups; those of others are of no use to it."""
        if len({len(row) for row in rows}) != 1:
            raise NotByClasses("groups of several sizes")
        members = np.array([sorted(one_for_all(list(row), "a new group")) for row in rows], dtype=np.int64)
        if not current().forced(np.isin(current().ranks, members), "membership of new groups"):
            raise NotByClasses("groups that leave out ranks")
        with self.as_witness():
            own, groups = bare(rows, *args, **kwargs)
        self.register(own.group_name, members)
        return own, [own if group is own else _OfOthers() for group in groups]

    def _install_meshes(self) -> None:
        bare_init, bare_one = DeviceMesh.__init__, DeviceMesh._init_one_process_group
        teams = self

        def init_one(sub_layout: Any, rank_map: Any, dim_name: str, backend_override: Any) -> Any:
            from torch.distributed._mesh_layout import _MeshLayout

            with teams.as_witness():
                name = bare_one(sub_layout, rank_map, dim_name, backend_override)
                members = _MeshLayout([sub_layout]).remap_to_tensor(rank_map).numpy().astype(np.int64)
            if name is not None and name not in teams._teams:
                teams.register(name, members)
            return name

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
            if key in _RANK_NAMES and environ is os.environ and not self._plainly:
                return str(current().forced(current().ranks, f"the variable {key}"))
            return bare(environ, key)

        type(os.environ).__getitem__ = getitem  # type: ignore[method-assign]


class _OfOthers:
    """A group of other ranks, which means another thing in each lane."""

    def __getattr__(self, name: str) -> Any:
        raise NotByClasses("a group of other ranks is used")


def _places(full: Numbers, first: int = 1) -> list[Numbers]:
    """By dim from the first on, the place of each rank of the world; -1 of those that the mesh lacks."""
    found = []
    for dim in range(first, full.ndim):
        places = np.full(max(int(full.max()), int(current().ranks.max())) + 1, -1)
        places[full] = np.indices(full.shape)[dim]
        found.append(places)
    return found
