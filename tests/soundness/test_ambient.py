"""Every source of randomness or identity that real ranks do not share, on the first and on the last rank: what depends on it is
refused, or listed."""

import datetime
import os
import random
import secrets
import socket
import time
import uuid

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import capture_ranks

import graphguard as gg
from graphguard.capture.torch.relation.inputs import Input
from graphguard.errors import CaptureError

INPUTS = {"x": Input((4,))}
NAMES = frozenset({"w1", "w2", "w3", "bias"})


class Key:
    def __init__(self, number):
        self.number = number


SOURCES = {
    "random": lambda: random.random(),
    "random.Random": lambda: random.Random().random(),
    "numpy": lambda: float(np.random.rand()),
    "numpy.default_rng": lambda: float(np.random.default_rng().random()),
    "numpy.RandomState": lambda: float(np.random.RandomState().rand()),
    "time": lambda: float(int(time.time()) // 1000),
    "time_ns": lambda: float(time.time_ns() // 10**12),
    "perf_counter": lambda: float(int(time.perf_counter()) // 1000),
    "localtime": lambda: float(time.localtime().tm_yday + 400 * time.localtime().tm_year),
    "datetime": lambda: float(datetime.datetime.now().toordinal()),
    "pid": lambda: float(os.getpid()),
    "uuid": lambda: float(uuid.uuid4().int % 10**6),
    "urandom": lambda: float(int.from_bytes(os.urandom(3), "little")),
    "secrets": lambda: float(secrets.randbelow(10**6)),
    "host": lambda: float(sum(map(ord, socket.gethostname()))),
    "hash": lambda: float(hash("w1") % 2),
    "first of a set": lambda: float(sum(map(ord, next(iter(NAMES))))),
    "list of a set": lambda: float(sum(map(ord, [*set(NAMES)][1]))),
    "popped of a set": lambda: float(sum(map(ord, set(NAMES).pop()))),
    "keys of a set": lambda: float(sum(map(ord, next(iter(dict.fromkeys(NAMES)))))),
    "difference of keys": lambda: float(sum(map(ord, next(iter(dict.fromkeys("abcd").keys() - {"a"}))))),
    "set of objects": lambda: float("".join(str(key.number) for key in {Key(number) for number in range(1, 8)})),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("source", SOURCES)
def test_what_depends_on_the_process_is_refused(source, rank):
    def program(x):
        return x * SOURCES[source]() if dist.get_rank() == rank else x

    with pytest.raises(CaptureError, match=f"^rank {rank} is not deterministic: two captures of it differ"):
        capture_ranks(program, 2, INPUTS)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_varied_is_listed(rank):
    def program(x):
        return x * float(id(NAMES) % 16 + 1) if dist.get_rank() == rank else x

    captured = capture_ranks(program, 2, INPUTS)
    assert any("test_ambient.py" in line and "(id) differs from process to process" in line for line in captured.assumptions)


def seeded(x):
    random.seed(1)
    np.random.seed(2)
    return x * random.random() * float(np.random.rand()) * float(np.random.default_rng(3).random())


def sorted_names(x):
    for name in sorted(NAMES):
        x = x + len(name)
    return x


def timed(x):
    begun = time.perf_counter()
    y = x * 2
    assert time.perf_counter() >= begun
    return y


def numbers(x):
    for number in {3, 1, 2, (4, 5)}:
        x = x + (number if isinstance(number, int) else number[0])
    return x


@pytest.mark.parametrize("program", [seeded, sorted_names, timed, numbers])
def test_what_does_not_depend_on_it_is_captured(program):
    captured = capture_ranks(program, 2, INPUTS)
    assert any("(the time) differs from process to process" in line for line in captured.assumptions) == (program is timed)


def test_the_sentence_names_what_differs():
    def program(x):
        return x * float(np.random.rand()) if dist.get_rank() == 1 else x

    with pytest.raises(CaptureError, match=r"between ranks \(numpy's generator at .*test_ambient.py:\d+\)$"):
        capture_ranks(program, 2, INPUTS)


def test_collectives_in_the_order_of_a_set_are_refuted():
    def sums(x):
        return {"w1": x.sum(0), "w2": 2 * x.sum(0)}

    def distributed(x):
        found = sums(x)
        for name in set(found):
            dist.all_reduce(found[name])
        return found

    report = gg.verify(sums, distributed, mesh=2, inputs={"x": gg.Input((4, 3), gg.Shard(0))})
    assert report.verdict == "refuted"
    assert any("the order of a set at " in note for note in report.notes)


def test_each_rank_has_generators_of_its_own_and_torch_keeps_its():
    def program(x):
        return {"seed": float(torch.initial_seed() % 1000)}

    captured = capture_ranks(program, 2, INPUTS)
    assert next(iter(captured.ranks[0].constants.values())) == next(iter(captured.ranks[1].constants.values()))
