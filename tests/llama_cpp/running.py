"""Asks llama.cpp, in a process with the Python that LLAMA_CPP_PYTHON names."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("LLAMA_CPP_PYTHON", "")
CHILD = Path(__file__).with_name("child.py")


def ask(folder: Path, do: str, **job: Any) -> Any:
    """Run a job of child.py, and return its result."""
    out = folder / f"{do}.json"
    done = subprocess.run(
        [PYTHON, CHILD],
        input=json.dumps({"do": do, "out": str(out), **job}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text(encoding="utf-8"))
