"""Object collectives: Python objects that ranks send each other, which must be known while the programs are recorded.

A rank that needs an object no other rank has sent yet gives up its capture (`ObjectsMissing`); what it sent so far is kept.
All ranks are then tried again with the objects known, until no rank lacks one.

In the graph an object collective is a `dist.barrier` that says which one it is in `objects`, and a list of objects that is
sent is a message of one byte: what the objects say is known, but the ranks still have to meet, and in one order.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from graphguard.capture.torch.world.collectives import Group, communicate, group_of, meet, wait
from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder
    from graphguard.graph.ir import Graph

Key = tuple[object, ...]
Sent = dict[tuple[Key, int], bytes]


class ObjectsMissing(BaseException):
    """Other ranks must be captured further first. Not an Exception, so that no program catches it."""

    before: Graph | None = None  # what the rank had communicated until then; along a sample, all that it had done
    relation: Graph | None = None  # how its inputs are placed


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: object) -> Any:
        if isinstance(item, torch.Tensor):
            raise CaptureError("an object collective carries a tensor; send tensors with the tensor collectives")
        return NotImplemented


def _dump(item: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(item)
    return buffer.getvalue()


def is_same_object(one: bytes, other: bytes) -> bool:
    """Whether two pickles are of equal objects. What numbers of lanes are pickled as is another way to write an int."""
    return one == other or pickle.dumps(pickle.loads(one)) == pickle.dumps(pickle.loads(other))


def same_objects(one: Sent, other: Sent) -> bool:
    return one.keys() == other.keys() and all(is_same_object(data, other[which]) for which, data in one.items())


class ObjectExchange:
    """Replaces torch.distributed's object collectives. `known` holds what ranks sent in earlier attempts; `recorder` is set
    when the recording of a rank is prepared."""

    recorder: Recorder

    def __init__(self, known: Sent):
        self.sent: Sent = {}
        self._known = known
        self._turns: Counter[tuple[int, Key]] = Counter()

    # ------------------------------------------------------------------ what torch.distributed offers
    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        ranks = self._members("all_gather_object", group)
        if ranks is not None:
            key = self._meet("all_gather_object", ranks)
            self._give(key, obj)
            object_list[: len(ranks)] = self._take_all(key, ranks)

    def broadcast_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
        group_src: int | None = None,
    ) -> None:  # fmt: skip
        ranks = self._members("broadcast_object_list", group)
        if ranks is None:
            return
        root = _root(group, src, group_src)
        key = self._meet("broadcast_object_list", ranks, root)
        if dist.get_rank(group) == root:
            self._give(key, object_list)
        else:
            self._fill(object_list, self._take(key, ranks.member(root)))

    def gather_object(
        self, obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None, group: Any = None,
        group_dst: int | None = None,
    ) -> None:  # fmt: skip
        ranks = self._members("gather_object", group)
        if ranks is None:
            return
        root = _root(group, dst, group_dst)
        is_root = dist.get_rank(group) == root
        c10d._validate_output_list_for_rank(dist.get_rank(group), root, object_gather_list)
        key = self._meet("gather_object", ranks, root)
        self._give(key, obj)
        if is_root and object_gather_list is not None:
            object_gather_list[: len(ranks)] = self._take_all(key, ranks)

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
        src: int | None = None, group: Any = None, group_src: int | None = None,
    ) -> None:  # fmt: skip
        ranks = self._members("scatter_object_list", group)
        if ranks is None:
            return
        root = _root(group, src, group_src)
        key = self._meet("scatter_object_list", ranks, root)
        if dist.get_rank(group) == root:
            if scatter_object_input_list is None or len(scatter_object_input_list) != len(ranks):
                raise ValueError(f"scatter_object_list needs one object for each of the {len(ranks)} ranks of its group")
            self._give(key, scatter_object_input_list)
        scatter_object_output_list[0] = self._take(key, ranks.member(root))[dist.get_rank(group)]

    def send_object_list(
        self, object_list: list[Any], dst: int | None = None, group: Any = None, device: Any = None,
        group_dst: int | None = None, use_batch: bool = False,
    ) -> None:  # fmt: skip
        ranks = self._members("send_object_list", group)
        if ranks is None:
            return
        peer = ranks.member(_place(group, dst, group_dst))
        self.recorder.locate()
        token = torch.zeros(1, dtype=torch.uint8)
        wait(self.recorder, communicate(self.recorder, "dist.send", ranks, token, [], peer=peer, tag=0))
        self._give(self._key("send_object_list", ranks, peer, sends=True), object_list)

    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
        group_src: int | None = None, use_batch: bool = False,
    ) -> int:  # fmt: skip
        ranks = self._members("recv_object_list", group)
        if ranks is None:
            return -1
        place = _place(group, src, group_src)
        peer = ranks.member(place)
        self.recorder.locate()
        token = torch.zeros(1, dtype=torch.uint8)
        wait(self.recorder, communicate(self.recorder, "dist.recv", ranks, [], [token], peer=peer, tag=0))
        self._fill(object_list, self._take(self._key("send_object_list", ranks, peer), peer))
        rank: int = dist.get_global_rank(group or dist.group.WORLD, place)
        return rank

    # ------------------------------------------------------------------ how
    @staticmethod
    def _members(kind: str, group: Any) -> Group | None:
        """The ranks of the group; None, with torch's own reaction, on a rank outside of it."""
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            c10d._warn_not_in_group(kind)
            return None
        return group_of(group or dist.group.WORLD)

    def _meet(self, kind: str, ranks: Group, root: int | None = None) -> Any:
        """The ranks of the group wait for each other, as in torch, where tensors carry the objects."""
        meet(self.recorder, ranks, kind, **({} if root is None else {"root": ranks.member(root)}))
        return self._key(kind, ranks)

    def _key(self, kind: str, ranks: Group, peer: int | None = None, sends: bool = False) -> Any:
        """What this exchange is called by all ranks that take part, and by no other."""
        return self._next((kind, tuple(ranks), ranks.channel, *ends(dist.get_rank(), peer, sends)))

    def _next(self, key: Key, lane: int = 0) -> Key:
        """Exchanges of one key have turns, which each rank counts for itself."""
        self._turns[lane, key] += 1
        return (*key, self._turns[lane, key])

    def _take_all(self, key: Any, ranks: Group) -> list[Any]:
        return [self._take(key, ranks.member(place)) for place in range(len(ranks))]

    def _take(self, key: Any, rank: int) -> Any:
        data = self._data(key, rank)
        if data is None:
            raise ObjectsMissing
        return pickle.loads(data)

    def _data(self, key: Key, rank: int) -> bytes | None:
        return self.sent.get((key, rank)) or self._known.get((key, rank))

    def _give(self, key: Any, item: object) -> None:
        try:
            self._keep(key, _dump(item))
        except CaptureError as error:
            raise self.recorder.failed(error) from None

    def _keep(self, key: Any, data: bytes) -> None:
        self.sent[key, dist.get_rank()] = data

    def _fill(self, object_list: list[Any], taken: list[Any]) -> None:
        if len(object_list) != len(taken):
            sizes = f"{len(taken)} objects are sent where {len(object_list)} are expected"
            raise self.recorder.failed(CaptureError(f"lists of objects differ in length between ranks: {sizes}"))
        object_list[:] = taken


def ends(rank: int, peer: int | None, sends: bool) -> tuple[int, ...]:
    """Of a message, the sender and the receiver."""
    return () if peer is None else (rank, peer) if sends else (peer, rank)


def _root(group: Any, of_world: int | None, of_group: int | None) -> int:
    """The place of the root in the group; left out, it is that of rank 0 of the world."""
    if of_world is None and of_group is None:
        of_world = 0
    return _place(group, of_world, of_group)


def _place(group: Any, of_world: int | None, of_group: int | None) -> int:
    place: int = c10d._canonicalize_group_rank(group or dist.group.WORLD, of_world, of_group)
    return place
