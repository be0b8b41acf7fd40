#!/usr/bin/env python3
"""Walks pages of the documentation as a reader would: runs their commands in order.

    tools/walk_docs.py [PAGE ...]

Pages lie below docs/ and are named without .md. Without arguments, all pages that have something to
run are walked.

Of each page, blocks marked "sh walk" and "python walk" run one after another in an empty folder,
and blocks marked "file=NAME" are written there. A page is done when every command ended with exit
code 0 and printed something; the first failure ends the walk with the block and its output.
Commands find the environment that runs this script; packages that a page installs there are removed
after it.
"""

from __future__ import annotations

import json
import os
import re
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
    with tempfile.TemporaryDirectory() as folder:
        for language, mark, text in blocks(page):
            if mark.startswith("file="):
                (Path(folder) / mark.removeprefix("file=")).write_text(text, encoding="utf-8")
                continue
            command = ["bash", "-euo", "pipefail", "-c", text]
            if language == "python":
                command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", text]
            start = time.monotonic()
            done = subprocess.run(
                command,
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            first = text.strip().splitlines()[0]
            print(
                f"{page.relative_to(DOCS)}: {first} ({time.monotonic() - start:.1f} s)", flush=True
            )
            if done.returncode or not done.stdout.strip():
                raise SystemExit(
                    f"{page}: exit code {done.returncode}\n{text}\n{done.stdout}\n{done.stderr}"
                )


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
