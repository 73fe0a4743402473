"""Finds out for which dtypes rows are right: each call that the samples make, in all classes of dtypes, with numbers at the
edges of their ranges, in place, into `out=`, and of lists.

`python -m graphguard.audit.dtypes` writes what it found to `audited.txt`; with names of operators, their lines alone.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from graphguard.aten.kernels import Kernels, tensors_in
from graphguard.aten.operators import operator, overload
from graphguard.audit.calls import OperatorCall, called, examined
from graphguard.audit.rows import Line, Uncut, audit, captured, rows_named, samples_of
from graphguard.audit.samples import SAMPLES, Sample
from graphguard.errors import ReplayError
from graphguard.lemmas import dtypes, known
from graphguard.oracle.replay import run

MOST_TENSORS = 3  # that are given classes independently of each other
MOST_CALLS = 4  # of one row, of which all forms are tried
HEAD = """# For which dtypes each lemma was compared with torch: `wf>f` are whole numbers and floats that give floats.
# Made by `python -m graphguard.audit.dtypes`; do not edit. The letters are those of graphguard/lemmas/dtypes.py.
"""


@dataclass
class Coverage:
    """How often each signature of each row was right; and what was wrong."""

    right: dict[str, dict[str, int]] = field(default_factory=dict)
    wrong: dict[str, dict[str, str]] = field(default_factory=dict)

    def note(self, call: OperatorCall, *, declared: bool = False) -> None:
        verdict = examined(call, declared=declared)
        if verdict is None or verdict.wrong is None:
            return
        if verdict.wrong:
            self.wrong.setdefault(verdict.row, {}).setdefault(verdict.signature, f"{call}: {verdict.wrong}")
        else:
            counts = self.right.setdefault(verdict.row, {})
            counts[verdict.signature] = counts.get(verdict.signature, 0) + 1

    def note_line(self, line: Line) -> None:
        """What the audit of whole programs found."""
        counts = self.right.setdefault(line.operator, {})
        for signature, count in line.right.items():
            counts[signature] = counts.get(signature, 0) + count

    def covered(self) -> dict[str, list[str]]:
        """What was right each time. Other forms of an operator met fewer numbers: they may give what it gives by itself, unless
        it is never called by itself."""
        result = {}
        for row, counts in sorted(self.right.items()):
            right = {each for each in counts if self.wrong.get(row, {}).keys().isdisjoint((each, _plain(each)))}
            alone = {each for each in right if _plain(each) == each}
            kept = {each for each in right if not alone or _plain(each) in alone}
            kept = {each for each in kept if not dtypes.may_lose(row, each)}
            if kept:
                result[row] = sorted(kept)
        return result


def _plain(signature: str) -> str:
    return signature.rpartition(":")[2]


# ---------------------------------------------------------------------- numbers
_NARROW = {torch.uint8: (0, 1, 2, 127, 128, 200, 255), torch.int8: (-128, -127, -1, 0, 1, 64, 127)}
_WHOLE = (-40, -7, -2, -1, 0, 1, 2, 3, 40)


def _edges(numbers: Sequence[int], shape: Sequence[int], dtype: torch.dtype, dice: random.Random) -> torch.Tensor:
    """All of the numbers, as far as there is room."""
    count = torch.Size(shape).numel()
    drawn = [*dice.sample(numbers, len(numbers)), *dice.choices(numbers, k=count)][:count]
    dice.shuffle(drawn)
    return torch.tensor(drawn, dtype=dtype).reshape(tuple(shape))


def in_class(tensor: torch.Tensor, kind: str, turn: int, dice: random.Random) -> torch.Tensor:
    """A tensor like another one in a class of dtypes. What was whole keeps its numbers: they may be positions."""
    if tensor.is_complex():
        return tensor
    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        dtype = {"f": torch.float64, "w": tensor.dtype if tensor.dtype == torch.int64 else torch.int64, "n": torch.int8,
                 "b": torch.bool}[kind]  # fmt: skip
        return tensor.to(dtype)
    if kind == "f":
        changed = (tensor.double(), tensor.double().round(), (tensor * 2).round().float() / 2, torch.full(shape, 1.5).double())
        return changed[turn % 4]
    if kind == "w":
        return [(tensor * 3).to(torch.int64), _edges(_WHOLE, shape, torch.int64, dice), torch.full(shape, 3),
                _edges((1, 2, 3, 5), shape, torch.int32, dice)][turn % 4]  # fmt: skip
    if kind == "n":
        dtype = (torch.uint8, torch.int8)[turn // 2 % 2]
        return _edges(_NARROW[dtype], shape, dtype, dice) if turn % 4 else torch.full(shape, _NARROW[dtype][-1], dtype=dtype)
    return (tensor > 0, torch.ones(shape, dtype=torch.bool), tensor > 1, torch.zeros(shape, dtype=torch.bool))[turn % 4]


def _with_whole_numbers(call: OperatorCall) -> OperatorCall:
    """The call with whole numbers in place of floats that are no tensors."""

    def whole(arg: Any) -> Any:
        return round(arg) if isinstance(arg, float) and math.isfinite(arg) else arg

    return OperatorCall(call.operator, tuple(map(whole, call.args)), {name: whole(arg) for name, arg in call.kwargs.items()})


def in_classes(call: OperatorCall, turns: int, dice: random.Random) -> Iterator[OperatorCall]:
    """A call with its tensors in all classes of dtypes, or one class after the other where there are many."""
    tensors = call.tensors
    if "backward" in call.operator:  # gradients are floats, and kernels for them crash on other numbers
        return
    if len(tensors) <= MOST_TENSORS:
        choices = [tuple(each) for each in itertools.product("fwnb", repeat=len(tensors))]
    else:
        own = ["f" if t.is_floating_point() else "b" if t.dtype == torch.bool else "w" for t in tensors]
        choices = [(each,) * len(tensors) for each in "fwnb"]
        choices += [(*own[:n], each, *own[n + 1 :]) for n in range(len(tensors)) for each in "fwnb"]
    for kinds in dict.fromkeys(choices):
        for turn in range(2 * turns if "n" in kinds else turns):  # few bits have edges that must meet
            pairs = enumerate(zip(tensors, kinds, strict=True))
            yield call.with_tensors([in_class(t, kind, turn + n, dice) for n, (t, kind) in pairs])
            if all(not t.is_floating_point() for t in tensors):
                break


# ---------------------------------------------------------------------- forms
def forms(call: OperatorCall) -> Iterator[OperatorCall]:
    """The call in place, into tensors of all classes, and of lists."""
    namespace, name, variant = call.operator.split(".")
    in_place = f"{namespace}.{name}_.{variant}"
    if call.args and isinstance(call.args[0], torch.Tensor) and _is_known(in_place):
        yield OperatorCall(in_place, (_as_large_as_the_result(call), *call.args[1:]), call.kwargs)
    yield from _outs(call)
    yield from _lists(call)


def _as_large_as_the_result(call: OperatorCall) -> torch.Tensor:
    """The first tensor, repeated where it is broadcast: in place, nothing else will do."""
    first: torch.Tensor = call.args[0]
    try:
        return first.expand(overload(call.operator)(*call.args, **call.kwargs).shape).clone()
    except Exception:  # whatever it does not take
        return first


@cache
def _is_known(name: str) -> bool:
    try:
        Kernels.function(name)
    except ReplayError:
        return False
    return True


@cache
def _out_variant(name: str) -> Any:
    """The overload of an operator that writes to `out=`, if a row is found by its name."""
    namespace, packet, _ = name.split(".")
    own = [argument.name for argument in overload(name)._schema.arguments]
    for other in getattr(getattr(torch.ops, namespace), packet).overloads():
        if not _is_known(f"{namespace}.{packet}.{other}"):
            continue
        found = overload(f"{namespace}.{packet}.{other}")
        written = {argument for _, argument, by_name in operator(found).written if by_name}
        row = known.lookup(str(found))
        same = [a.name for a in found._schema.arguments if a.name not in written]
        if written and row is not None and row.operator == name and set(same) <= set(own):
            return found
    return None


def _outs(call: OperatorCall) -> Iterator[OperatorCall]:
    found = _out_variant(call.operator)
    if found is None or call.operator == str(found):
        return
    try:
        results = overload(call.operator)(*call.args, **call.kwargs)
    except Exception:
        return
    results = tensors_in(results)
    names = [name for _, name, _ in operator(found).written]
    accepted = {argument.name for argument in found._schema.arguments}
    kwargs = {key: value for key, value in call.kwargs.items() if key in accepted}
    for kind in (None, torch.float64, torch.int64, torch.uint8, torch.bool):
        if len(results) == len(names):
            outs = {n: torch.full(r.shape, 1, dtype=kind or r.dtype) for n, r in zip(names, results, strict=True)}
            yield OperatorCall(str(found), call.args, {**kwargs, **outs})


@cache
def _list_variants() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name in dir(torch.ops.aten):
        if name.startswith("_foreach_"):
            for variant in getattr(torch.ops.aten, name).overloads():
                row = known.lookup(f"aten.{name}.{variant}")
                if row is not None:
                    found.setdefault(row.operator, []).append(overload(f"aten.{name}.{variant}"))
    return found


def _lists(call: OperatorCall) -> Iterator[OperatorCall]:
    """A list of one tensor in place of each tensor, as far as the schema says so."""
    for found in _list_variants().get(call.operator, ()):
        arguments = found._schema.arguments
        if len(arguments) < len(call.args):
            continue
        args = []
        for argument, arg in zip(arguments, call.args, strict=False):
            listed = "List" in str(argument.type)
            args.append([arg] if listed else arg)
        yield OperatorCall(str(found), tuple(args), call.kwargs)


# ---------------------------------------------------------------------- all of them
def sample_calls(samples: Iterable[Sample]) -> Iterator[OperatorCall]:
    """The different calls that samples make."""
    seen: set[str] = set()
    for example, graphs in captured([Uncut(sample, 0, 0) for sample in samples]):
        values = run(graphs[0], example.full, wide=True).values
        for node in graphs[0].nodes:
            call = called(node, values)
            key = repr((call.operator, [spec(each) for each in (*call.args, *call.kwargs.items())]))
            if key not in seen:
                seen.add(key)
                yield call


def spec(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return tuple(arg.shape), arg.dtype
    return [spec(each) for each in arg] if isinstance(arg, (list, tuple)) else arg


def examine(calls: Iterable[OperatorCall], *, turns: int = 4, seed: int = 0) -> Coverage:
    """Each call as it is, in all classes of dtypes, and in all forms."""
    found, dice, met = Coverage(), random.Random(seed), dict[str, int]()
    for call in calls:
        met[call.operator] = met.get(call.operator, 0) + 1
        found.note(call)
        found.note(call, declared=True)
        others = itertools.chain(in_classes(call, turns, dice), in_classes(_with_whole_numbers(call), 1, dice))
        for number, other in enumerate(others):
            found.note(other, declared=number % 2 == 1)
            if met[call.operator] <= MOST_CALLS:
                for form in forms(other):
                    found.note(form)
    return found


def derive(samples: Sequence[Sample]) -> Coverage:
    """What rows are right for. They are asked about everything."""
    with known.unguarded():
        found = examine(sample_calls(samples))
        for line in audit(samples).values():
            found.note_line(line)
    return found


def main() -> None:
    torch.set_num_threads(1)
    named = rows_named(sys.argv[1:])
    found = derive(samples_of(named) if named else list(SAMPLES.values()))
    covered: dict[str, Iterable[str]] = dict(found.covered())
    if named:
        covered = {**dtypes.audited(), **{row: kept for row, kept in covered.items() if row in named}}
    file = Path(dtypes.__file__).with_name(dtypes.FILE)
    file.write_text(HEAD + "".join(f"{row} {' '.join(sorted(kept))}\n" for row, kept in sorted(covered.items())))
    for row, texts in sorted(found.wrong.items()):
        for signature, text in sorted(texts.items()):
            print(f"{row} {signature}: {text}")
    print(f"{len(covered)} rows; {file}")


if __name__ == "__main__":
    main()
