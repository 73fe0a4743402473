"""The JSON as SARIF 2.1.0, for code scanning: a result per finding, in the place of the distributed program.

A finding of a check that expects its verdict is there, and suppressed in source. A check that could not run, or whose verdict
surprises without a finding, is a notification; the run is then unsuccessful.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from graphguard import __version__
from graphguard.graph.findings import KINDS, PLACES
from graphguard.render.explain import PAGES
from graphguard.render.plain import (
    Place,
    Plain,
    along_text,
    as_expected,
    counterexample_text,
    finding_text,
    has_forbidden_conditions,
    home_of,
    name_of,
    place_of,
)
from graphguard.render.plain import surprise as surprise_text
from graphguard.render.repository import in_repository

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"refuted": "error", "unproven": "warning", "verified": "note"}


def sarif(plain: Plain) -> dict[str, Any]:
    codes = list({finding["code"]: None for check in plain["checks"] for finding in check.get("findings", ())})
    notifications = [note for check in plain["checks"] for note in _notifications(check)]
    run = {
        "tool": {
            "driver": {
                "name": "GraphGuard",
                "semanticVersion": __version__.replace(".dev", "-dev."),
                "rules": [_rule(code) for code in codes],
            }
        },
        "invocations": [
            {
                "executionSuccessful": not any(check["verdict"] is None for check in plain["checks"]),
                "toolExecutionNotifications": notifications,
            }
        ],
        "columnKind": "unicodeCodePoints",
        "results": [
            _result(check, finding, codes.index(finding["code"]))
            for check in plain["checks"]
            for finding in check.get("findings", ())
        ],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(code: str) -> dict[str, Any]:
    kind = next(kind for kind in KINDS.values() if kind.code == code)
    page = PAGES.get(kind.name)
    return {
        "id": kind.code,
        "name": kind.name,
        "shortDescription": {"text": kind.law},
        "fullDescription": {"text": kind.meaning},
        "help": {"text": kind.meaning if page is None else f"{page.law}\n\n{page.advice}"},
        "defaultConfiguration": {"level": "error"},
    }


def _result(check: Plain, finding: Plain, index: int) -> dict[str, Any]:
    sequential, distributed = place_of(finding["sequential"]), place_of(finding["distributed"])
    shown = _shown_at(distributed or sequential, check)
    text = f"{name_of(check)}: {finding_text(finding)}"
    example = counterexample_text(check)
    result: dict[str, Any] = {
        "ruleId": finding["code"],
        "ruleIndex": index,
        "level": _LEVELS[check["verdict"]],
        "message": {"text": text if example is None else f"{text} {example}"},
        "locations": [_location(shown, finding["module"])] if shown is not None else [],
        "properties": {"check": name_of(check), "verdict": check["verdict"], "phase": finding["phase"]},
    }
    others = [place_of(source) for source in finding["sources"]]
    flow = [place for place in dict.fromkeys([sequential, *reversed(others), distributed]) if place is not None]
    both = sequential is not None and distributed is not None
    related = [(sequential, finding["sequential_module"], "the sequential program")] if both else []
    related += [(place_of(each["distributed"]), each["module"], PLACES[each["kind"]]) for each in finding["places"]]
    if related:
        result["relatedLocations"] = [
            {**_location(place, module), "message": {"text": said}} for place, module, said in related if place
        ]
    if len(flow) > 1:
        result["codeFlows"] = [{"threadFlows": [{"locations": [{"location": _location(place)} for place in flow]}]}]
    if as_expected(check):
        result["suppressions"] = [{"kind": "inSource", "justification": f"the check expects to be {check['expect']}"}]
    return result


def _shown_at(place: Place | None, check: Plain) -> Place | None:
    """A fault in a library is shown at the check."""
    return place if in_repository(place) is not None else home_of(check) or place


def _notifications(check: Plain) -> list[dict[str, Any]]:
    if check["verdict"] is None:
        text = f"{name_of(check)} could not run: {check['error']}"
    elif check["verdict"] == "verified" and check["conditions"]:
        return [_conditional(check, condition) for condition in check["conditions"]]
    elif along_text(check) and as_expected(check):
        home, text = home_of(check), f"{name_of(check)} is verified{along_text(check)}, not for all inputs"
        return [{"level": "note", "message": {"text": text}, **({"locations": [_location(home)]} if home else {})}]
    elif not as_expected(check) and not check["findings"]:
        text = surprise_text(check)
    else:
        return []
    home = home_of(check)
    return [{"level": "error", "message": {"text": text}, **({"locations": [_location(home)]} if home else {})}]


def _conditional(check: Plain, condition: Plain) -> dict[str, Any]:
    place = place_of(condition["source"]) or home_of(check)
    text = f"{name_of(check)} is verified{along_text(check)} where {condition['text']}"
    level = "error" if has_forbidden_conditions(check) else "warning"
    return {"level": level, "message": {"text": text}, **({"locations": [_location(place)]} if place else {})}


def _location(place: Place, module: str | None = None) -> dict[str, Any]:
    """A line, and which module of the model runs it."""
    region = {"region": {"startLine": place.line}} if place.line else {}
    place = in_repository(place) or place
    uri = quote(place.file.replace("\\", "/"), errors="surrogateescape")
    inside = {"logicalLocations": [{"fullyQualifiedName": module, "kind": "module"}]} if module else {}
    artifact = {"uri": f"file://{uri}" if uri.startswith("/") else uri}
    return {"physicalLocation": {"artifactLocation": artifact, **region}, **inside}
