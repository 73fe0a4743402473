"""Communication past the operators of torch.distributed, where no rank would be seen to wait: it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, HashStore, Store

from graphguard.errors import CaptureError

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

_OF_BACKENDS = ("_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allreduce", "recv",
                "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier",
                "recv_anysource", "reduce", "reduce_scatter", "scatter", "send")  # fmt: skip
_OF_STORES = ("add", "append", "barrier", "check", "compare_set", "delete_key", "get", "list_keys", "multi_get", "multi_set",
              "num_keys", "queue_len", "queue_pop", "queue_push", "set", "wait")  # fmt: skip
OWN_WORLD = "the program initialises torch.distributed again; it is initialised already, with all ranks of the mesh"


def refuse_ways_around(recorder: Recorder) -> None:
    """Patches torch for the rest of this process, which is one rank's own."""

    def refused(message: str) -> CaptureError:
        recorder.locate()
        return recorder.failed(CaptureError(message))

    def of_backend(name: str) -> Callable[..., Any]:
        def call(self: Backend, *args: Any, **kwargs: Any) -> Any:
            raise refused(f"the program calls {name} of a group's backend, which is not seen; call it in torch.distributed")

        return call

    def of_store(name: str, original: Any) -> Callable[..., Any]:
        def call(self: Store, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, HashStore):  # of this process alone
                return original(self, *args, **kwargs)
            raise refused(f"the program exchanges values in a store ({name}), which is not modelled; use object collectives")

        return call

    def own_world(*args: Any, **kwargs: Any) -> Any:
        raise refused(OWN_WORLD)

    for name in _OF_BACKENDS:
        setattr(Backend, name, of_backend(name))
    for name in _OF_STORES:
        setattr(Store, name, of_store(name, getattr(Store, name)))
    c10d.rendezvous = own_world
