"""A Dask cluster as a crew. When one of its workers is lost, Dask begins its tasks again elsewhere, and says nothing; so each
beginning is written down with the scheduler, and a report says if there was one before."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from graphguard.checks.task import Answer, Task, execute
from graphguard.errors import UsageError

_PATIENCE = 60.0  # seconds without any worker after which a run is given up
_GREETING = 10.0  # seconds that a scheduler, and its first worker, have to answer
_REFRESH = 2.0  # seconds after which the workers are counted again: they come and go
_TOPIC = "graphguard"


@contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """The cluster whose scheduler is at `dask://host:port`."""
    place = address.removeprefix("dask://")
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--executor {address}: write dask://HOST:PORT, as dask://10.0.0.1:8786")
    try:
        from distributed import Client
    except ImportError:
        raise UsageError(f"--executor {address} needs Dask; install it with `pip install graphguard[dask]`") from None
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # a scheduler that is lost is an error of each check
    try:
        client = Client(f"tcp://{place}", timeout=_GREETING, set_as_default=False)
    except Exception as error:
        raise UsageError(f"--executor {address}: no scheduler answers there ({type(error).__name__}); start one") from None
    try:
        try:
            client.wait_for_workers(1, timeout=_GREETING)
        except Exception:
            raise UsageError(f"--executor {address}: the cluster has no workers; start `dask worker {place}`") from None
        yield Cluster(client)
    finally:
        client.close(timeout=_GREETING)


class Cluster:
    """client: a `distributed.Client`, or the executor that it gives."""

    threads = None

    def __init__(self, client: Any):
        self.client = getattr(client, "_client", client)
        self.executor = self.client.get_executor(pure=False)
        self.count = 0  # of tasks
        self.hands_seen, self.asked = 1, 0.0  # how many threads the workers have, and when that was asked
        self.seen = time.monotonic()  # when there was a worker

    def hands(self) -> int:
        now = time.monotonic()
        if now - self.asked > _REFRESH:
            self.asked, self.hands_seen = now, self._count()
            self.seen = now if self.hands_seen else self.seen
        return self.hands_seen

    def _count(self) -> int:
        try:
            return sum(self.client.nthreads().values())
        except Exception:  # of a scheduler that is not there; `trouble` says so
            return 0

    def submit(self, task: Task) -> Future[Answer]:
        self.count += 1
        future: Future[Answer] = self.executor.submit(_begin, task, str(self.count))
        return future

    def trouble(self) -> str | None:
        if self.client.status != "running":
            return "the scheduler of the cluster is gone"
        alone = time.monotonic() - self.seen
        if self.hands() or alone < _PATIENCE:
            return None
        return f"the cluster has had no worker for {alone:.0f} seconds"

    def forget(self, run: str) -> None:
        with suppress(Exception):  # of a scheduler that is gone
            self.client.set_metadata([_TOPIC, run], {})


def _begin(task: Task, number: str) -> Answer:
    """On a worker of the cluster: say that the task has begun, and whether it had before."""
    from distributed import get_client, get_worker

    client, place = get_client(), [_TOPIC, task.run, number]
    earlier = client.get_metadata(place, [])
    client.set_metadata(place, [*earlier, get_worker().address])
    return replace(execute(task), earlier=tuple(earlier))
