"""Places as code hosts know them: by the path from the root of the repository."""

from __future__ import annotations

import os
from functools import cache

from graphguard.render.plain import Place


def in_repository(place: Place | None) -> Place | None:
    """The place by its path from the root of the repository that it is in; None for a library, a cell, or nothing."""
    if place is None or not os.path.isfile(place.file):
        return None
    root, file = _root(os.getcwd()), os.path.realpath(place.file)
    if root is None:
        return place
    inside = os.path.relpath(file, root)
    return None if inside.startswith("..") else Place(inside, place.line)


@cache
def _root(folder: str) -> str | None:
    """The nearest folder outwards that is the root of a repository."""
    folder = os.path.realpath(folder)
    while not os.path.exists(os.path.join(folder, ".git")):
        folder, before = os.path.dirname(folder), folder
        if folder == before:
            return None
    return folder
