"""What a verdict is made with: GraphGuard itself, by its content, and the versions of what it rests on."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from hashlib import sha256
from pathlib import Path

import graphguard

_PACKAGE = Path(__file__).parents[1]
_CLOCKS = 1.0  # seconds by which that of a file system may be behind
_RESTS_ON = ("torch", "numpy")


@functools.cache
def kit() -> dict[str, str]:
    """By name, its version; of GraphGuard the hash of all its files, as a clone has one version for many contents."""
    return {
        "graphguard": _content(),
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: _version(name) for name in _RESTS_ON},
    }


def differences(other: dict[str, str]) -> str:
    """What another kit has that this one has not, in words; empty if they are equal."""
    own = kit()
    return ", ".join(
        f"another {name}" if name == "graphguard" else f"{name} {own.get(name)} and not {version}"
        for name, version in other.items()
        if own.get(name) != version
    )


def changed_since_loaded() -> bool:
    """Whether the files may be others than those that were imported: the hash is not that of what runs then. The time of a
    change counts, which nobody can set back."""
    return any(file.stat().st_ctime > graphguard.LOADED - _CLOCKS for file in _files())


def _files() -> list[Path]:
    """All that GraphGuard reads of itself: code, and tables such as the dtypes in which lemmas hold."""
    return sorted(file for file in _PACKAGE.rglob("*") if file.is_file() and file.parent.name != "__pycache__")


def _content() -> str:
    total = sha256()
    for file in _files():
        content = file.read_bytes()
        total.update(f"{file.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode() + content)
    return total.hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
