"""By what a sort of HLO text orders: its comparator, read as one comparison of two elements of one array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from graphguard.capture.hlo.text import Instruction
from graphguard.errors import CaptureError

_NO_ORDER = "what compares its elements is not one comparison of one array"
_Word = tuple[Any, ...]  # a parameter, a number, what is asked of a parameter, or how two of them are compared


def compared_by(body: Sequence[Instruction]) -> tuple[int, bool]:
    """Which of the arrays is compared, and whether the largest comes first. Zeros of both signs are equal, and nan is left
    out, as all arithmetic is of real numbers: JAX writes both into the comparator of floats."""
    words: dict[str, _Word] = {}
    for each in body:
        word = _word(each, [words[name] for name in each.operands if name in words])
        words[each.name] = word
        if each.is_root and word[0] == "order":
            _, first, second, direction = word
            if direction in ("LT", "GT") and first % 2 == 0 and second == first + 1:
                return first // 2, direction == "GT"
    raise CaptureError(_NO_ORDER)


def _word(each: Instruction, operands: list[_Word]) -> _Word:
    if each.op == "parameter":
        return "parameter", int(each.raw)
    if each.op == "constant":
        return "number", float(each.raw)
    kinds = [operand[0] for operand in operands]
    if each.op == "compare" and kinds == ["parameter", "parameter"]:
        if operands[0] == operands[1] and each.word("direction") == "NE":
            return "asks", operands[0][1], "nan"
        return "order", operands[0][1], operands[1][1], each.word("direction")
    if each.op == "compare" and kinds == ["parameter", "number"] and operands[1][1] == 0 and each.word("direction") == "EQ":
        return "asks", operands[0][1], "zero"
    if each.op == "select" and kinds == ["asks", "number", "parameter"] and _is_same(operands):
        return operands[2]
    raise CaptureError(_NO_ORDER)


def _is_same(operands: list[_Word]) -> bool:
    """Whether zero is put in the place of a zero, or nan in the place of nan."""
    (_, asked, about), (_, number), (_, parameter) = operands
    return asked == parameter and (math.isnan(number) if about == "nan" else number == 0)
