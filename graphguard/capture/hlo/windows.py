"""Convolutions in HLO text: `window={size=3x3 pad=1_1x1_1 rhs_reversal=1x1}, dim_labels=b01f_01io->b01f`."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from graphguard.capture.hlo.text import Instruction
from graphguard.errors import CaptureError


def convolution_of(each: Instruction) -> dict[str, Any]:
    """The parameters of JAX's `conv_general_dilated`."""
    spaces = len(_labels(each)[0]) - 2
    pads = _window(each, "pad", "x".join(["0_0"] * spaces))
    return {
        "dimension_numbers": dimension_numbers(each),
        "window_strides": _numbers(each, "stride", spaces, 1),
        "padding": [tuple(int(end) for end in pad.split("_")) for pad in pads.split("x") if pad],
        "lhs_dilation": _numbers(each, "lhs_dilate", spaces, 1),
        "rhs_dilation": _numbers(each, "rhs_dilate", spaces, 1),
        "feature_group_count": _count(each, "feature_group_count"),
        "batch_group_count": _count(each, "batch_group_count"),
    }


def dimension_numbers(each: Instruction) -> Any:
    """By operand and result: batch and features first, then the dims of space in their order. Of the kernel: out, in."""
    x, weight, made = _labels(each)
    spaces = [str(place) for place in range(len(x) - 2)]
    return SimpleNamespace(
        lhs_spec=tuple(map(x.index, ["b", "f", *spaces])),
        rhs_spec=tuple(map(weight.index, ["o", "i", *spaces])),
        out_spec=tuple(map(made.index, ["b", "f", *spaces])),
    )


def reversed_dims(each: Instruction) -> list[int]:
    """The dims of the kernel that are read from their ends."""
    weight = _labels(each)[1]
    turned = _numbers(each, "rhs_reversal", len(weight) - 2, 0)
    return [weight.index(str(place)) for place, turns in enumerate(turned) if turns]


def _labels(each: Instruction) -> tuple[str, str, str]:
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.attributes)
    if found is None or len({len(part) for part in found.groups()}) > 1:
        raise CaptureError("its dim_labels are written in a way that is not known")
    return found[1], found[2], found[3]


def _window(each: Instruction, key: str, otherwise: str) -> str:
    window = re.search(r"window=\{(.*?)\}", each.attributes)
    found = re.search(rf"\b{key}=(\S+)", window[1]) if window else None
    return found[1] if found else otherwise


def _numbers(each: Instruction, key: str, count: int, otherwise: int) -> list[int]:
    found = [int(number) for number in _window(each, key, "x".join([str(otherwise)] * count)).split("x") if number]
    if len(found) != count:
        raise CaptureError(f"its window has {len(found)} numbers of {key} for {count} dims")
    return found


def _count(each: Instruction, key: str) -> int:
    return each.number(key) if each.has(key) else 1
