"""The JSON as JUnit XML: a test case per check, which fails if its verdict is not the expected one."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from graphguard.render.plain import (
    Plain,
    along_text,
    as_expected,
    conditions_text,
    counterexample_text,
    finding_text,
    surprise,
)

_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(plain: Plain) -> str:
    checks = plain["checks"]
    counts = {
        "tests": str(len(checks)),
        "failures": str(sum(check["verdict"] is not None and not as_expected(check) for check in checks)),
        "errors": str(sum(check["verdict"] is None for check in checks)),
        "time": f"{sum(map(_seconds, checks)):.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": "graphguard", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "graphguard", "skipped": "0", **counts})
    for check in checks:
        _add_case(suite, check)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def _add_case(suite: ElementTree.Element, check: Plain) -> None:
    where = {"file": _valid(check["file"]), **({"line": str(check["line"])} if check["line"] else {})} if check["file"] else {}
    names = {"classname": _valid(check["file"] or "graphguard"), "name": _valid(check["name"])}
    case = ElementTree.SubElement(suite, "testcase", {**names, **where, "time": f"{_seconds(check):.3f}"})
    properties = ElementTree.SubElement(case, "properties")
    for name in ("verdict", "expect"):
        ElementTree.SubElement(properties, "property", {"name": name, "value": check[name] or "error"})
    if check["verdict"] is None:
        ElementTree.SubElement(case, "error", {"message": _valid(check["error"]), "type": "error"}).text = _valid(
            check["error"]
        )
    elif not as_expected(check):
        first = check["findings"][0]["message"] if check["findings"] else surprise(check)
        failure = ElementTree.SubElement(case, "failure", {"message": _valid(first), "type": check["verdict"]})
        failure.text = _valid("\n".join(_details(check)))
    else:
        text = "\n".join(relation["text"] for relation in check["relation"].values())
        text += f"\nverified{along_text(check)}" if along_text(check) else ""
        text += f"\nwhere {conditions_text(check)}" if text and check["conditions"] else ""
        ElementTree.SubElement(case, "system-out").text = _valid("\n".join([text] if text else _details(check)))


def _details(check: Plain) -> list[str]:
    lines = [surprise(check)] if not as_expected(check) else []
    for finding in check["findings"]:
        lines.append(f"{finding['code']} {finding['kind']}: {finding_text(finding)}")
        lines += [f"  {side} {finding[side]}" for side in ("module", "sequential", "distributed") if finding[side]]
    example = counterexample_text(check)
    return lines + ([example] if example else [])


def _seconds(check: Plain) -> float:
    return float(sum(value or 0.0 for value in (check.get("stats") or {}).get("seconds", {}).values()))


def _valid(text: str) -> str:
    """Without what XML cannot hold, even escaped."""
    return _INVALID.sub("\ufffd", text)
