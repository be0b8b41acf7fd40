"""The contract of a command: what the `enginebay` program calls for one of its names."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the `enginebay` program; the target of `register_commands`.

    `add_arguments(name, parser)` adds the flags of the command `name`. `run(name, args)` does the
    work and returns the exit code: 0 done, 1 a failed check. It may raise `EnginebayError`, which
    the program prints in one line. JAX is ready to be imported when `run` is called.
    """

    add_arguments: Callable[[str, argparse.ArgumentParser], None]
    run: Callable[[str, argparse.Namespace], int]
