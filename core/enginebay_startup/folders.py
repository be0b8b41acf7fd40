"""Folders: the user's own for what is compiled and will be executed, and those that options
name.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from enginebay.errors import InputError


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/enginebay, or the same below ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # the standard ignores a relative one
    return (base if base.is_absolute() else Path.home() / ".cache") / "enginebay"


def make_private(folder: Path) -> str | None:
    """Create the folder if need be; why it cannot be trusted, or None."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        return str(error.strerror)
    if found.st_uid != os.getuid():
        return "it belongs to somebody else"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"its mode is {stat.S_IMODE(found.st_mode):04o}, open to others"
    return None


def make_writable(path: str | Path, setting: str) -> Path:
    """The folder, which is made; InputError naming the setting when it cannot be written."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{setting} = {str(folder)!r}, which cannot be written ({error.strerror})",
            "a folder",
            "Choose another.",
        ) from error
    return folder
