"""A proof case: two small programs, how their inputs and outputs relate, and the verdict that is expected of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import graphguard as gg

Program = Callable[..., Any]
Relation = Any  # {axis: placement}, where an axis left out is Replicate; or code, which `outputs` states too


@dataclass(frozen=True)
class Case:
    """`relation` has one entry per output path: what a correct program has, and what a fault fails to have.

    `fault` is the text of the comment that marks the guilty line: where a report should point.
    """

    name: str
    sequential: Program
    distributed: Program
    mesh: dict[str, int]
    inputs: dict[str, gg.Input]
    relation: dict[str, Relation]
    outputs: dict[str, Any] = field(default_factory=dict)
    local_inputs: Program | None = None
    expect: str = "verified"
    fault: str | None = None

    def __post_init__(self) -> None:
        if self.expect not in ("verified", "refuted"):
            raise ValueError(f"{self.name}: expect is {self.expect!r}")
        if (self.fault is not None) != (self.expect == "refuted"):
            raise ValueError(f"{self.name}: a fault, and nothing else, is expected to be refuted")

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `gg.verify`, beside the two programs."""
        return {"mesh": self.mesh, "inputs": self.inputs, "outputs": self.outputs, "local_inputs": self.local_inputs}

    @property
    def fault_location(self) -> tuple[str, int]:
        """File and line of the comment that marks the fault."""
        if self.fault is None:
            raise ValueError(f"{self.name} has no fault")
        file = source_file(self.distributed)
        lines = Path(file).read_text().splitlines()
        found = [number for number, line in enumerate(lines, 1) if line.rstrip().endswith(self.fault)]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {self.fault!r} ends the lines {found} of {file}")
        return file, found[0]


def source_file(program: Program) -> str:
    while isinstance(program, functools.partial):
        program = program.func
    return inspect.getsourcefile(inspect.unwrap(program)) or "<unknown>"


def faulty(case: Case, name: str, distributed: Program, fault: str, *, stated: tuple[str, ...] = (), **changed: Any) -> Case:
    """A case with another distributed program, which must not be proved. The paths in `stated` keep their relation by
    `outputs=`, because the fault leaves another clean one there; "*" states all of them."""
    paths = tuple(case.relation) if stated == ("*",) else stated
    fields = {key: getattr(case, key) for key in ("sequential", "mesh", "inputs", "relation", "local_inputs")} | changed
    outputs = {path: fields["relation"][path] for path in paths}
    return Case(name, distributed=distributed, outputs=outputs, expect="refuted", fault=f"# fault: {fault}", **fields)
