"""The JSON as annotations of GitHub Actions: one per finding of a check whose verdict is not the expected one."""

from __future__ import annotations

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
    surprise,
)
from graphguard.render.repository import in_repository


def github(plain: Plain) -> str:
    lines = [line for check in plain["checks"] for line in _annotations(check)]
    return "".join(f"{line}\n" for line in lines)


def _annotations(check: Plain) -> list[str]:
    if check["verdict"] is None:
        return [_annotation("error", home_of(check), f"{name_of(check)} could not run", check["error"])]
    if along_text(check) and not check["conditions"]:
        level = "error" if has_forbidden_conditions(check) else "notice"
        return [
            _annotation(level, home_of(check), "paths", f"{name_of(check)} is verified{along_text(check)}, not for all inputs")
        ]
    if check["verdict"] == "verified" and check["conditions"]:
        level = "error" if has_forbidden_conditions(check) else "warning"
        return [
            _annotation(
                level,
                place_of(each["source"]) or home_of(check),
                "condition",
                f"{name_of(check)} is verified{along_text(check)} where {each['text']}",
            )
            for each in check["conditions"]
        ]
    if as_expected(check):
        return []
    level = "warning" if check["verdict"] == "unproven" else "error"
    if not check["findings"]:
        return [_annotation(level, home_of(check), name_of(check), surprise(check))]
    example = counterexample_text(check)
    lines = []
    for finding in check["findings"]:
        sides = [in_repository(place_of(finding[side])) for side in ("distributed", "sequential")]
        text = f"{name_of(check)} is {check['verdict']}: {finding_text(finding)}"
        where = sides[0] if finding["distributed"] else sides[1]
        if where is None:  # a fault in a library is told at the check
            where = home_of(check)
            text += f" It is at {finding['distributed']}." if finding["distributed"] else ""
        if finding["sequential"]:
            text += f" The sequential program is at {finding['sequential']}."
        lines.append(
            _annotation(level, where, f"{finding['code']} {finding['kind']}", f"{text} {example}" if example else text)
        )
    return lines


def _annotation(level: str, place: Place | None, title: str, text: str) -> str:
    place = in_repository(place) or place
    where = [] if place is None else [f"file={_property(place.file)}", *([f"line={place.line}"] if place.line else [])]
    return f"::{level} {','.join([*where, f'title={_property(title)}'])}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
