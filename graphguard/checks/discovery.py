"""Where checks are: the files that paths name, and the checks that a file registers when it is imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from types import ModuleType

from graphguard.checks.check import IMPORT, Check, Outcome, has_name, named
from graphguard.checks.folder import Skipped, look_through
from graphguard.checks.foreign import as_sentence, staying
from graphguard.errors import GraphGuardError, UsageError, first_line
from graphguard.scope import Scope, opened


@dataclass(frozen=True)
class Target:
    """A file to import. names: those of its checks that run; None for all. required: whether it must have checks."""

    file: str
    names: tuple[str, ...] | None = None
    required: bool = True


@dataclass(frozen=True)
class Selection:
    """What paths name: the files to import, the folders that were looked through, and what was left out of these."""

    targets: tuple[Target, ...]
    folders: tuple[str, ...]
    skipped: tuple[Skipped, ...]

    def bare(self, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """The folders of which nothing came: an error, as it is of a file."""
        files = {spelling for each in outcomes for spelling in _spellings(each.check.file)}
        return [
            failed(folder, UsageError(f"no file below {folder} has checks; mark a function with @gg.check"))
            for folder in self.folders
            if not any(file.startswith(os.path.join(base, "")) for file in files for base in _spellings(folder))
        ]


def select(paths: Iterable[str]) -> Selection:
    """The files of paths, each once: what names it may be a file, `file.py::name`, or a folder that it is below."""
    targets: dict[str, Target] = {}
    skipped: dict[str, Skipped] = {}
    folders: list[str] = []
    for path in dict.fromkeys(paths):
        if os.path.isdir(path):
            files, left_out = look_through(path)
            skipped.update((each.path, each) for each in left_out)
            found = [Target(file, required=False) for file in files]
            folders.append(path)
        else:
            found = [_target(path)]
        for target in found:
            key = os.path.realpath(target.file)
            targets[key] = _joined(targets[key], target) if key in targets else target
    return Selection(tuple(targets.values()), tuple(folders), tuple(skipped.values()))


def _spellings(path: str) -> set[str]:
    return {os.path.abspath(path), os.path.realpath(path)}


def _target(path: str) -> Target:
    file, chosen, name = path.partition("::")
    if not os.path.isfile(file):
        raise UsageError(f"there is no file {file}")
    return Target(file, (name,) if chosen else None)


def _joined(one: Target, other: Target) -> Target:
    names = None if one.names is None or other.names is None else tuple(dict.fromkeys(one.names + other.names))
    return replace(one, names=names, required=one.required or other.required)


def find_checks(path: str) -> list[Check]:
    """The checks of `file.py` in the order of the file, or the one that `file.py::name` names."""
    checks, errors = examine(_target(path))
    for each in errors:
        raise each.error or AssertionError
    return checks


def examine(target: Target) -> tuple[list[Check], list[Outcome]]:
    """Import the file: its checks, and what is wrong with it. Neither is kept from the other."""
    file = target.file
    scope = Scope(lemmas=None)  # whoever imports several files has a process for each
    try:
        with opened(scope):
            load(file)
    except GraphGuardError as error:
        return [], [failed(file, error)]  # some of its checks may exist, but not the file as it was meant
    checks = named(scope.checks, _shown_as(file))
    errors = [failed(file, error) for error in _dropped(file, scope)]
    if target.names is not None:
        chosen = [check for check in checks if any(has_name(check, name) for name in target.names)]
        for name in target.names:
            if not any(has_name(check, name) for check in chosen):
                has = f"it has {', '.join(check.name for check in checks)}" if checks else "it has none"
                errors.append(failed(file, UsageError(f"{file} has no check {name!r}; {has}"), name))
        checks = chosen
    elif target.required and not checks:
        errors.append(failed(file, UsageError(f"{file} has no checks; mark a function with @gg.check")))
    return checks, errors


def failed(file: str, error: GraphGuardError, name: str = IMPORT) -> Outcome:
    """In the place of checks that are not there."""
    line = re.match(rf"{re.escape(file)}:(\d+): ", str(error))
    return Outcome(Check(name, file, None, "verified", int(line[1]) if line else None), None, error)


def _dropped(file: str, scope: Scope) -> list[UsageError]:
    """Reports that were made while the file was imported, and that say something which no check would say."""
    inside = "call gg.verify inside of a check"
    return [
        UsageError(f"{file} drops a report while it is imported, which is {call.report.verdict}; {inside}")
        if call.error is None
        else UsageError(f"{file} catches an error of gg.verify while it is imported: {first_line(call.error)}; {inside}")
        for call in scope.calls
        if call.error is not None or not call.report.verified
    ]


def _shown_as(file: str) -> Callable[[str], str]:
    """How the file that marks a check is written: as the user wrote it, or else in the same way as the file that imports it."""

    def shown(home: str) -> str:
        if not home or os.path.realpath(home) == os.path.realpath(file):
            return file
        return home if os.path.isabs(file) else os.path.relpath(home)

    return shown


# ---------------------------------------------------------------------- modules
def load(file: str) -> ModuleType:
    """Import a file by its path, as the module of its name, with its own folder importable. A name that is taken (by the
    standard library, or by a file of another folder) gets a number: other modules must not lose theirs. A file with relative
    imports is a module of its package."""
    if not os.path.isfile(file):
        raise UsageError(f"there is no file {file}")
    path = os.path.abspath(file)
    try:
        with redirect_stdout(sys.stderr), staying():
            return _executed(path, _name_in_package(path) or _free_name(path))
    except (GraphGuardError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise as_sentence(error, file, "importing the file") from None


def _executed(path: str, name: str) -> ModuleType:
    folder = os.path.dirname(path)
    within = [folder] if os.path.basename(path) == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=within)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _free_name(path: str) -> str:
    stem = name = os.path.splitext(os.path.basename(path))[0]
    count = 1
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != path:
        count += 1
        name = f"{stem}_{count}"
    return name


def _name_in_package(path: str) -> str | None:
    """The name of a file with relative imports, as its package has it; the package is imported first."""
    with open(path, "rb") as file:
        if not re.search(rb"\bfrom\s+\.", file.read()):
            return None
    folder, base = os.path.split(path)
    parts = [] if base == "__init__.py" else [os.path.splitext(base)[0]]
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
        parts.insert(0, package)
    if len(parts) < 2 and base != "__init__.py":
        return None
    if folder not in sys.path:
        sys.path.insert(0, folder)
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        places = list(getattr(importlib.import_module(package), "__path__", ()))
        if os.path.join(folder, *parts[:length]) not in places:
            raise ImportError(f"the name of the package {package} is taken by {places}")
    return ".".join(parts)
