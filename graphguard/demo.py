"""`graphguard demo`: the example gallery, captured, matched and replayed, as one table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from graphguard.api import Job, collecting
from graphguard.capture.session import Captured
from graphguard.capture.session import capture as capture_subject
from graphguard.checks import Check, find_checks
from graphguard.errors import UsageError
from graphguard.oracle.replay import replay, replay_joint

GALLERY = Path(__file__).parent.parent / "examples"


class Row(NamedTuple):
    check: Check
    job: Job
    captured: Captured

    @property
    def as_expected(self) -> bool:
        """The prover is not there yet: what can be judged is whether the ranks' communication fits together."""
        return bool(self.captured.joint.findings) == (self.check.expect == "refuted")


def main() -> int:
    if not GALLERY.is_dir():
        raise UsageError(f"the example gallery is not installed ({GALLERY}); run this from a clone of the repository")
    rows = list(_rows())
    console = Console()
    console.print(_table(rows))
    for row in rows:
        for finding in row.captured.joint.findings[:1]:
            console.print(f"{row.check.name}: {finding}", highlight=False, soft_wrap=True)
    console.print("\nThis version captures, matches and replays programs. It proves nothing yet, so it gives no verdicts.")
    return 0 if all(row.as_expected for row in rows) else 2


def _rows() -> Iterator[Row]:
    for file in sorted(GALLERY.rglob("*.py"), key=lambda path: (len(path.parts), path.name)):
        for check in find_checks(str(file)):
            with collecting() as jobs:
                check.run()
            captured = capture_subject(jobs[0].subject)
            if not captured.joint.findings:
                _replay(captured)
            yield Row(check, jobs[0], captured)


def _replay(captured: Captured) -> None:
    """Run both programs on random numbers: a graph that cannot be executed would be a defect of ours."""
    full = {name: torch.randn(value.shape) for name, value in captured.sequential.inputs.items()}
    replay(captured.sequential, full, wide=True)
    replay_joint(captured.joint, [replay(relation, full) for relation in captured.relations], wide=True)


def _table(rows: list[Row]) -> Table:
    table = Table(title="The gallery: operations of the sequential program and of each rank", box=SIMPLE_HEAD)
    for column in ("check", "mesh", "ops", "per rank", "comms", "ranks agree"):
        table.add_column(column, justify="left" if column in ("check", "mesh", "ranks agree") else "right", no_wrap=True)
    for row in rows:
        joint = row.captured.joint
        per_rank = sorted({len(graph.nodes) for graph in row.captured.ranks})
        table.add_row(
            row.check.name,
            str(row.job.subject.mesh),
            str(len(row.captured.sequential.nodes)),
            str(per_rank[0]) if len(per_rank) == 1 else f"{per_rank[0]}-{per_rank[-1]}",
            str(len(joint.matches)),
            f"no: {joint.findings[0].code}" if joint.findings else "yes",
        )
    return table
