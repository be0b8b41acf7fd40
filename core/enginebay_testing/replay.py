"""Runs the commands of a recording again in a new process, without loop and scheduler.

    python -m enginebay_testing.replay FILE

The process composes model and ops from the recorded configuration, runs the commands, compares the
tokens of each step and finally all arrays, and prints the result as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from enginebay.compose.composition import make_parts, make_plan
from enginebay.config import EngineConfig
from enginebay.errors import InputError
from enginebay_runtime.local import LocalExecutor
from enginebay_testing.recording import CONFIG, Replayed, frames, replay


def replay_here(path: Path) -> Replayed:
    """Replay a recording with parts that this process composes."""
    kind, data = next(frames(path), (b"", b""))
    if kind != CONFIG:
        raise InputError(
            f"{path}, which has no configuration", "a complete recording", "Record again."
        )
    plan = make_plan(EngineConfig.model_validate_json(data))
    return replay(path, LocalExecutor(make_parts(plan)))


def main() -> int:
    """Return 0 when all tokens and arrays are equal, else 1."""
    parser = argparse.ArgumentParser(prog="python -m enginebay_testing.replay", description=__doc__)
    parser.add_argument("file", type=Path, help="a recording")
    found = replay_here(parser.parse_args().file)
    sys.stdout.write(json.dumps(dataclasses.asdict(found)) + "\n")
    return int(bool(found.different_steps) or not found.arrays_are_equal)


if __name__ == "__main__":
    raise SystemExit(main())
