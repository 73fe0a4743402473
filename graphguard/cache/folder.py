"""The folder in which results are kept: a file for each, sealed with a secret that is not in the folder.

A file is taken only if this user's GraphGuard has written it (its seal says so), for this very question (it has the whole
hash), and if it says what an answer to the question can say. All else is ignored with a warning, and proved again.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from graphguard.cache.codec import DamagedError, read, written
from graphguard.cache.content import UnkeptError, key_of
from graphguard.capture.front import Problem
from graphguard.pipeline import Question
from graphguard.report.report import Report
from graphguard.verdict.judge import FAILED

FORMAT, VERSION = "graphguard-result", 1
PLACE = "GRAPHGUARD_CACHE"  # in the environment: the folder; `off` for none
_LARGEST = 1 << 24  # bytes
_SECRET = 32  # bytes
_VERDICTS = ("verified", "refuted", "unproven")


@dataclass(frozen=True)
class Folder:
    """What `graphguard.pipeline.keeping` takes."""

    path: str
    secret: bytes

    def key(self, question: Question) -> str | None:
        try:
            return key_of(question.problem, question.lemmas, question.trials, question.seed, question.limits)
        except (UnkeptError, OSError):
            return None

    def recall(self, key: str, problem: Problem) -> Report | None:
        """The report of an earlier run, if there is one that can be trusted."""
        file = self._file(key)
        try:
            report = self._report(_content(file), key, problem)
        except FileNotFoundError:
            return None
        except (DamagedError, OSError) as error:
            _warn(f"{file} is not taken for a result: {error if isinstance(error, DamagedError) else error.strerror}")
            return None
        seconds = {"capture": problem.captured.seconds, "proof": None, "oracle": None}
        report.stats = {**report.stats, "seconds": seconds, "kept": key}
        return report

    def _report(self, content: bytes, key: str, problem: Problem) -> Report:
        try:
            entry = json.loads(content)
        except (ValueError, RecursionError):
            raise DamagedError("it is damaged") from None
        if not isinstance(entry, dict) or set(entry) != {"format", "version", "key", "report", "seal"}:
            raise DamagedError("it has another form")
        seal = entry.pop("seal")
        if not isinstance(seal, str) or not hmac.compare_digest(seal.encode(), self._seal(entry).encode()):
            raise DamagedError("this user's GraphGuard has not written it, or it was changed")
        if (entry["format"], entry["version"], entry["key"]) != (FORMAT, VERSION, key):
            raise DamagedError("it is the result of something else")
        report = read(entry["report"])
        if type(report) is not Report or written(report) != entry["report"] or not _answers(report, problem):
            raise DamagedError("it is no answer to what is asked")
        return report

    def keep(self, key: str, problem: Problem, report: Report) -> None:
        """Whole, or not at all."""
        oracle = report.stats.get("oracle") or {}
        if report.opaque or not _answers(report, problem) or str(oracle.get("skipped")).startswith(FAILED):
            return
        try:
            entry = {"format": FORMAT, "version": VERSION, "key": key, "report": written(report)}
            if written(read(entry["report"])) != entry["report"]:
                return
        except (UnkeptError, DamagedError):
            return
        file = self._file(key)
        try:
            os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
            _write(file, json.dumps({**entry, "seal": self._seal(entry)}).encode())
        except OSError as error:
            _warn(f"the result cannot be kept in {self.path}: {error.strerror}")

    def _file(self, key: str) -> str:
        return os.path.join(self.path, key[:2], f"{key}.json")

    def _seal(self, entry: dict[str, Any]) -> str:
        return hmac.new(self.secret, json.dumps(entry, sort_keys=True).encode(), "sha256").hexdigest()


def of_user() -> Folder | None:
    """The folder that the environment names, or that of the user; None if there is none, with a warning if there should be."""
    place = os.environ.get(PLACE)
    if place in ("", "off"):
        return None
    home = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "graphguard")
    try:
        return Folder(os.path.abspath(place or os.path.join(home, "results")), _secret(home))
    except OSError as error:
        _warn(f"nothing is kept, as {home} cannot be used: {error.strerror}")
    except DamagedError as error:
        _warn(f"nothing is kept: {error}")
    return None


def _secret(home: str) -> bytes:
    """Made when it is first needed. Whoever else could read it could make results."""
    file = os.path.join(home, "secret")
    os.makedirs(home, mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        _write(file, secrets.token_bytes(_SECRET), anew=False)
    content = _content(file, private=True)
    if len(content) != _SECRET:
        raise DamagedError(f"{file} is damaged; remove it")
    return content


# ---------------------------------------------------------------------- answers
def _answers(report: Report, problem: Problem) -> bool:
    """Whether the report says what an answer can say: of what is verified, a relation for every output, and nothing against
    it."""
    captured, decisions = problem.captured, set[str]()
    if problem.along is not None:  # what is decided is proved as well, and is no output of the user's
        captured, decisions = problem.along.raw, set(problem.along.of_ranks)
    sizes = captured.operations, problem.mesh.size
    if report.verdict not in _VERDICTS or (report.stats.get("ops"), report.stats.get("ranks")) != sizes:
        return False
    if report.verdict != "verified":
        return bool(report.findings)
    outputs = {path for path, value in captured.sequential.outputs.items() if value is not None}
    return not report.findings and report.counterexample is None and set(report.relation) == outputs - decisions


# ---------------------------------------------------------------------- files
def _content(file: str, private: bool = False) -> bytes:
    """Of a plain file of bearable size. A link is not followed, and nobody waits for a pipe."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        about = os.fstat(opened.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > _LARGEST:
            raise DamagedError("it is no file, or a very large one")
        if private and (about.st_uid != os.geteuid() or about.st_mode & 0o077):
            raise DamagedError(f"{file} can be read by others; remove it")
        return opened.read(_LARGEST)


def _write(file: str, content: bytes, anew: bool = True) -> None:
    """Beside it first, so that nobody sees a part of it."""
    beside = f"{file}.{secrets.token_hex(8)}"
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as opened:
            opened.write(content)
        if anew:
            os.replace(beside, file)
        else:
            os.link(beside, file)
    finally:
        with suppress(OSError):
            os.unlink(beside)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
