"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile

from graphguard.errors import UsageError


def write_text(path: str | os.PathLike[str], text: str) -> None:
    target = os.fspath(path)
    folder = os.path.dirname(target) or "."
    try:
        if os.path.exists(target) and not os.path.isfile(target):  # a device or a pipe, such as /dev/stdout
            with open(target, "w", encoding="utf-8") as file:
                file.write(text)
            return
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".graphguard-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
