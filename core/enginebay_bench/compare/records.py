"""The record of a comparison: a file of JSON lines, which grows run by run.

The first line says what is compared: `schema`, `version`, `when`, `command`, `environment`,
`cells`, `variants`, `reference`, `rounds`, and the `seed` of the prompts' tokens. Each other line
has a `kind`:

- facts: what a `variant` says of itself when it is ready, and its seconds until then (`ready_s`).
- parity: the `requests` by which its tokens are compared with the reference's, and what the
  reference answers to them with log-probabilities (`wanted`).
- run: a `round` of a `cell` of a `variant`: the `requests` with their times in seconds and their
  tokens, the seconds that the run took by our clock (`took_s`), the program's `peak_mib`, the
  share of the machine's time that other programs took (`others`; null where it is not known), and
  lines of text that the program `said` with its answer.
- failed: `why` a variant is left out from there on, and its `verdict`: "failed" or "cheat".
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from enginebay.errors import InputError

SCHEMA, VERSION = "enginebay.compare", 1


@dataclasses.dataclass(frozen=True)
class Cell:
    """A workload: one request of exact lengths, or a batch of requests up to these lengths."""

    num_requests: int
    prompt_len: int
    new_tokens: int

    @property
    def name(self) -> str:
        """Such as "128+64 tokens", or "32 requests up to 256+256 tokens"."""
        size = f"{self.prompt_len}+{self.new_tokens} tokens"
        return size if self.num_requests == 1 else f"{self.num_requests} requests up to {size}"


@dataclasses.dataclass
class RunRecord:
    """What was compared, and all lines so far."""

    header: dict[str, Any]
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def variants(self) -> list[str]:
        """The names, the reference's first."""
        names = [one["name"] for one in self.header["variants"]]
        return sorted(names, key=lambda name: name != self.header["reference"])

    @property
    def cells(self) -> list[Cell]:
        """The workloads."""
        return [Cell(**cell) for cell in self.header["cells"]]

    def of(self, kind: str, **fields: object) -> list[dict[str, Any]]:
        """The lines of a kind whose fields have these values."""
        wanted = {"kind": kind, **fields}.items()
        return [one for one in self.lines if all(one.get(name) == value for name, value in wanted)]

    def is_done(self, variant: str, cell: str, number: int) -> bool:
        """Whether a round of a variant is in the record."""
        return bool(self.of("run", variant=variant, cell=cell, round=number))


def read_record(path: str | Path) -> RunRecord:
    """Read a record. A last line that was cut is left out. InputError for a file that is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the record {path}: {error}", "a file that compare --output wrote", "Check the path."
        ) from error
    lines = []
    for place, line in enumerate(text.split("\n")[:-1]):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise _no_record(path, f"line {place + 1} is no JSON object")
        lines.append(found)
    if not lines or lines[0].get("schema") != SCHEMA:
        raise _no_record(path, f"it does not begin with the schema {SCHEMA}")
    if lines[0].get("version") != VERSION:
        raise _no_record(path, f"its version is {lines[0].get('version')!r}")
    try:
        record = RunRecord(lines[0], lines[1:])
        known = {record.header["reference"]} | {cell.name for cell in record.cells}
        assert known
        assert int(record.header["rounds"]) > 0
        assert record.header["reference"] in record.variants
        for entry in record.lines:
            assert entry["variant"] in record.variants, entry
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise _no_record(path, f"its header or a line is damaged: {error!r}") from error
    return record


def _no_record(path: str | Path, why: str) -> InputError:
    return InputError(
        f"the record {path}: {why}",
        f"version {VERSION} of what compare --output writes",
        "Write a new one, under another name.",
    )


class RunWriter:
    """Adds lines to a record and to its file, if it has one, each at once."""

    def __init__(self, record: RunRecord, path: str | None) -> None:
        self.record = record
        self._file: io.TextIOBase | None = None
        if path is not None:
            part = Path(f"{path}.part")  # what the file had is never lost
            try:
                self._file = part.open("w", encoding="utf-8")
                self._write([record.header, *record.lines])
                part.replace(path)
            except OSError as error:
                raise InputError(
                    f"--output {path}: {error}", "a file that can be written", "Name another file."
                ) from error

    def add(self, kind: str, **fields: Any) -> None:
        """Add a line."""
        line = {"kind": kind, **fields}
        self.record.lines.append(line)
        self._write([line])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        if self._file is not None:
            self._file.write("".join(json.dumps(line) + "\n" for line in lines))
            self._file.flush()


def timed(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is kept of a run's requests."""
    return [
        {
            "num_tokens": len(request["token_ids"])
            if request.get("token_ids") is not None
            else request.get("num_tokens"),
            "first_s": request.get("first_s"),
            "end_s": request["end_s"],
            "cached": request.get("cached") or 0,
            "drafted": request.get("drafted") or 0,
            "token_ids": request.get("token_ids"),
            "text": request.get("text"),
        }
        for request in requests
    ]
