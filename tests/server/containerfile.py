"""Reads a Containerfile, and runs its instructions in folders of a test instead of an image."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path

KNOWN = {
    "FROM", "ARG", "COPY", "RUN", "USER", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT",
    "CMD",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its word, and the rest of its line."""

    word: str
    rest: str

    @property
    def words(self) -> list[str]:
        """The list of an ENTRYPOINT, CMD or HEALTHCHECK in JSON."""
        found: list[str] = json.loads(self.rest[self.rest.index("[") :])
        return found


def read(path: Path) -> list[Instruction]:
    """The instructions of a Containerfile whose instructions have one line each."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    found = [Instruction(*line.split(maxsplit=1)) for line in lines]
    assert {one.word for one in found} <= KNOWN
    return found


def last(instructions: list[Instruction], word: str) -> Instruction:
    """The instruction of a word that holds: the last one."""
    return [one for one in instructions if one.word == word][-1]


class Stages:
    """Runs instructions one after the other. Folders of the image lie below `root`, and the
    interpreter of the base image is `python`. Users are not made or changed.
    """

    def __init__(self, root: Path, python: str, repository: Path) -> None:
        self.root, self.python, self.repository = root, python, repository
        self.environment = {
            name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ
        }
        self.arguments: dict[str, str] = {}
        programs = root / "programs"
        programs.mkdir()
        (programs / "python").symlink_to(python)
        self.environment["PATH"] = f"{programs}:{self.environment['PATH']}"

    def at(self, text: str) -> str:
        """A text with the image's folders replaced by those below `root`."""
        for folder in ("/opt/enginebay", "/src", "/cache"):
            text = text.replace(folder, str(self.root) + folder)
        return text

    def run(self, instructions: list[Instruction]) -> None:
        """Run every instruction up to the entry point."""
        for one in instructions:
            if one.word == "ARG":
                name, _, value = one.rest.partition("=")
                self.arguments[name] = value
            elif one.word == "ENV":
                name, _, value = one.rest.partition("=")
                value = value.replace("$PATH", self.environment["PATH"])
                self.environment[name] = self.at(value)
            elif one.word == "COPY" and not one.rest.startswith("--from"):
                self._copy(one.rest)
            elif one.word == "RUN" and "useradd" not in one.rest:
                self._run(one.rest)

    def _copy(self, rest: str) -> None:
        source, target = rest.split()
        assert source == "."
        ignored = [
            line.removeprefix("**/")
            for line in (self.repository / ".dockerignore").read_text().splitlines()
        ]
        shutil.copytree(self.repository, self.at(target), ignore=shutil.ignore_patterns(*ignored))

    def _run(self, command: str) -> None:
        done = subprocess.run(
            ["sh", "-euc", self.at(command)],
            env={**self.environment, **self.arguments},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
