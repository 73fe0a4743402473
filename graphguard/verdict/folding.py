"""Findings that say the same of several outputs are one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from graphguard.graph.findings import Finding


def alike(findings: Iterable[Finding]) -> list[Finding]:
    """What is said of several outputs alike, at one place, is one finding."""
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        said = each.message.replace(each.output, "") if each.output else each.message
        where = None if each.distributed is None else each.distributed.place
        key = (each.kind, said, each.ranks) if where is None else (each.kind, where)
        groups.setdefault(key, []).append(each)
    return [replace(first, spoils=tuple(e.output for e in rest if e.output)) for first, *rest in groups.values()]
