"""Object collectives for many ranks at once: an object has no parts that vary, and lanes that get another one leave the run."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from graphguard.capture.torch.lanes.groups import LaneGroup
from graphguard.capture.torch.lanes.run import current
from graphguard.capture.torch.world.objects import Key, ObjectExchange, ObjectsMissing, Sent, ends
from graphguard.graph.rank_class import numbers_in


class LaneObjects(ObjectExchange):
    """Each lane has its own group, so that an exchange has a key for each lane. What a lane sends before it leaves stands: the
    run that it gets of its own sends it again."""

    def sent_by_active(self) -> Sent:
        ranks = frozenset(current().ranks[current().active].tolist())
        return {(key, rank): data for (key, rank), data in self.sent.items() if rank in ranks}

    def _key(self, kind: str, ranks: Any, peer: Any = None, sends: bool = False) -> dict[int, Key]:
        group: LaneGroup = ranks
        run = current()
        peers = None if peer is None else numbers_in(peer, len(run.ranks))
        keys: dict[int, Key] = {}
        for lane in run.active.tolist():
            both = ends(int(run.ranks[lane]), None if peers is None else int(peers[lane]), sends)
            keys[lane] = self._next((kind, group.members_of(lane), group.channel_of(lane), *both), lane)
        return keys

    def _take(self, key: dict[int, Key], rank: Any) -> Any:
        run = current()
        senders = numbers_in(rank, len(run.ranks))
        held = {lane: self._data(key[lane], int(senders[lane])) for lane in run.active.tolist()}
        kinds = {data: number for number, data in enumerate(dict.fromkeys(held.values()))}
        numbers = np.zeros(len(run.ranks), dtype=np.int64)
        numbers[list(held)] = [kinds[data] for data in held.values()]
        run.forced(numbers, "an object that is received")  # those that lack theirs do not keep the others from going on
        data = held[int(run.active[0])]
        if data is None:
            raise ObjectsMissing
        return pickle.loads(data)

    def _keep(self, key: dict[int, Key], data: bytes) -> None:
        run = current()
        for lane in run.active.tolist():
            self.sent[key[lane], int(run.ranks[lane])] = data
