"""Labels that a loss leaves out."""

from __future__ import annotations

from collections.abc import Iterable

from graphguard.graph.ir import Graph

IGNORED = -100  # by torch's losses, where the program does not say another one


def may_be_ignored(ranks: Iterable[Graph]) -> bool:
    """Whether a label may be the one that is ignored by default. Nobody wrote it; where the ranks have a loss of their own, as
    that of a split vocabulary, which knows of no such label, there is none: the labels are classes, which is listed."""
    return any("nll_loss" in node.op or "cross_entropy" in node.op for graph in ranks for node in graph.nodes)
