"""Findings that say the same of several outputs are one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from graphguard.graph.findings import Finding
from graphguard.graph.paths import in_one


def alike(findings: Iterable[Finding]) -> list[Finding]:
    """What is said of several outputs alike, at one place, is one finding."""
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        said = each.message.replace(each.output, "") if each.output else each.message
        where = None if each.distributed is None else each.distributed.place
        key = (each.kind, said, each.ranks) if where is None else (each.kind, where)
        groups.setdefault(key, []).append(each)
    return [_one(group) for group in groups.values()]


def _one(group: list[Finding]) -> Finding:
    first, *rest = group
    where = first.distributed
    if where is not None:  # one line, in all modules that run it
        where = where.inside(in_one(each.distributed.module for each in group if each.distributed is not None))
    return replace(first, distributed=where, spoils=tuple(each.output for each in rest if each.output))
