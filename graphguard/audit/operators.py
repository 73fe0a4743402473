"""Torch's own samples of its operators, in several dtypes: what each call is described as, against execution.

`python -m graphguard.audit.operators` takes all samples; `--every N` one operator in so many. What has no description is
opaque, which is no fault.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import random
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphguard.audit.calls import OperatorCall, calls_of, examined
from graphguard.audit.dtypes import in_classes, spec

DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)
MOST_SAMPLES = 12  # of one operator in one dtype
MIXTURES = 6  # of one call


@dataclass
class Found:
    """How many calls were compared and how many are opaque; and those that are not what they are described as."""

    compared: int = 0
    opaque: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        self.compared, self.opaque, self.wrong = (
            self.compared + other.compared,
            self.opaque + other.opaque,
            self.wrong + other.wrong,
        )

    def note(self, call: OperatorCall, declared: bool) -> None:
        verdict = examined(call, declared=declared)
        if verdict is None or verdict.wrong is None:
            self.opaque += 1
        elif verdict.wrong:
            self.wrong.append(f"{verdict.row} {verdict.signature}: {call}: {verdict.wrong}")
        else:
            self.compared += 1


def infos() -> list[Any]:
    """Torch's descriptions of its operators. They come with its tests, which want a module that is not needed here."""
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


def sample_calls(info: Any) -> Iterator[OperatorCall]:
    """The different calls of operators with a row that torch's samples make."""
    seen: set[str] = set()
    for dtype in DTYPES:
        if not info.supports_dtype(dtype, "cpu"):
            continue
        try:
            samples = list(itertools.islice(info.sample_inputs("cpu", dtype), MOST_SAMPLES))
        except Exception:  # some ask for what is not installed
            continue
        for sample in samples:
            for call in calls_of(info.op, sample.input, *sample.args, **sample.kwargs):
                key = repr((call.operator, [spec(each) for each in (*call.args, *call.kwargs.items())]))
                if key not in seen:
                    seen.add(key)
                    yield call


def examine(info: Any, seed: int = 0) -> Found:
    """All calls of an operator, and some with the tensors in other dtypes, with numbers at the edges of their ranges."""
    found, dice = Found(), random.Random(f"{seed} {info.name} {info.variant_test_name}")
    torch.manual_seed(seed)
    for call in sample_calls(info):
        found.note(call, declared=False)
        mixtures = list(itertools.islice(in_classes(call, 2, dice), 256))
        for number, other in enumerate(dice.sample(mixtures, min(MIXTURES, len(mixtures)))):
            found.note(other, declared=number % 2 == 0)
    return found


def examine_apart(info: Any, seed: int = 0) -> Found:
    """In a process of its own: some kernels end it, as a division of integers by zero does."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "wb") as stream:
            pickle.dump(examine(info, seed), stream)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else Found()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m graphguard.audit.operators", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take one operator in so many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="begin with this one")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    total, chosen = Found(), infos()[given.first :: given.every]
    for info in chosen:
        total.add(examine_apart(info, given.seed))
    for text in total.wrong:
        print(f"wrong: {text}")
    print(f"{len(chosen)} operators: {total.compared} calls compared, {total.opaque} opaque, {len(total.wrong)} wrong")
    return 1 if total.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
