"""The lemmas that files of the user's register."""

from __future__ import annotations

from collections.abc import Iterable

from graphguard.checks.discovery import load
from graphguard.lemmas.user import Lemma, registered


def registered_by(files: Iterable[str]) -> list[Lemma]:
    """The lemmas of this process, after files of the user's were imported."""
    for file in files:
        load(file)
    return registered()
