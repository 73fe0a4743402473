"""What a proof and an execution say together: the verdict, the order of the findings, what was taken for granted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphguard.engine.proof import Proof
from graphguard.errors import InternalError
from graphguard.graph.findings import Finding
from graphguard.graph.ir import Graph, values_in
from graphguard.graph.paths import in_words
from graphguard.graph.rank_class import RankClass
from graphguard.render.shown import SHOWN_CONDITIONS
from graphguard.report.report import OutputRelation, Report
from graphguard.verdict.causes import findings_of
from graphguard.verdict.headline import of_open_ends
from graphguard.verdict.siblings import odd_outputs

if TYPE_CHECKING:
    from graphguard.verdict.judge import Judgement

REAL_ARITHMETIC = "real arithmetic: numbers are not rounded and do not overflow"
_CASTS = ("aten._to_copy.", "aten.to.", "aten.copy.", "aten.copy_.", "prims.convert_element_type.")
_FLOATS = ("float", "bfloat", "complex")


def report_of(
    proof: Proof, judgement: Judgement, assumptions: Sequence[str], not_theirs: Container[str] = frozenset()
) -> Report:
    """The report of a check whose ranks communicate as they should. not_theirs: outputs that the user does not know of."""
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
        report.findings = findings_of(suited([*proof.findings, *_undefined(proof, judgement)], judgement), judgement)
        report.findings[:1] = [replace(each, odd=tuple(odd_outputs(proof))) for each in report.findings[:1]]
        report.notes += _not_proved(proof, judgement, not_theirs)
    elif proof.proved:
        report.notes += _unexecuted(judgement, "the verdict rests on the proof alone")
    else:
        report.stopped += judgement.stopped
        report.conjecture = {path: text for path, text in judgement.conjecture.items() if path not in proof.relations}
        report.findings = of_open_ends(proof.findings, judgement)
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


def _not_proved(proof: Proof, judgement: Judgement, not_theirs: Container[str]) -> list[str]:
    """Beside what is wrong, outputs that are open."""
    findings = [each for each in proof.findings if each.output not in judgement.kinds and not each.needs_no_execution]
    paths = [each.output for each in findings if each.output is not None and each.output not in not_theirs]
    return [f"not proved either, and not seen to differ: {in_words(paths)}"] if paths else []


def _unexecuted(judgement: Judgement, consequence: str) -> list[str]:
    if judgement.skipped is not None:
        return [f"the oracle was skipped because {judgement.skipped}; {consequence}"]
    return [f"{path}: the oracle says nothing of it, because {why}" for path, why in judgement.undecided.items()]


def suited(findings: Iterable[Finding], judgement: Judgement) -> list[Finding]:
    """Findings as an execution shows them."""
    return [_suited(each, each.output, judgement) if each.output in judgement.kinds else each for each in findings]


def _suited(finding: Finding, path: str, judgement: Judgement) -> Finding:
    """Where the proof only lost the relation, the execution may know what the ranks hold in its place."""
    kind = judgement.kinds[path]
    if path in judgement.orders:
        return replace(finding, kind="unexplained-output", message=judgement.orders[path], detail=None)
    if finding.kind in ("relation-lost", "unexplained-output") and kind != "unexplained-output":
        if kind == "scaled-copies":
            message = f"{path}: the ranks hold copies that are scaled, and only their sum is the sequential value"
        else:
            message = f"{path}: the numbers show {judgement.conjecture[path]}, which is not what is expected"
        return replace(finding, kind=kind, message=message, law=None, detail=None)
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
