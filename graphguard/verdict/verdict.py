"""What a proof and an execution say together: the verdict, the order of the findings, what was taken for granted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphguard.engine.proof import Proof
from graphguard.errors import InternalError
from graphguard.graph.findings import LOST_HERE, PARTING, PASSES_HERE, Finding
from graphguard.graph.ir import Graph, Source, values_in
from graphguard.graph.rank_class import RankClass
from graphguard.render.shown import SHOWN_CONDITIONS
from graphguard.report.report import OutputRelation, Report

if TYPE_CHECKING:
    from graphguard.locate.ranking import Way
    from graphguard.oracle.difference import Divergence
    from graphguard.verdict.judge import Judgement

REAL_ARITHMETIC = "real arithmetic: numbers are not rounded and do not overflow"
_CASTS = ("aten._to_copy.", "aten.to.", "aten.copy.", "aten.copy_.", "prims.convert_element_type.")
_LACKING = "the reduction that is missing may be meant"
_FLOATS = ("float", "bfloat", "complex")


def report_of(proof: Proof, judgement: Judgement, assumptions: Sequence[str]) -> Report:
    """The report of a check whose ranks communicate as they should."""
    if judgement.contradicted:
        path = judgement.contradicted[0]
        raise InternalError(
            f"the proof says that {proof.relations[path].text}, and an execution in float64 does not show it; please report it "
            "with both programs"
        )
    report = Report.of_proof(proof, assumptions)
    plain = any(finding.needs_no_execution for finding in proof.findings)
    if judgement.different or plain:
        report.verdict, report.stopped = "refuted", judgement.stopped
        report.counterexample = judgement.counterexample
        report.relation = OutputRelation({path: each for path, each in proof.relations.items() if path not in judgement.kinds})
        report.conditions = tuple(each for each in proof.conditions if not report.relation.keys().isdisjoint(each.outputs))
        told = _told([*proof.findings, *_undefined(proof, judgement)], judgement)
        findings = _with_repairs(_with_parting(told, judgement), judgement)
        report.findings = _with_mends(_with_way(_with_caller(findings, judgement), judgement), judgement)
    elif proof.proved:
        report.notes += _unexecuted(judgement, "the verdict rests on the proof alone")
    else:
        report.stopped += judgement.stopped
        report.conjecture = {path: text for path, text in judgement.conjecture.items() if path not in proof.relations}
        report.notes += _unexecuted(judgement, "so it is not known whether the programs differ")
    report.notes += [] if judgement.left_out is None else [judgement.left_out]
    return report


def _undefined(proof: Proof, judgement: Judgement) -> list[Finding]:
    """Outputs whose relation is proved under conditions, and which differ where these do not hold."""
    findings = []
    for path in judgement.kinds:
        conditions = [each for each in proof.conditions if path in each.outputs] if path in proof.relations else []
        if conditions:
            where = " and ".join(each.text for each in conditions[:SHOWN_CONDITIONS])
            message = f"{path}: the relation holds where {where}; here the sequential program is defined, and the ranks differ"
            lines = tuple({each.source.place: each.source for each in conditions if each.source is not None}.values())
            first = lines[0] if lines else None
            findings.append(Finding("undefined-value", message, sources=lines, distributed=first, output=path))
    return findings


def _unexecuted(judgement: Judgement, consequence: str) -> list[str]:
    if judgement.skipped is not None:
        return [f"the oracle was skipped because {judgement.skipped}; {consequence}"]
    return [f"{path}: the oracle says nothing of it, because {why}" for path, why in judgement.undecided.items()]


def _told(findings: Iterable[Finding], judgement: Judgement) -> list[Finding]:
    """Findings about outputs that were seen to differ come first; those about outputs that look right come last."""
    wrong, others = [], []
    for finding in findings:
        if finding.output in judgement.kinds:
            wrong.append(_suited(finding, finding.output, judgement))
        elif finding.needs_no_execution:
            wrong.append(finding)
        else:
            others.append(finding)
    return wrong + others


def _with_parting(findings: list[Finding], judgement: Judgement) -> list[Finding]:
    """Where values part in the execution comes first, then a second line to look at; where the proof stops is one, too."""
    example = judgement.counterexample
    if example is None or example.parting is None:
        return [findings[0], *_second(findings[0], findings[0].sources), *findings[1:]]
    parting = example.parting
    about = next((finding for finding in findings if finding.output == example.element.path), findings[0])
    others = [finding for finding in findings if finding is not about]
    if parting.at_the_end or parting.distributed is None:  # the proof knows more of who should hold what
        lines = (parting.beside, *_callers(about), parting.distributed, *about.sources, *parting.callers)
        return [about, *_second(about, lines), *others]
    if about.distributed is not None and about.distributed.place == parting.distributed.place:
        first = replace(about, law=about.law or parting.words)
        return [first, *_second(first, (parting.beside, *parting.callers, *about.sources)), *others]
    first = replace(
        about,
        message=f"{about.message}; {_parted(parting)}",
        sequential=parting.sequential,
        distributed=parting.distributed,
        phase="backward" if parting.backward else "forward",
        law=parting.words,
        holdings=(),
        sources=(parting.distributed,),
    )
    stops = [] if about.distributed is None else [replace(about, kind="relation-lost", message=_stops(about))]
    return [first, *_second(first, (parting.beside, *(() if stops else parting.callers))), *stops, *others]


def _with_repairs(findings: list[Finding], judgement: Judgement) -> list[Finding]:
    """A change that was seen to make all outputs right says more than any line on the way: its line comes first."""
    tried = [each for each in judgement.repairs if not each.weak]
    if not tried:
        return findings
    first, best = findings[0], tried[0]
    if best.kind == "undone" and first.distributed is not None:  # of two that may be left out, the one that is suspected anyway
        best = next((e for e in tried if e.kind == "undone" and e.own.place == first.distributed.place), best)
    lines = [line for each in tried for line in each.lines] if best.kind == "reduced" else best.lines
    if best.kind == "retiled" and best.used is not None:
        lines = [*lines, best.used]
    if best.unused is not None:
        lines, best = [best.unused, *lines], replace(best, text=f"nothing uses what this line reduces; {_LACKING}")
    elif best.instead is not None and best.kind == "scaled":
        lines = [*lines[:1], best.instead, *lines[1:]]
    elif best.instead is not None:
        lines, best = [best.instead, *lines], replace(best, text=best.text.replace("after this line", "in place of this one"))
    if best.kind == "undone":  # what the loss is multiplied by has the same effect
        lines = [*lines, *(each.own for each in tried if each.backward and each.kind == "scaled")]
    if first.distributed is not None and first.distributed.place == lines[0].place:
        head = replace(first, repair=best.text)
        return [head, *_second(head, lines), *findings[1:]]
    phase = "backward" if best.backward else "forward"
    head = replace(first, distributed=lines[0], phase=phase, repair=best.text, law=None, holdings=(), sources=(lines[0],))
    return [head, *_second(head, lines), *_second(head, [first.distributed]), *findings[1:]]


def _with_caller(findings: list[Finding], judgement: Judgement) -> list[Finding]:
    """Of a line in a helper, which call of it is meant."""
    here = findings[0].distributed
    if here is None or (here.file, here.function) not in judgement.helpers:
        return findings
    calls = (line for line in here.outwards() if (line.file, line.function) not in judgement.helpers)
    return [findings[0], *_second(findings[0], [next(calls, None)]), *findings[1:]]


def _with_way(findings: list[Finding], judgement: Judgement) -> list[Finding]:
    """The operation that is wrong first comes first, where the outputs are right without its fault; after a repair that says
    more, or where it does not explain all that is wrong, it comes second, unless another second line tells more."""
    way, first = judgement.way, findings[0]
    if way is None or first.distributed is None:
        return findings
    if way.inner is not None and way.lines[0].place != way.inner.place == first.distributed.place:
        # The operation itself comes before the line that calls for it.
        head = replace(first, repair=first.repair or _repair(way, way.lines[0]))
        return [head, *_second(head, way.lines), *findings[1:]]
    suspected = first.repair is not None or (way.repeated is not None and first.distributed.place == way.repeated.place)
    if first.distributed.place != way.lines[0].place and way.heals and way.sure and not suspected:
        head = replace(
            first,
            distributed=way.lines[0],
            phase="backward" if way.backward else "forward",
            repair=_repair(way, way.lines[0]),
            law=None,
            holdings=(),
            sources=_with_inner((way.lines[0],), way),
        )
        return [head, *_second(head, way.lines), *_second(head, [first.distributed]), *findings[1:]]
    head = first
    if first.distributed.place == way.lines[0].place:
        head = replace(first, sources=_with_inner(first.sources, way), repair=first.repair or _repair(way, way.lines[0]))
    return [head, *_second(head, _beside(findings, judgement, way)), *findings[1:]]


def _with_mends(findings: list[Finding], judgement: Judgement) -> list[Finding]:
    """An operation after whose change all outputs are right comes first, where no other repair was seen; then one more, or what
    was first so far."""
    if not judgement.mends or findings[0].repair is not None:
        return findings
    first, (best, *others) = findings[0], judgement.mends
    if first.distributed is not None and first.distributed.place == best.line.place:
        return [replace(first, repair=best.text), *findings[1:]]
    phase = "backward" if best.backward else "forward"
    head = replace(first, distributed=best.line, phase=phase, repair=best.text, law=None, holdings=(), sources=(best.line,))
    return [head, *_second(head, [*(each.line for each in others), first.distributed]), *findings]


def _beside(findings: list[Finding], judgement: Judgement, way: Way) -> Sequence[Source]:
    """Lines of the way that say more than the second line so far."""
    here = findings[0].distributed
    assert here is not None
    *_, outermost = here.outwards()
    second = next((each for f in findings if (each := f.distributed) is not None and each.place != here.place), None)
    calls = second is not None and any(each.place == second.place for each in here.outwards())
    own = second is not None and second.file == outermost.file and second.place not in judgement.shared
    sibling = second is not None and _same_function(second, here)  # it says more than what the first line calls for
    after = [line for line in way.lines[1:] if not sibling or all(each.place != here.place for each in line.outwards())]
    others = [line for line in (way.lines[0], *after) if line.place != here.place][:1]
    near = any(_same_function(line, here) for line in others)
    summed = [line for line in way.before[1:] if way.before[0].place == here.place and _same_function(line, here)]
    if not way.heals:
        return () if calls or own else others if way.sure else way.before[1:]
    if way.lines[0].place == here.place:
        return others if (way.sure and (near or not calls)) or not (calls or own) else ()
    if findings[0].repair is not None or way.sure:
        return () if calls else summed or others
    return () if calls or own else others


def _same_function(one: Source, other: Source) -> bool:
    return (one.file, one.function) == (other.file, other.function)


def _with_inner(sources: tuple[Source, ...], way: Way) -> tuple[Source, ...]:
    """With the line of a function that both programs call, after that of the caller."""
    if way.inner is None or any(way.inner.place == source.place for source in sources[:1]):
        return sources
    return (*sources[:1], way.inner, *sources[1:])


def _repair(way: Way, line: Source) -> str | None:
    told = way.sure and way.heals and line is way.tried
    return "with what the sequential program has in place of this result all outputs are right" if told else None


def _parted(parting: Divergence) -> str:
    text = f"{PARTING} {parting.operator}"
    if parting.expected is None or parting.actual is None:
        return text
    return f"{text}: {parting.actual:.7g} where the sequential program has {parting.expected:.7g}"


def _callers(finding: Finding) -> list[Source]:
    """The lines that called for an operation of the ranks, unless the sequential program may run them, too."""
    here, there = finding.distributed, finding.sequential
    calls = [] if here is None else list(here.outwards())[1:]
    return [line for line in calls if here is not None and (line.file == here.file or there is None or line.file != there.file)]


def _stops(finding: Finding) -> str:
    return f"{finding.output or 'the output'}: {LOST_HERE}"


def _second(first: Finding, lines: Iterable[Source | None]) -> list[Finding]:
    """A second line to look at, after a finding's own."""
    here = first.distributed
    other = None if here is None else next((line for line in lines if line is not None and line.place != here.place), None)
    if other is None:
        return []
    message = f"{first.output}: beside the line above, {PASSES_HERE}" if first.output else PASSES_HERE
    return [
        replace(first, kind="relation-lost", message=message, distributed=other, sources=(), law=None, repair=None, holdings=())
    ]


