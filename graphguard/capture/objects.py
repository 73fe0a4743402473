"""Object collectives: Python objects that ranks send each other, which must be known while the programs are recorded.

A rank that needs an object no other rank has sent yet gives up its capture (`ObjectsMissing`); what it sent so far is kept.
All ranks are then tried again with the objects known, until no rank lacks one.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from graphguard.capture.collectives import group_of
from graphguard.errors import CaptureError

Key = tuple[object, ...]
Sent = dict[tuple[Key, int], bytes]


class ObjectsMissing(BaseException):
    """Other ranks must be captured further first. Not an Exception, so that no program catches it."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: object) -> Any:
        if isinstance(item, torch.Tensor):
            raise CaptureError("an object collective carries a tensor; send tensors with the tensor collectives")
        return NotImplemented


def _dump(item: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(item)
    return buffer.getvalue()


class ObjectExchange:
    """Replaces torch.distributed's object collectives. `known` holds what ranks sent in earlier attempts."""

    def __init__(self, known: Sent):
        self.sent: Sent = {}
        self._known = known
        self._turns: Counter[Key] = Counter()

    def _key(self, kind: str, *channel: object) -> Key:
        key = (kind, *channel)
        self._turns[key] += 1
        return (*key, self._turns[key])

    def _take(self, key: Key, rank: int) -> Any:
        data = self.sent.get((key, rank)) or self._known.get((key, rank))
        if data is None:
            raise ObjectsMissing
        return pickle.loads(data)

    def _give(self, key: Key, item: object) -> None:
        self.sent[key, dist.get_rank()] = _dump(item)

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        ranks, key = self._start("all_gather_object", group)
        if ranks is not None:
            self._give(key, obj)
            object_list[: len(ranks)] = [self._take(key, rank) for rank in ranks]

    def broadcast_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
        group_src: int | None = None,
    ) -> None:  # fmt: skip
        ranks, key = self._start("broadcast_object_list", group)
        if ranks is None:
            return
        root = _root(ranks, src, group_src)
        if dist.get_rank() == root:
            self._give(key, object_list)
        object_list[:] = self._take(key, root)

    def gather_object(
        self, obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None, group: Any = None,
        group_dst: int | None = None,
    ) -> None:  # fmt: skip
        ranks, key = self._start("gather_object", group)
        if ranks is None:
            return
        self._give(key, obj)
        if dist.get_rank() == _root(ranks, dst, group_dst):
            assert object_gather_list is not None
            object_gather_list[: len(ranks)] = [self._take(key, rank) for rank in ranks]

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
        src: int | None = None, group: Any = None, group_src: int | None = None,
    ) -> None:  # fmt: skip
        ranks, key = self._start("scatter_object_list", group)
        if ranks is None:
            return
        root = _root(ranks, src, group_src)
        if dist.get_rank() == root:
            self._give(key, scatter_object_input_list)
        scatter_object_output_list[0] = self._take(key, root)[ranks.index(dist.get_rank())]

    def send_object_list(
        self, object_list: list[Any], dst: int | None = None, group: Any = None, device: Any = None,
        group_dst: int | None = None, use_batch: bool = False,
    ) -> None:  # fmt: skip
        ranks = group_of(group or dist.group.WORLD)
        receiver = _root(ranks, dst, group_dst)
        self._give(self._key("send_object_list", dist.get_rank(), receiver), object_list)

    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
        group_src: int | None = None, use_batch: bool = False,
    ) -> int:  # fmt: skip
        ranks = group_of(group or dist.group.WORLD)
        sender = _root(ranks, src, group_src)
        object_list[:] = self._take(self._key("send_object_list", sender, dist.get_rank()), sender)
        return sender

    def _start(self, kind: str, group: Any) -> tuple[tuple[int, ...] | None, Key]:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None, ()
        ranks = group_of(group or dist.group.WORLD)
        return tuple(ranks), self._key(kind, tuple(ranks), ranks.channel)


def _root(ranks: tuple[int, ...], of_world: int | None, of_group: int | None) -> int:
    if of_group is not None:
        return ranks[of_group]
    return ranks[0] if of_world is None else of_world
