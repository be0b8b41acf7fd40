"""Replay: runs the commands of a recording in a fresh process, without loop and scheduler.

    python -m enginebay_testing.replay FILE

The process composes the model and its ops of the recorded configuration, runs the commands, and
compares each step's tokens and, at the end, all arrays. It prints what it found as JSON.
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
from enginebay_executor.local import LocalExecutor
from enginebay_testing.recording import CONFIG, Replayed, frames, replay


def replay_here(path: Path) -> Replayed:
    """Replay a recording by parts that this process composes."""
    kind, data = next(frames(path), (b"", b""))
    if kind != CONFIG:
        raise InputError(f"{path}, which has no configuration", "a recording", "Record again.")
    plan = make_plan(EngineConfig.model_validate_json(data))
    return replay(path, LocalExecutor(make_parts(plan)))


def main() -> int:
    """0 when all tokens and arrays are equal, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m enginebay_testing.replay", description=__doc__)
    parser.add_argument("file", type=Path, help="a recording")
    found = replay_here(parser.parse_args().file)
    sys.stdout.write(json.dumps(dataclasses.asdict(found)) + "\n")
    return int(bool(found.different_steps) or not found.arrays_are_equal)


if __name__ == "__main__":
    raise SystemExit(main())
