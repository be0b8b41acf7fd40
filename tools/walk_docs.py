#!/usr/bin/env python3
"""Walks pages of the documentation as a reader would: runs their commands in order.

    tools/walk_docs.py [PAGE ...]

Pages lie below docs/ and are named without .md. Without arguments, all pages that have something to
run are walked.

Of each page, blocks marked "sh walk" and "python walk" run one after another in an empty folder,
and blocks marked "file=NAME" are written there. A page is done when every command ended with exit
code 0 and printed something; the first failure ends the walk with the block and its output.
Processes that a block leaves in the background end with the page.
Commands find the environment that runs this script; packages that a page installs there are removed
after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```(\w+) ([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 600


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Return (language, mark, text) of each block of a page that this script runs or writes."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [b for b in found if b[1] == "walk" or b[1].startswith("file=")]


def walk(page: Path) -> None:
    """Run a page. SystemExit names the block that failed."""
    bin_folder = str(Path(sys.executable).parent)
    env = os.environ | {"PATH": bin_folder + os.pathsep + os.environ["PATH"]}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        for language, mark, text in blocks(page):
            if mark.startswith("file="):
                (Path(folder) / mark.removeprefix("file=")).write_text(text, encoding="utf-8")
                continue
            command = ["bash", "-euo", "pipefail", "-c", text]
            if language == "python":
                command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", text]
            start = time.monotonic()
            done = run(command, Path(folder), env, running)
            first = text.strip().splitlines()[0]
            print(
                f"{page.relative_to(DOCS)}: {first} ({time.monotonic() - start:.1f} s)", flush=True
            )
            if done.returncode or not done.stdout.strip():
                raise SystemExit(
                    f"{page}: exit code {done.returncode}\n{text}\n{done.stdout}\n{done.stderr}"
                )


def run(
    command: list[str], folder: Path, env: dict[str, str], running: contextlib.ExitStack
) -> subprocess.CompletedProcess[str]:
    """Run a block. `running` ends the processes that it leaves in the background."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 0)  # raises if no process is left
        running.callback(end, process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end(group: int) -> None:
    """Send SIGTERM to a process group, and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        for _ in range(600):
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)


def installed() -> set[str]:
    """Return the names of the packages of this environment."""
    command = [sys.executable, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return {package["name"] for package in json.loads(listed.stdout)}


def main(names: list[str]) -> int:
    """Walk the named pages, or all."""
    pages = [DOCS / f"{name.removesuffix('.md')}.md" for name in names] or sorted(
        DOCS.rglob("*.md")
    )
    walked = [page for page in pages if any(mark == "walk" for _, mark, _ in blocks(page))]
    before = installed()
    for page in walked:
        try:
            walk(page)
        finally:
            if added := sorted(installed() - before):
                subprocess.run(
                    [sys.executable, "-m", "pip", "uninstall", "-qy", *added], check=True
                )
    print(f"{len(walked)} pages walked")
    return 0 if walked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
