"""A report as a person reads it on a terminal: the verdict first, then what it rests on, on one screen.

A line is a list of pieces of text, each with a style; plain text is the same without the styles.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TextIO

from graphguard.engine.proof import Relation
from graphguard.graph.findings import KINDS, Finding, Place
from graphguard.graph.ir import Source
from graphguard.graph.tensor_layout import TensorLayout
from graphguard.render.excerpt import SourceLine, excerpt
from graphguard.render.picture import picture
from graphguard.render.plain import spoils_text
from graphguard.render.relations import rows
from graphguard.render.shown import SHOWN_CONDITIONS, ShownOutcome, ShownReport

# of a text that is not verbose
SHOWN_RELATIONS, SHOWN_BESIDE, SHOWN_FINDINGS, SHOWN_PLACES, SHOWN_HOLDINGS, SHOWN_TEXTS, SHOWN_ODD = 12, 3, 4, 3, 2, 6, 2
_STYLES = {
    "verified": "1;32", "refuted": "1;31", "unproven": "1;33", "error": "1;31", "head": "1", "dim": "2", "mark": "1;36",
}  # fmt: skip
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], "·")
Line = list["Piece"]


class Piece(NamedTuple):
    text: str
    style: str = ""


class Look(NamedTuple):
    """How text is shown: with colours, with what width (None for any), with which characters."""

    colours: bool = False
    width: int | None = None
    unicode: bool = True
    verbose: bool = False

    @staticmethod
    def of(stream: TextIO, verbose: bool = False) -> Look:
        """As fits a stream: colours and a width are for terminals."""
        terminal = stream.isatty()
        unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        width = max(40, shutil.get_terminal_size((100, 24)).columns) if terminal else None
        return Look(terminal and not unwanted, width, _can_encode(stream), verbose)


def _can_encode(stream: TextIO) -> bool:
    try:
        "┌─┐│└┘×…·".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


# ---------------------------------------------------------------------- lines to text
def shown(lines: Iterable[Line], look: Look, indent: str = "") -> list[str]:
    """The lines as text: no control characters of others, cut or wrapped to the width."""
    texts: list[str] = []
    for line in lines:
        pieces = [Piece(piece.text.translate(_CONTROLS), piece.style) for piece in line]
        if not look.unicode:
            pieces = [Piece(piece.text.encode("ascii", "replace").decode(), piece.style) for piece in pieces]
        texts += _fitted(pieces, look, indent)
    return texts


def _fitted(pieces: Line, look: Look, indent: str) -> list[str]:
    length = len(indent) + sum(len(piece.text) for piece in pieces)
    if look.width is None or length <= look.width:
        return [(indent + "".join(_styled(piece, look) for piece in pieces)).rstrip()]
    if any(piece.style in ("code", "mark", "box") for piece in pieces):
        return [indent + _cut(pieces, look.width - len(indent), look)]
    first, text = pieces[0], "".join(piece.text for piece in pieces[1:])
    lead = len(first.text) - len(first.text.lstrip())
    wrapped = textwrap.wrap(
        first.text.lstrip() + text, look.width - len(indent) - lead, subsequent_indent="  ", break_on_hyphens=False
    )
    if first.style and wrapped and wrapped[0].startswith(first.text.strip()):
        wrapped[0] = _styled(Piece(first.text.strip(), first.style), look) + wrapped[0][len(first.text.strip()) :]
    return [indent + " " * lead + part for part in wrapped]


def _cut(pieces: Line, width: int, look: Look) -> str:
    text, left = "", width - 1
    for piece in pieces:
        text += _styled(Piece(piece.text[:left], piece.style), look)
        left -= len(piece.text[:left])
    return text + ("…" if look.unicode else ">")


def _styled(piece: Piece, look: Look) -> str:
    code = _STYLES.get(piece.style)
    return f"\x1b[{code}m{piece.text}\x1b[0m" if look.colours and code and piece.text else piece.text


# ---------------------------------------------------------------------- a check
def outcome_lines(outcome: ShownOutcome, look: Look) -> list[str]:
    """The verdict of a check, and its report below it."""
    report = outcome.report
    if report is None:
        return shown([[Piece("error", "error"), Piece(f": {outcome.complaint}")]], look)
    return shown([head_line(outcome)], look) + shown(report_lines(report, look), look, "  ")


def concise_lines(outcome: ShownOutcome, look: Look) -> list[str]:
    """The verdict of a check, and the first finding or the relations."""
    report = outcome.report
    if report is None:
        return outcome_lines(outcome, look)
    reasons = [str(finding) for finding in report.findings[:1]] or [each.text for each in report.relation.values()]
    return shown([head_line(outcome)], look) + shown([[Piece(text)] for text in reasons], look, "  ")


def head_line(outcome: ShownOutcome) -> Line:
    assert outcome.report is not None
    report, expect = outcome.report, outcome.check.expect
    aside = f" (expected {expect})" if not outcome.as_expected else " (as expected)" if expect != "verified" else ""
    if outcome.has_forbidden_conditions:
        aside = f" (--strict allows no {'conditions' if report.conditions else 'paths'})"
    where = report.headline.removeprefix(report.verdict)
    return [Piece(report.verdict, report.verdict), Piece(f"{where}{aside}: {outcome.check}")]


# ---------------------------------------------------------------------- a report
def report_lines(report: ShownReport, look: Look) -> list[Line]:
    """What the verdict rests on."""
    if not report.findings:
        lines = _relations(list(report.relation.values()), look, SHOWN_RELATIONS)
    else:
        lines = [*_guesses(report), *_findings(report.findings, look)]
    if report.counterexample is not None:
        lines += [[], *([Piece(text)] for text in report.counterexample.lines())]
    if report.findings and report.relation:
        lines += [[], [Piece("proved all the same", "head")]]
        lines += [[Piece("  "), *line] for line in _relations(list(report.relation.values()), look, SHOWN_BESIDE)]
    lines += _open_ends(report, look)
    if len(report.conditions) > SHOWN_CONDITIONS or (report.conditions and not report.verified):
        lines += _texts("where: ", [str(condition) for condition in report.conditions], look)
    rest = _texts("decided: ", [str(each) for each in report.decisions], look)
    told = report.guesses if report.findings else ()  # above
    assumed = [text for text in report.assumptions if text not in told]
    rest += [*_texts("note: ", report.notes, look), *_texts("assumed: ", assumed, look)]
    if look.verbose:
        rest += _texts("parameter ", [f"{name}: {found}" for name, found in report.parameters.items()], look)
    rest += _stats(report)
    return lines + ([[]] if report.findings and rest else []) + rest


def _guesses(report: ShownReport) -> list[Line]:
    """That a verdict rests on layouts that nobody stated."""
    return [[Piece("guessed: ", "head"), Piece(text)] for text in report.guesses]


def _relations(relations: Sequence[Relation], look: Look, most: int) -> list[Line]:
    """Each output, or those that are held alike in one row, if they are too many."""
    if look.verbose or len(relations) <= most:
        return [[Piece(relation.text), *_type(relation, look)] for relation in relations]
    told, left = (found := rows(relations))[:most], found[most:]
    lines = [[Piece(row.text)] for row in told]
    return lines + _and_more(sum(len(row.paths) for row in left), "outputs; -v shows all")


def _type(relation: Relation, look: Look) -> Line:
    return [Piece(f"   : {relation.type}", "dim")] if look.verbose and relation.type is not None else []


def _findings(findings: Sequence[Finding], look: Look) -> list[Line]:
    first, *others = findings
    lines = _in_full(first, look)
    if look.verbose:
        return lines + [line for finding in others for line in [[], *_in_full(finding, look)]]
    if others:
        lines += [[], [Piece(f"and {'another finding' if len(others) == 1 else f'{len(others)} other findings'}", "head")]]
    for finding in others[: SHOWN_FINDINGS - 1]:
        where = finding.distributed or finding.sequential
        lines.append([Piece(f"  {finding}"), *([Piece(f"   {where.told}", "dim")] if where else [])])
        lines += [[Piece(f"    {spoils_text(finding.kind, finding.spoils)}")]] if finding.spoils else []
    return lines + _and_more(len(others) - SHOWN_FINDINGS + 1, "findings; -v shows all", "  ")


def _further_place(place: Place, look: Look) -> Line:
    text = next((line.text for line in excerpt(place.source, 0) if line.marked), "")
    bar = "│" if look.unicode else "|"
    return [Piece(f"{place.words} ", "head"), Piece(place.source.told), *([Piece(f"  {bar} {text}", "code")] if text else [])]


def _in_full(finding: Finding, look: Look) -> list[Line]:
    lines: list[Line] = [
        [Piece(f"{finding.code} {finding.kind}", "head"), Piece(f": {finding.message}")],
    ]
    if finding.law is None:
        lines.append([Piece("law: ", "dim"), Piece(KINDS[finding.kind].law)])
    elif finding.law not in finding.message:
        lines.append([Piece("why: ", "dim"), Piece(finding.law)])
    if finding.repair is not None:
        lines.append([Piece("repair: ", "head"), Piece(finding.repair)])
    odd = finding.odd if look.verbose else finding.odd[:SHOWN_ODD]
    lines += [[Piece("unlike the others: ", "head"), Piece(text)] for text in odd]
    if finding.detail is not None and (look.verbose or finding.kind == "relation-lost"):
        lines.append([Piece("proof: ", "dim"), Piece(finding.detail)])
    places = _places(finding, look)
    lines += [[], *places] if places else []
    holdings = finding.holdings if look.verbose else finding.holdings[:SHOWN_HOLDINGS]
    if holdings:
        alike = {
            str(lines): lines for lines in (_holding(holding, look) for holding in holdings)
        }  # of one name, and held alike
        lines += [[]] + [line for each in alike.values() for line in each]
    places = [_further_place(place, look) for place in (finding.places if look.verbose else finding.places[:SHOWN_PLACES])]
    places += [[Piece(spoils_text(finding.kind, finding.spoils))]] if finding.spoils else []
    return lines + ([[], *places] if places else [])


def _places(finding: Finding, look: Look) -> list[Line]:
    if finding.distributed is not None and finding.at_one_line:
        lines = _place("both", finding.distributed, finding.phase, look, finding.turn)
    else:
        lines = [
            line
            for side, source, turn in (
                ("sequential", finding.sequential, None),
                ("distributed", finding.distributed, finding.turn),
            )
            if source is not None
            for line in _place(side, source, finding.phase, look, turn)
        ]
    told = {each.place for each in (finding.sequential, *finding.lines) if each is not None}
    others = list({source.place: source for source in finding.sources if source.place not in told}.values())
    ranks = _ranks(finding.ranks)
    if look.verbose or KINDS[finding.kind].of_communication:
        most = len(others) if look.verbose else 1
        lines += [line for source in others[:most] for line in _place("also", source, None, look)]
    return lines + ([[Piece(f"seen on {ranks}")]] if ranks and look.verbose else [])


def _place(side: str, source: Source, phase: str | None, look: Look, turn: tuple[int, int] | None = None) -> list[Line]:
    inside = f" in {source.function}" if source.function and source.function != "<module>" else ""
    said = f"{source}{inside}{f' ({phase})' if phase else ''}"
    if source.module:
        said = f"{source.module} ({source}{inside}{f', {phase}' if phase else ''})"
    said += f", time {turn[0]} of {turn[1]}" if turn is not None else ""
    head = [Piece(side.ljust(13), "head"), Piece(said)]
    return [head, *(_code(line, look) for line in excerpt(source))]


def _code(line: SourceLine, look: Look) -> Line:
    bar = "│" if look.unicode else "|"
    if line.marked:
        return [Piece(f" > {line.number:>5} {bar} {line.text}", "mark")]
    return [Piece(f"   {line.number:>5} {bar} ", "dim"), Piece(line.text, "code")]


def _holding(holding: TensorLayout, look: Look) -> list[Line]:
    said = "is expected as" if holding.role == "expected" else "is"
    lines: list[Line] = [[Piece(f"{holding.name} ", "head"), Piece(f"{said} {holding.type} on {holding.mesh}")]]
    return lines + [[Piece(f"   {text}", "box")] for text in picture(holding, look.unicode)]


def _open_ends(report: ShownReport, look: Look) -> list[Line]:
    """What to do about an open question."""
    stopped: list[Line] = [[Piece("stopped: ", "head"), Piece(str(s))] for s in report.stopped if s.proves or look.verbose]
    if report.verdict != "unproven":
        return [[Piece(f"no lemma for {operator}")] for operator in report.opaque] + (stopped if look.verbose else [])
    lines: list[Line] = [[Piece(f"conjecture: {text}")] for text in report.conjecture.values()]
    for operator in report.opaque:
        name = "::".join(operator.split(".")[:2])
        lines.append([Piece(f"no lemma for {operator}: "), Piece(f'say what it computes with gg.lemma("{name}", ...)')])
    lines += stopped
    code = report.findings[0].code if report.findings else None
    if code is not None:
        lines.append([Piece("next: ", "head"), Piece(f"graphguard explain {code} says what to do")])
    return [[], *lines] if lines else []


def _texts(lead: str, texts: Sequence[str], look: Look) -> list[Line]:
    most = len(texts) if look.verbose else SHOWN_TEXTS
    what = f"{lead.rstrip(': ').replace('assumed', 'assumption')}s; -v shows all"
    return [[Piece(lead, "dim"), Piece(text)] for text in texts[:most]] + _and_more(len(texts) - most, what)


def _stats(report: ShownReport) -> list[Line]:
    if not report.stats:
        return []
    stats = report.stats
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in stats["seconds"].items() if value is not None)
    seconds += ", all else kept from an earlier run" if "kept" in stats else ""
    classes = f" in {stats['classes']} {'class' if stats['classes'] == 1 else 'classes'}" if stats.get("classes") else ""
    return [[Piece(f"{count(stats['ops'], 'operation')} on {count(stats['ranks'], 'rank')}{classes}; {seconds}", "dim")]]


def _and_more(number: int, what: str, indent: str = "") -> list[Line]:
    return [[Piece(f"{indent}... and {number} more {what}", "dim")]] if number > 0 else []


def _ranks(ranks: tuple[int, ...]) -> str:
    from graphguard.graph.listing import in_words

    return in_words(ranks) if ranks else ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
