"""Paths of outputs and of modules, many of them in a few words: `grads.h.*.ln_{1,2}.weight`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_ALIKE = 4  # names that are told one by one; of more there is a star
MOST_TOLD = 3  # patterns
Pattern = tuple[tuple[str, ...], ...]  # the names that each part of a path may have


def folded(paths: Iterable[str]) -> list[str]:
    """Patterns that have all of these paths; paths that differ in one part are told as one."""
    found: list[Pattern] = list(dict.fromkeys(tuple((part,) for part in path.split(".")) for path in paths))
    merged = True
    while merged:
        found, merged = _merged(found)
    return [".".join(map(_told, pattern)) for pattern in found]


def in_words(paths: Sequence[str]) -> str:
    """A few patterns, and how many more there are."""
    patterns = folded(paths)
    more = f" and {len(patterns) - MOST_TOLD} more" if len(patterns) > MOST_TOLD else ""
    return ", ".join(patterns[:MOST_TOLD]) + more


def in_one(paths: Iterable[str]) -> str:
    """The pattern that has all of these paths: `layers.*.mlp`; empty where no single one does."""
    distinct = list(dict.fromkeys(paths))
    patterns = folded(distinct) if all(distinct) else []
    return patterns[0] if len(patterns) == 1 else ""


def _merged(patterns: list[Pattern]) -> tuple[list[Pattern], bool]:
    """One round: patterns that are alike but for one part."""
    length = max(map(len, patterns), default=0)
    for place in range(length):
        groups: dict[object, list[Pattern]] = {}
        for pattern in patterns:
            others = (len(pattern), pattern[:place], pattern[place + 1 :])
            key = others if place < len(pattern) > 1 else pattern  # a name alone is told as it is
            groups.setdefault(key, []).append(pattern)
        if len(groups) < len(patterns):
            return [_joined(group, place) for group in groups.values()], True
    return patterns, False


def _joined(group: list[Pattern], place: int) -> Pattern:
    if len(group) == 1:
        return group[0]
    names = tuple(dict.fromkeys(name for pattern in group for name in pattern[place]))
    return (*group[0][:place], names, *group[0][place + 1 :])


def _told(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return names[0]
    if len(names) > MOST_ALIKE or (len(names) > 2 and all(name.isdigit() for name in names)):
        return "*"
    head = _common(names)
    return f"{head}{{{','.join(name[len(head) :] for name in names)}}}"


def _common(names: tuple[str, ...]) -> str:
    """What all of them begin with, up to a last `_`."""
    first = min(names, key=len)
    length = next((n for n in range(len(first)) if any(name[n] != first[n] for name in names)), len(first))
    return first[: first.rfind("_", 0, length) + 1]
