"""megatron-core for many ranks at once: it goes through all groups of each kind, and keeps the one that it is in."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch._C._distributed_c10d import ProcessGroup

from graphguard.capture.torch.adapters.holders import Holders
from graphguard.capture.torch.adapters.versions import is_tested
from graphguard.capture.torch.escapes.imports import when_imported
from graphguard.capture.torch.lanes.groups import MadeGroup, Teams
from graphguard.capture.torch.lanes.run import NotByClasses, current

_PLAIN = (type(None), bool, int, float, str)  # sizes, names and options, which are those of all ranks


def share_megatron_groups(holders: Holders, teams: Teams) -> None:
    """Its groups are made as the witness, all of them and in its order. What it keeps of them is then each lane's own."""

    def adjust(state: Any) -> None:
        bare = state.initialize_model_parallel

        def initialize(*args: Any, **kwargs: Any) -> None:
            if not is_tested("megatron-core"):
                raise NotByClasses("a version of megatron-core that is not known to keep its own groups alone")
            before = dict(vars(state))
            _, made = teams.made_together(lambda: bare(*args, **kwargs))
            for name, kept in list(vars(state).items()):
                if name not in before or before[name] is not kept:
                    setattr(state, name, _shared(kept, teams, made))

        if bare in holders:
            holders.replace(bare, initialize)
        state.initialize_model_parallel = initialize

    when_imported("megatron.core.parallel_state", adjust)


def _shared(kept: Any, teams: Teams, made: list[MadeGroup]) -> Any:
    """What the witness keeps, as each lane has it: its own group, or the ranks of that."""
    if isinstance(kept, ProcessGroup):
        teams.of(kept)  # or it is none of those that were made
        return kept
    if isinstance(kept, list) and kept and all(type(rank) is int for rank in kept):
        return _own_ranks(kept, teams, made)
    if isinstance(kept, (list, tuple)):
        return type(kept)(_shared(item, teams, made) for item in kept)
    if isinstance(kept, dict):
        return {key: _shared(item, teams, made) for key, item in kept.items()}
    if isinstance(kept, _PLAIN) or type(kept).__name__ == "GlobalMemoryBuffer":
        return kept
    raise NotByClasses(f"megatron-core keeps a {type(kept).__name__}")


def _own_ranks(kept: list[int], teams: Teams, made: list[MadeGroup]) -> Any:
    """Ranks of the witness's group. There may be several of these ranks, if each lane's ones are of the same ranks, too."""
    found = [teams.of(group.name) for group in made if group.name is not None and list(group.ranks) == kept]
    if not found:
        raise NotByClasses("megatron-core keeps ranks that are no group")
    lanes = current().active
    own = [team.members[team.rows[lanes]] for team in found]
    if not all(np.array_equal(each, own[0]) for each in own):
        raise NotByClasses("megatron-core keeps ranks that may be those of several groups")
    return found[0].ranks()
