"""Reads configuration files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginebay.errors import ConfigError, InputError
from enginebay.nesting import MAX_DEPTH, check_depth, fault_of

_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
LONG_KEY = re.compile(
    rf"(?:^|[\[{{,])[ \t]*+{_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_DEPTH},}}+[ \t]*+[=\]]",
    re.MULTILINE,
)
"""Matches a dotted TOML key that nests more sections than `check_depth` allows."""


COMMAND_SECTIONS = ("serve",)
"""Sections of a configuration file that are about a command, and not about an engine."""


def read_settings(path: str | Path | None) -> dict[str, Any]:
    """Return the engine's settings in a configuration file, none for None. ConfigError as
    `read_toml`.
    """
    return {} if path is None else engine_settings(read_toml(path))


def engine_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration file without the sections of commands."""
    return {name: value for name, value in values.items() if name not in COMMAND_SECTIONS}


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the values of a configuration file; ConfigError when it is missing or not TOML."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if LONG_KEY.search(text) is not None:
            raise RecursionError  # tomllib would take minutes to refuse this key
        values = tomllib.loads(text)
        check_depth(values)
        return values
    except OSError as error:
        raise ConfigError(
            f"configuration file {path}: {error.strerror}",
            "a readable TOML file",
            "Pass the path of a configuration file that exists and can be read.",
        ) from None
    except InputError as error:
        raise ConfigError(f"configuration file {path}: {error}") from None
    except (ValueError, RecursionError) as error:
        given = f"configuration file {path}: {fault_of(error)}"
        raise ConfigError(given, "TOML", "Correct this place in the file.") from None
