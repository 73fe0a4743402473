"""For which dtypes a row answers: those for which the audit has compared it with torch, and no others.

Rows compute with real numbers. Torch does not: booleans add up to True, 8 bits wrap around, a float is cut off where it becomes
a whole number. So a call has a signature, the classes of its operands and results, and a row is asked only about signatures
that `audited.txt` lists for it. `python -m graphguard.audit.dtypes` makes that file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

import numpy as np

from graphguard.graph.dtypes import CLASSES, class_of, is_narrow
from graphguard.graph.ir import Node, values_in
from graphguard.graph.ir import Value as Tensor
from graphguard.graph.operators import ADDS_AT, GROWS, WRITES, name_of

FILE = "audited.txt"
_WORDS = {
    **CLASSES,
    "m": "narrow whole numbers of another dtype",  # than those before
    "r": "a float that is no tensor",
}
_RANGES = {"int8": (-128, 127), "int16": (-32768, 32767), "uint8": (0, 255), "uint16": (0, 65535),
           "uint32": (0, 2**32 - 1), "uint64": (0, 2**64 - 1)}  # fmt: skip


# What these give may not fit into few bits. The audit meets some numbers only, and not -128 // -1.
_COMPUTING = GROWS | {"abs", "addcdiv", "div", "floor_divide", "lerp", "neg"}
_PUTTING = WRITES | ADDS_AT


def fits(number: Any, dtype: str) -> bool:
    """Whether a dtype that wraps around has a number, or those of all lanes. The others are taken to have all."""
    if dtype not in _RANGES:
        return True
    low, high = _RANGES[dtype]
    return bool(np.all((low <= np.asarray(number)) & (np.asarray(number) <= high)))


def holds(dtype: str, other: str) -> bool:
    """Whether a dtype of whole numbers has all numbers of another one."""
    if other == "bool":
        return True
    return other in _RANGES and all(fits(end, dtype) for end in _RANGES[other])


def signature(operator: str, node: Node, called: str) -> str:
    """How a node calls a row's operator by one of its names: `wf>f`, or `out:f>w`. Neighbours that are alike count once."""
    written = {name.split(".")[0] for name in node.writes}
    kwargs = [node.kwargs[name] for name in sorted(node.kwargs) if name not in written]
    form = ""
    if called != operator:
        form = "each:" if "._foreach_" in called else "out:" if written & node.kwargs.keys() else "in:"
    narrow = [tensor.dtype for tensor in values_in((*node.args, *kwargs)) if is_narrow(tensor.dtype)]
    operands = "".join(_classes((*node.args, *kwargs), narrow))
    results = "".join(_classes(node.outputs, narrow))
    if set(results) == {"f"} and "f" in operands:  # computed as floats: one number is as good as another
        operands = operands.replace("r", "")
    return f"{form}{_once(operands)}>{_once(results)}"


def _classes(args: Iterable[Any], narrow: list[str]) -> Iterator[str]:
    """`narrow` collects dtypes of few bits: a second one is another class, as numbers of one do not fit the other."""
    for arg in args:
        if type(arg) is Tensor:
            kind = class_of(arg.dtype)
            if kind == "n":
                narrow.append(arg.dtype)
            other = narrow and arg.dtype != narrow[0] and (kind == "n" or (kind == "w" and not arg.shape))
            yield "m" if other else kind  # one whole number is cast to the few bits of what it is beside
        elif type(arg) is tuple:
            yield from _classes(arg, narrow)
        elif type(arg) is float:
            yield "r"


def _once(classes: str) -> str:
    return "".join(each for each, _ in groupby(classes))


def may_lose(operator: str, signature: str) -> bool:
    """Whether an operator may give other numbers than it computes, whatever the audit has met: few bits wrap around, and of
    floats that are put among whole numbers a part is cut off."""
    name, (before, _, after) = name_of(operator), signature.rpartition(":")[2].partition(">")
    wraps = name in _COMPUTING and not set(after).isdisjoint("nm")
    return wraps or (name in _PUTTING and not set(before).isdisjoint("fr") and set(after).isdisjoint("fc"))


@cache
def audited() -> dict[str, frozenset[str]]:
    """The signatures of each operator that the audit has compared with torch."""
    text = files(__package__).joinpath(FILE).read_text()
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {operator: frozenset(signatures) for operator, *signatures in lines}


def in_words(signature: str) -> str:
    form, _, classes = signature.rpartition(":")
    before, after = ([_WORDS[each] for each in side] for side in classes.split(">"))
    how = {"": "", "in": " in place", "out": " written to out=", "each": " of a list"}[form]
    return f"{', '.join(before) or 'nothing'} to {', '.join(after) or 'nothing'}{how}"
