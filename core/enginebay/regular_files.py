"""Reads files that others name: regular files only, of a known largest size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from enginebay.errors import InputError


def read_regular(path: Path, max_bytes: int, *, inside: Path | None = None) -> bytes:
    """Return the content of a file.

    OSError when it cannot be opened. InputError for what is no regular file, such as a pipe or a
    device, which is never read; for a file of more than `max_bytes`; and with `inside` for a link
    that leads out of this folder.
    """
    check_regular(path, inside=inside)
    # O_NONBLOCK: a pipe that took the place of the file since then is opened without waiting.
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(opened, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise _irregular(path)
        # No more memory than the file has bytes; one that grows meanwhile is read to its limit.
        data = file.read(min(facts.st_size, max_bytes) + 1)
        while data and len(data) <= max_bytes and (more := file.read(1 << 20)):
            data += more
    if len(data) > max_bytes:
        raise InputError(
            f"{path} has more than {max_bytes} bytes",
            f"a file of at most {max_bytes} bytes",
            "Pass the right file.",
        )
    return data


def check_regular(path: Path, *, inside: Path | None = None) -> None:
    """Raise InputError for a path that is no regular file, or that a link leads out of the folder
    `inside`; OSError for one that does not exist.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise _irregular(path)
    if inside is not None and not path.resolve().is_relative_to(inside.resolve()):
        raise InputError(
            f"{path} is a link to {path.resolve()}",
            f"a file in {inside}",
            "Copy the file into the folder.",
        )


def _irregular(path: Path) -> InputError:
    return InputError(
        f"{path} is no regular file", "a file, or a link to one", "Pass the right file."
    )
