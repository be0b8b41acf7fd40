"""Folders: the user's private folders for compiled programs, and folders that options name."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from enginebay.errors import InputError


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/enginebay, or ~/.cache/enginebay."""
    base = Path(
        os.environ.get("XDG_CACHE_HOME", "")
    )  # the XDG standard says to ignore a relative path
    return (base if base.is_absolute() else Path.home() / ".cache") / "enginebay"


def make_private(folder: Path) -> str | None:
    """Create the folder if necessary; return why it cannot be trusted, or None."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        return str(error.strerror)
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"its mode is {stat.S_IMODE(found.st_mode):04o}, which other users can access"
    return None


PART = ".part"
"""The suffix of a file that is being written."""


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole, or not at all: readers in other processes never see a part of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=PART, delete=False) as file:
        part = Path(file.name)
        try:
            file.write(data)
            file.flush()
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def make_writable(path: str | Path, setting: str) -> Path:
    """Create a folder and return it; InputError, which names the setting, when it is
    not writable.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{setting} = {str(folder)!r}, which cannot be written ({error.strerror})",
            "a folder",
            f"Set {setting} to a folder that this user can write to.",
        ) from error
    return folder
