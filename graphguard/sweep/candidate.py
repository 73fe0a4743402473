"""One configuration of a library, and how it is verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

from graphguard.report.report import Report


@dataclass(frozen=True)
class Candidate:
    """name: what is configured, in words that stay the same from version to version; mesh: the ranks."""

    name: str
    mesh: Mapping[str, int]
    verify: Callable[[], Report]

    @property
    def ranks(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self.mesh.items())


@dataclass(frozen=True)
class Library:
    """package: what it is called where it is installed. candidates: all configurations for ranks of these numbers, with options
    or without."""

    package: str
    candidates: Callable[[tuple[int, ...], bool], Iterable[Candidate]]

    @property
    def version(self) -> str:
        return f"{self.package} {metadata.version(self.package)}"
