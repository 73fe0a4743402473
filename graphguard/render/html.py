"""Reports as HTML: one page per check that needs no network, an index of several, and a fragment for notebooks.

Everything that comes from a program or a file is escaped. A page runs no script but its own, whose hash its policy names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections import Counter
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from graphguard.errors import UsageError
from graphguard.graph.findings import KINDS, Finding, Place
from graphguard.graph.ir import Source
from graphguard.graph.listing import STATES, ListedProgram
from graphguard.graph.paths import folded
from graphguard.graph.tensor_layout import TensorLayout
from graphguard.render.excerpt import excerpt
from graphguard.render.explain import PAGES
from graphguard.render.plain import spoils_text
from graphguard.render.relations import Row
from graphguard.render.relations import rows as folded_rows
from graphguard.render.shown import ShownOutcome, ShownReport
from graphguard.render.svg import svg
from graphguard.render.terminal import count
from graphguard.render.write import write_text

MOST_FINDINGS = 20
MANY = 12  # findings and outputs, from which on they are folded and searched
_FEW_INPUTS = 8  # that are shown one by one
_NAMED = re.compile(r"%\d+|work=\d+")  # tensors and works, by their names
_VERDICTS = ("verified", "refuted", "unproven", "error")
MOST_SCRIPT = 100_000  # characters


@cache
def _asset(name: str) -> str:
    return (resources.files("graphguard.render") / name).read_text(encoding="utf-8")


def page(report: ShownReport, name: str = "", expect: str | None = None) -> str:
    """The whole report."""
    title = name or "GraphGuard report"
    aside = "" if expect in (None, report.verdict) else f" (expected {expect})"
    head = f'<header>{_badge(report)}<h1>{escape(title)}{escape(aside)}</h1><span class="soft">GraphGuard</span></header>'
    head += f'<p class="facts soft">{escape(_facts(report))}</p>' if report.stats else ""
    body = _finder(report) + _summary(report) + _operations(report) + _grounds(report)
    return _document(f"{report.verdict}: {title}", head + body)


def fragment(report: ShownReport) -> str:
    """For a notebook: no script, and no operations."""
    style = f"<style>{_asset('page.css')}</style>"
    return f'{style}<div class="graphguard">{_badge(report)}{_summary(report)}{_grounds(report)}</div>'


def _document(title: str, body: str) -> str:
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": escape(title),
        "style": _asset("page.css"),
        "script_hash": f"'sha256-{digest}'",
        "script": script,
        "body": body,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


# ---------------------------------------------------------------------- parts of a page
def _badge(report: ShownReport) -> str:
    """The verdict, and that it is not one for all inputs, if it is not."""
    along = f" along {report.paths} paths" if report.verified and report.paths is not None else ""
    return _label(report.verdict, report.verdict + along)


def _facts(report: ShownReport) -> str:
    """On what, how long it took, and by which versions."""
    stats = report.stats
    said = [stats["mesh"]] if stats.get("mesh") else []
    classes = stats.get("classes")
    said.append(count(stats["ranks"], "rank") + (f" in {classes} {'class' if classes == 1 else 'classes'}" if classes else ""))
    said.append(count(stats["ops"], "operation"))
    said += [f"{phase} {value:.2f} s" for phase, value in stats["seconds"].items() if value is not None]
    said += [f"{name} {version}" for name, version in stats.get("versions", {}).items()]
    return " · ".join(said)


def _label(kind: str, text: str) -> str:
    return f'<span class="verdict {escape(kind)}">{escape(text)}</span>'


def _summary(report: ShownReport) -> str:
    parts = [_finding(finding, number == 0) for number, finding in enumerate(report.findings[:MOST_FINDINGS])]
    if len(report.findings) > MOST_FINDINGS:
        parts.append(f"<p>and {len(report.findings) - MOST_FINDINGS} more findings</p>")
    guessed = "".join(f'<p class="law"><b>Guessed:</b> {escape(text)}</p>' for text in report.guesses)
    found = f"<section><h2>Findings</h2>{guessed}{''.join(parts)}</section>" if parts else ""
    return found + _counterexample(report) + _relations(report)


def _finder(report: ShownReport) -> str:
    """A box that searches findings and outputs, where they are many."""
    said = "Search findings and outputs"
    many = len(report.findings) + len(report.relation) > MANY
    return f'<input id="find" type="search" placeholder="{said}" aria-label="{said}">' if many else ""


def _finding(finding: Finding, is_first: bool) -> str:
    """The first finding is open; the others are opened by a click."""
    phase = f" ({finding.phase})" if finding.phase else ""
    phase += f", time {finding.turn[0]} of {finding.turn[1]}" if finding.turn else ""
    places = [("sequential", finding.sequential), ("distributed", finding.distributed)]
    if finding.at_one_line:
        places = [("both", finding.distributed)]
    sides = [_side(side, source, phase) for side, source in places if source is not None]
    told = {each.place for each in (finding.sequential, *finding.lines) if each is not None}
    others = {source.place: source for source in finding.sources if source.place not in told}
    sides += [_side("beside", source, "") for source in others.values()]
    repair = f"<p><b>Repair:</b> {escape(finding.repair)}</p>" if finding.repair else ""
    spoiled = f"<p>{escape(spoils_text(finding.kind, finding.spoils))}</p>" if finding.spoils else ""
    odd = "".join(f"<p><b>Unlike the others:</b> {escape(text)}</p>" for text in finding.odd)
    detail = f'<p class="soft">{escape(finding.detail)}</p>' if finding.detail else ""
    further = "".join(map(_further_place, finding.places))
    pictures = "".join(_holding(holding) for holding in finding.holdings)
    return (
        f'<details class="card found"{" open" if is_first else ""}><summary>'
        f"<b>{escape(finding.code)} {escape(finding.kind)}</b> {escape(finding.message)}</summary>"
        f'<p class="law">{escape(finding.law or KINDS[finding.kind].law)}</p>{repair}{odd}{spoiled}{detail}'
        f'<div class="sides">{"".join(sides)}</div><div class="sides">{pictures}</div>{further}'
        f'<p class="soft"><b>What to do.</b> {_with_code(PAGES[finding.kind].advice)}</p></details>'
    )


def _further_place(place: Place) -> str:
    text = next((line.text for line in excerpt(place.source, around=0) if line.marked), "")
    said = place.words[0].upper() + place.words[1:]
    return (
        f'<details class="card"><summary><b>{said}</b> <span class="mono">{escape(place.source.told)}</span> '
        f"<code>{escape(text)}</code></summary>"
        f'<div class="sides">{_side("distributed", place.source, "")}</div></details>'
    )


def _with_code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _side(side: str, source: Source, phase: str) -> str:
    inside = f" in {source.function}" if source.function else ""
    lines = "".join(
        f"<span{' class=marked' if line.marked else ''}><b>{'&gt; ' if line.marked else '  '}{line.number}</b>"
        f"{escape(line.text)}</span>"
        for line in excerpt(source, around=3)
    )
    where = f'<b>{escape(side)}</b> <span class="mono">{escape(source.told)}</span>{escape(inside + phase)}'
    return f'<div class="side"><p>{where}</p>{f"<pre>{lines}</pre>" if lines else ""}</div>'


def _holding(holding: TensorLayout) -> str:
    said = "is expected as" if holding.role == "expected" else "is"
    words = f"<b>{escape(holding.name)}</b> {said} <code>{escape(holding.type)}</code> on {escape(str(holding.mesh))}"
    return f'<figure class="side" style="margin:0"><p>{words}</p>{svg(holding)}</figure>'


def _counterexample(report: ShownReport) -> str:
    example = report.counterexample
    if example is None:
        return ""
    first, *rest = [line.strip().removeprefix("counterexample: ") for line in example.lines()]
    rows = [re.split(r"  +", line, maxsplit=1) for line in rest]
    lines = "".join(f"<dt>{escape(row[0])}</dt><dd class=mono>{escape(row[-1])}</dd>" for row in rows)
    script = (
        f"<details><summary>A script that shows it with torch alone</summary><pre class=script>{escape(example.script)}</pre>"
        "</details>"
        if len(example.script) <= MOST_SCRIPT
        else ""
    )
    card = f'<div class="card"><p><b>{escape(first)}</b></p><dl>{lines}</dl>{script}</div>'
    return f"<section><h2>Counterexample</h2>{card}</section>"


def _relations(report: ShownReport) -> str:
    if len(report.relation) > MANY:
        lines = [_row(row, report) for row in folded_rows(report.relation.values())]
    else:
        lines = [_relation(each.text, each.type or "") for each in report.relation.values()]
    lines += [_relation(text, "conjecture, not proved") for text in report.conjecture.values()]
    if not lines:
        return ""
    return (
        '<section><h2>Output relations</h2><div class="scroll"><table><tr><th>each output, rebuilt from the ranks</th>'
        f"<th>held as</th></tr>{''.join(lines)}</table></div></section>"
    )


def _relation(text: str, held: str) -> str:
    return f"<tr class=found><td class=mono>{escape(text)}</td><td class=mono>{escape(held)}</td></tr>"


def _row(row: Row, report: ShownReport) -> str:
    """Outputs that are held alike, opened by a click."""
    if len(row.paths) == 1:
        return _relation(row.text, row.type or "")
    each = "".join(f"<div>{escape(report.relation[path].text)}</div>" for path in row.paths)
    return f"<tr class=found><td class=mono><details><summary>{escape(row.text)}</summary>{each}</details></td><td></td></tr>"


def _grounds(report: ShownReport) -> str:
    alike: dict[str, list[str]] = {}
    for name, text in report.parameters.items():
        alike.setdefault(text, []).append(name)
    found = [f"{', '.join(folded(names))}: {text}" for text, names in alike.items()]
    lists = {
        "Conditions": [str(condition) for condition in report.conditions],
        "Decisions by values": [str(choice) for choice in report.decisions],
        "Notes": report.notes,
        "Assumptions": report.assumptions,
        "Parameters": found,
        "Operators without a lemma": report.opaque,
        "Limits that were reached": [str(stop) for stop in report.stopped],
    }
    parts = [
        f"<section><h2>{title}</h2><ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul></section>"
        for title, texts in lists.items()
        if texts
    ]
    if report.stats:
        stats = report.stats
        rows = [("operations", stats["ops"]), ("ranks", stats["ranks"])]
        rows += [(f"{phase}, seconds", f"{value:.2f}") for phase, value in stats["seconds"].items() if value is not None]
        cells = "".join(f"<tr><td>{escape(name)}</td><td class=number>{escape(str(value))}</td></tr>" for name, value in rows)
        parts.append(f'<section><h2>Size and time</h2><table style="width:auto">{cells}</table></section>')
    return "".join(parts)


# ---------------------------------------------------------------------- operations
def _operations(report: ShownReport) -> str:
    programs = report.listing
    if not programs:
        return ""
    focus = Focus(report)
    data = json.dumps([_plain(program, focus) for program in programs], separators=(",", ":"))
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    button = '<button id="to-break">Show the break</button>' if report.findings else ""
    without = (
        "Red: it has no such relation." if report.findings else "Grey: it has no counterpart, which is no fault by itself."
    )
    return (
        f"<section{'' if report.findings else ' class=proved'}><h2>Operations</h2>"
        '<p class="soft">Green: the other program has it, as a copy, a tile or a summand. '
        f"{without} Yellow: no description. Click a rank's operation to see its partner.</p>"
        '<div class="bar"><input id="search" type="search" placeholder="Search operations, files and relations  ( / )" '
        'aria-label="Search operations"><label><input id="lost" type="checkbox"> only without a relation</label>'
        '<label><input id="sent" type="checkbox"> only communication</label>'
        f"{button}</div>"
        '<div class="panes"><div class="pane" id="sequential"><h3>sequential <span class="count soft"></span></h3>'
        '<div class="rows" tabindex="0"></div></div>'
        '<div class="pane" id="distributed"><h3><select id="program" aria-label="Ranks"></select> '
        '<span class="count soft"></span></h3>'
        f'<div class="rows" tabindex="0"></div></div></div><script type="application/json" id="data">{safe}</script></section>'
    )


def _plain(program: ListedProgram, focus: Focus) -> dict[str, Any]:
    """modules: their paths, which operations name by number. Operations of one kind differ in the tensors alone."""
    inputs = "inputs" if sum(each.operator == "input" for each in program.operations) > _FEW_INPUTS else ""
    modules: dict[str, int] = {"": 0}
    kinds: dict[object, int] = {}
    lines: dict[tuple[str, int], str] = {}
    rows = []
    for each in program.operations:
        state = STATES.index(each.state)
        kind = kinds.setdefault((_NAMED.sub("%", each.text), each.backward, state), len(kinds))
        module = modules.setdefault(inputs if each.operator == "input" else each.module, len(modules))
        if each.source is not None and each.source.place not in lines:
            lines[each.source.place] = str(each.source)
        where = "" if each.source is None else lines[each.source.place]
        rows.append([each.number, each.text, where, int(each.backward), state, each.relation, module, kind])
    return {"name": program.name, "focus": focus.of(program), "modules": list(modules), "operations": rows}


class Focus:
    """The operation of each program at which the first finding points."""

    def __init__(self, report: ShownReport):
        self.finding = report.findings[0] if report.findings else None

    def of(self, program: ListedProgram) -> int | None:
        if self.finding is None:
            return None
        source = self.finding.distributed if program.ranks else self.finding.sequential
        if program.ranks and self.finding.ranks and not set(self.finding.ranks) & set(program.ranks):
            return None
        backward = None if self.finding.phase is None else self.finding.phase == "backward"
        here = [each for each in program.operations if source is not None and each.source == source]
        here = [each for each in here if backward in (None, each.backward)] or here
        here = [each for each in here if source is not None and each.module == source.module] or here
        broken = [each.number for each in here if each.state in ("unrelated", "undescribed")]
        return broken[0] if broken else here[-1].number if here else None


# ---------------------------------------------------------------------- several checks
class Pages:
    """A folder of pages with an index."""

    def __init__(self, folder: str):
        self.folder = folder
        self.rows: list[str] = []
        self.counts: Counter[str] = Counter()
        self.names: set[str] = set()
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise UsageError(f"--html {folder}: this is a file; give a folder")

    def add(self, outcome: ShownOutcome) -> None:
        """Write the page of a check. A check that could not run is in the index only."""
        check, report = outcome.check, outcome.report
        self.counts["error" if report is None else report.verdict] += 1
        if report is None:
            name, why = escape(str(check)), escape(str(outcome.error))
            cells = f"{_label('error', 'error')}</td><td class=name>{name}</td><td>{why}</td><td class=number>"
        else:
            file = self._file(check.name)
            write_text(os.path.join(self.folder, file), page(report, str(check), check.expect))
            report.programs = None  # they are large, and on the page
            reasons = [str(finding) for finding in report.findings[:1]] or [each.text for each in report.relation.values()][:3]
            aside = "" if outcome.as_expected else f"<br><span class=soft>expected {escape(check.expect)}</span>"
            seconds = sum(value or 0.0 for value in report.stats.get("seconds", {}).values())
            cells = (
                f'{_badge(report)}{aside}</td><td class=name><a href="{escape(file)}">{escape(str(check))}</a></td>'
                f"<td>{'<br>'.join(map(escape, reasons))}</td><td class=number>{seconds:.2f}"
            )
        self.rows.append(f"<tr><td class=fixed>{cells}</td></tr>")

    def finish(self) -> None:
        counts = ", ".join(f"{self.counts[verdict]} {verdict}" for verdict in _VERDICTS if self.counts[verdict])
        aside = counts.replace("error", "that could not run")
        head = f'<header><h1>GraphGuard</h1><span class="soft">{escape(aside or "no checks")}</span></header>'
        table = f"<tr><th>verdict</th><th>check</th><th>why</th><th>seconds</th></tr>{''.join(self.rows)}"
        body = f'{head}<div class="scroll"><table>{table}</table></div>'
        write_text(os.path.join(self.folder, "index.html"), _document("GraphGuard", body))

    def _file(self, name: str) -> str:
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100].strip(".") or "check"
        count, chosen = 1, stem
        while chosen.lower() in self.names or chosen.lower() == "index":
            count += 1
            chosen = f"{stem}-{count}"
        self.names.add(chosen.lower())
        return f"{chosen}.html"
