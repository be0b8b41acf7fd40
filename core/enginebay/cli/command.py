"""The contract of a command of the `enginebay` program."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the `enginebay` program. A plugin registers one with `register_commands`.

    `add_arguments(name, parser)` adds the flags of the command `name`. `run(name, args)` runs the
    command and returns its exit code: 0 for success, 1 for a failed check. It may raise an
    EnginebayError, which the program prints on one line. JAX may be imported once `run` is called.
    `file_defaults` (content of the file of --config): values for flags that are not passed.
    """

    add_arguments: Callable[[str, argparse.ArgumentParser], None]
    run: Callable[[str, argparse.Namespace], int]
    file_defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
