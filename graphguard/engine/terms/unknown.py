"""What is known of a tensor: a description, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from graphguard.engine.terms.term import Value
from graphguard.graph.ir import Node
from graphguard.graph.ir import Value as Tensor


@dataclass(frozen=True)
class Unknown:
    """A tensor without a description."""

    reason: str
    node: Node | None


Described = Value | Unknown
Environment = dict[Tensor, Described]
