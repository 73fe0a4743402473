"""What a worker does: it imports one file, and runs those of its checks that it is asked for."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import Any

from graphguard.capture.front import ranks_apart
from graphguard.checks.check import Check, Outcome
from graphguard.checks.discovery import Target, examine, failed
from graphguard.errors import GraphGuardError, InternalError, UsageError
from graphguard.verdict.limits import stated

PATIENCE = 60.0  # seconds that a worker waits for its next check
_serving: list[Connection] = []  # here, if this process is a worker


@dataclass(frozen=True)
class Setting:
    """All that a worker knows beside its file. `content` is the hash of the file, as it was when the run began."""

    target: Target
    content: str
    folder: str
    path: tuple[str, ...]
    environment: Mapping[str, str]
    limits: Mapping[str, int]
    apart: bool
    threads: int | None
    shown: bool
    listing: bool
    keeps: bool


def serve(pipe: Connection) -> None:
    """First the setting is told and the file imported; then come names of checks, until nobody asks any more."""
    _serving.append(pipe)
    setting: Setting = pipe.recv()
    speaker = _Speaker(pipe, setting.shown)
    with stated(setting.limits), ranks_apart(setting.apart):
        checks, errors = _examined(setting)
        speaker.say("examined", [check.to_send() for check in checks], [_sendable(each) for each in errors])
        while pipe.poll(PATIENCE):
            try:
                wanted = pipe.recv()
            except EOFError:
                return
            speaker.say("begun")
            report, failure = _served(checks, wanted, speaker, setting)
            try:
                speaker.say("outcome", report, failure)
            except Exception as error:
                text = f"the report of {wanted[1]} cannot be sent: {error}; please report it"
                speaker.say("outcome", None, InternalError(text))


def is_worker() -> bool:
    """Whether this process is one."""
    return bool(_serving)


def content_of(file: str) -> str:
    """The hash of a file; empty if it cannot be read, which whoever imports it says."""
    try:
        with open(file, "rb") as opened:
            return sha256(opened.read()).hexdigest()
    except OSError:
        return ""


def _examined(setting: Setting) -> tuple[list[Check], list[Outcome]]:
    target = setting.target
    try:
        _settle_in(setting)
        if content_of(target.file) != setting.content:
            text = f"{target.file} is not the file that it was when the run began, on {os.uname().nodename}; run it again"
            return [], [failed(target.file, UsageError(text))]
        return examine(target)
    except GraphGuardError as error:
        return [], [failed(target.file, error)]
    except Exception as error:
        return [], [failed(target.file, _defect(error))]


def _settle_in(setting: Setting) -> None:
    os.environ.clear()
    os.environ.update(setting.environment)
    sys.path[:] = setting.path
    try:
        os.chdir(setting.folder)
    except OSError as error:
        who = f"the folder {setting.folder} cannot be entered on {os.uname().nodename}"
        raise UsageError(f"{who}: {error.strerror}; whoever runs checks must see the same files") from None
    if setting.threads is not None and "OMP_NUM_THREADS" not in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(setting.threads)


def _served(
    checks: Sequence[Check], wanted: tuple[str, str], speaker: _Speaker, setting: Setting
) -> tuple[Any, GraphGuardError | None]:
    found = [check for check in checks if (check.file, check.name) == wanted]
    if not found:
        return None, InternalError(f"the file has no check {wanted[1]} when it is imported again; its checks must not change")
    try:
        outcome = run_check(found[0], speaker, setting.listing, setting.keeps)
    except Exception as error:
        return None, _defect(error)
    return outcome.report, _sendable(outcome).error


def run_check(check: Check, watcher: Any, listing: bool, keeps: bool) -> Outcome:
    """Lets go of the descriptions of all tensors; the list of operations is made before, if it is wanted. A result that was
    kept has no such list, so that all is proved again then."""
    with _telling(check, watcher), _remembering(keeps and not listing):
        outcome = check.outcome()
    if outcome.report is not None:
        if listing:
            _ = outcome.report.listing
        outcome.report.make_listing = None
    return outcome


def _telling(check: Check, watcher: Any) -> Any:
    """Phases are shown on terminals only. Torch is loaded for them, which any check needs."""
    if not watcher.shown:
        return nullcontext()
    from graphguard.pipeline import showing

    return showing(lambda title, done, total: watcher.phase(str(check), title, done, total))


def _remembering(keeps: bool) -> Any:
    """What was kept by earlier runs is not proved again."""
    if not keeps:
        return nullcontext()
    from graphguard.cache.folder import of_user
    from graphguard.pipeline import keeping

    return keeping(of_user())


def _sendable(outcome: Outcome) -> Outcome:
    """An error of a class of the user's own is unknown to whoever reads it."""
    error = outcome.error
    if error is None or type(error).__module__.startswith("graphguard."):
        return outcome
    return replace(outcome, error=GraphGuardError(str(error)))


def _defect(error: Exception) -> InternalError:
    return InternalError(f"{type(error).__name__} in GraphGuard itself: {error}; please report it")


class _Speaker:
    """Tells the owner how far the worker is: a word, and what belongs to it, which the owner can hand on unread."""

    def __init__(self, pipe: Connection, shown: bool):
        self.pipe, self.shown = pipe, shown

    def say(self, word: str, *content: Any) -> None:
        self.pipe.send_bytes(word.encode() + b"\n" + pickle.dumps(content))

    def phase(self, check: str, title: str, done: int, total: int) -> None:
        self.say("phase", title, done, total)
