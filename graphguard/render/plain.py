"""What the projections of the JSON share: how a check of it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from graphguard.graph.paths import in_words

Plain = dict[str, Any]


class Place(NamedTuple):
    file: str
    line: int | None


def place_of(text: str | None) -> Place | None:
    """`file:line` taken apart."""
    if text is None:
        return None
    file, _, line = text.rpartition(":")
    return Place(file, int(line)) if file and line.isdigit() else Place(text, None)


def name_of(check: Plain) -> str:
    return f"{check['file']}::{check['name']}" if check["file"] else str(check["name"])


def home_of(check: Plain) -> Place | None:
    """Where the check itself is."""
    return Place(check["file"], check["line"]) if check["file"] else None


def as_expected(check: Plain) -> bool:
    return check["verdict"] is not None and check["verdict"] == check["expect"] and not has_forbidden_conditions(check)


def has_forbidden_conditions(check: Plain) -> bool:
    verified = check["verdict"] == check["expect"] == "verified"
    return bool(check["strict"] and verified and (check["conditions"] or check["paths"] is not None))


def conditions_text(check: Plain) -> str:
    """What must hold, and where it is needed."""
    return " and ".join(f"{each['text']}, {each['source']}" for each in check["conditions"])


def along_text(check: Plain) -> str:
    """That a verdict is not one for all inputs; nothing if it is."""
    if check["verdict"] != "verified" or check["paths"] is None:
        return ""
    decided = "; ".join(f"{each['text']}, {each['ways']} tried" for each in check["decisions"])
    return f" along {check['paths']} {'path' if check['paths'] == 1 else 'paths'} ({decided})"


def surprise(check: Plain) -> str:
    """The verdict of a check that was to have another, in words."""
    if has_forbidden_conditions(check):
        if not check["conditions"]:
            return f"{name_of(check)} is verified{along_text(check)}, but --strict asks for all inputs"
        return f"{name_of(check)} is verified where {conditions_text(check)}, but --strict allows no conditions"
    return f"{name_of(check)} is {check['verdict']}, but {check['expect']} is expected"


def finding_text(finding: Plain) -> str:
    """A finding in one paragraph."""
    repair = f" Repair: {finding['repair']}" if finding["repair"] else ""
    spoiled = f" {spoils_text(finding['kind'], finding['spoils'])}." if finding["spoils"] else ""
    odd = "".join(f" Unlike the others: {text}." for text in finding["odd"])
    inside = f" It is in {finding['module']}." if finding["module"] else ""
    return f"{finding['message']}.{inside} {finding['law']}{'' if finding['law'].endswith('.') else '.'}{repair}{odd}{spoiled}"


def spoils_text(kind: str, paths: Sequence[str]) -> str:
    """What else is wrong because of a fault, or open because of what stopped a proof."""
    many = len(paths)
    what = "more output" if many == 1 else "more outputs"
    said = "open for the same reason" if kind == "relation-lost" else "wrong because of it"
    return f"{many} {what} {'is' if many == 1 else 'are'} {said}: {in_words(paths)}"


def counterexample_text(check: Plain) -> str | None:
    example = check["counterexample"]
    if example is None:
        return None
    element = example["element"]
    place = f"[{', '.join(map(str, element['index']))}]" if element["index"] else ""
    inputs = f"inputs: {', '.join(example['inputs'])}" if example["inputs"] else f"seed {example['seed']}"
    return (
        f"On rank {element['rank']}, {element['path']}{place} is {element['actual']}, "
        f"where the sequential program has {element['expected']} ({inputs})."
    )
