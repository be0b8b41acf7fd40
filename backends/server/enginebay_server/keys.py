"""API keys: read from a file or the environment, and compared in constant time."""

from __future__ import annotations

import hmac
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginebay.errors import InputError, shown

log = logging.getLogger("enginebay.server")

VARIABLE = "ENGINEBAY_API_KEY"
MIN_LENGTH = 8


def read_api_keys(path: str | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the keys of a file and the key of ENGINEBAY_API_KEY.

    The file has one key per line; empty lines and lines that begin with # are ignored. Raises
    InputError, which shows no key, for a file without a valid key.
    """
    lines: list[str] = []
    if path is not None:
        try:
            mode = Path(path).stat().st_mode
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise InputError(
                f"--api-key-file {path}: {why}",
                "a readable file with one key a line",
                "Write the keys into a file, and pass its path.",
            ) from None
        if stat.S_ISREG(mode) and mode & 0o077:
            log.warning(
                "the file of keys %s can be read by others: run chmod 600 on it", shown(path)
            )
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if not lines:
            raise InputError(
                f"--api-key-file {path}, which has no key", "one key a line", "Add a key."
            )
    if environment.get(VARIABLE):
        lines.append(environment[VARIABLE])
    for number, key in enumerate(lines, start=1):
        if len(key) < MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise InputError(
                f"API key {number} of {path or VARIABLE}",
                f"{MIN_LENGTH} or more printable ASCII characters without spaces",
                "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
    return tuple(dict.fromkeys(lines))


def is_known(given: str, keys: Sequence[str]) -> bool:
    """Return whether a key is allowed, in a time that does not depend on the keys' characters."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(key.encode(), given.encode("utf-8", "replace"))
    return found
