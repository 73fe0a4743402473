"""A monomial, and the box of the local tensor that it covers."""

from __future__ import annotations

from dataclasses import dataclass

from graphguard.engine.monomial import Monomial, Range

Box = tuple[Range, ...]


@dataclass(frozen=True)
class Placed:
    monomial: Monomial
    box: Box