def _suited(finding: Finding, path: str, judgement: Judgement) -> Finding:
    """Where the proof only lost the relation, the execution may know what the ranks hold in its place."""
    kind = judgement.kinds[path]
    if path in judgement.orders:
        return replace(finding, kind="unexplained-output", message=judgement.orders[path])
    if finding.kind in ("relation-lost", "unexplained-output") and kind != "unexplained-output":
        if kind == "scaled-copies":
            message = f"{path}: the ranks hold copies that are scaled, and only their sum is the sequential value"
        else:
            message = f"{path}: the numbers show {judgement.conjecture[path]}, which is not what is expected"
        return replace(finding, kind=kind, message=message, law=None)
    return finding


# ---------------------------------------------------------------------- what is taken for granted
def assumptions_of(graphs: Sequence[tuple[Graph, int]]) -> list[str]:
    """Real arithmetic, and which casts count as exact because of it. Of each graph, so many ranks have it."""
    casts: Counter[tuple[str, str]] = Counter()
    for graph, ranks in graphs:
        for node in graph.nodes:
            if node.op.startswith(_CASTS) and node.outputs:
                for value in values_in(node.args[-1:] if node.op.startswith("aten.copy") else node.args[:1]):
                    before, after = value.dtype, node.outputs[0].dtype
                    if before != after and before.startswith(_FLOATS) and after.startswith(_FLOATS):
                        casts[min(before, after), max(before, after)] += ranks
    return [REAL_ARITHMETIC] + [
        f"casts between {first} and {second} are taken as exact ({count} cast{'' if count == 1 else 's'})"
        for (first, second), count in sorted(casts.items())
    ]


def unread_inputs(sequential: Graph, held: Sequence[RankClass]) -> list[str]:
    """Sequential inputs that neither program reads."""
    read = _read(sequential, sequential.outputs)
    for each in held:
        needed = _read(each.graph, each.graph.outputs)
        read |= _read(each.relation, [name for name in each.relation.outputs if name in needed])
    return [name for name in sequential.inputs if name not in read]


def _read(graph: Graph, paths: Iterable[str]) -> set[str]:
    """The inputs that some outputs are made from."""
    wanted = {graph.outputs[path] for path in paths}
    for node in reversed(graph.nodes):
        if node.communicates or any(output in wanted for output in node.outputs):
            wanted.update(node.operands())
    return {name for name, value in graph.inputs.items() if value in wanted}
