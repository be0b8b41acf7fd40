"""VariantProcess: a variant's program, its answers, and what it takes of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginebay.errors import EnginebayError
from enginebay_bench.compare.variants import ComparedVariant

MAX_ERROR_LINES = 8


class VariantError(EnginebayError):
    """The program of a variant failed, ended, or took too long."""


class VariantProcess:
    """Runs a variant's program. A limit of seconds holds for the start and for each run; what
    takes longer is ended.
    """

    def __init__(self, variant: ComparedVariant, limit_s: float) -> None:
        self._variant, self._limit_s = variant, limit_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._began_s = time.monotonic()
        try:
            self._process = subprocess.Popen(
                variant.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,  # Ctrl-C ends the comparison, which ends its programs
            )
        except OSError as error:
            self._errors.close()
            raise VariantError(f"{variant.name} cannot be started: {error}") from error
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        """Wait until the program is ready, and take its facts."""
        ready = self._read().get("ready")
        if not isinstance(ready, dict):
            raise VariantError(f"the first line of {self._variant.name} has no record `ready`")
        self.facts = {**ready, "ready_s": time.monotonic() - self._began_s}

    def run(self, run: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The records of a run's requests."""
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(json.dumps(run) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        records = self._read().get("requests")
        if not isinstance(records, list) or len(records) != len(run["prompts"]):
            raise VariantError(f"{self._variant.name} did not answer each request of a run")
        for record in records:
            if not (isinstance(record, dict) and isinstance(record.get("end_s"), int | float)):
                raise VariantError(f"{self._variant.name} answered a request without `end_s`")
        return records

    @property
    def peak_mib(self) -> float | None:
        """The largest resident memory of the program so far; None where the system does not tell,
        as for a server elsewhere.
        """
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return None
        peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peaks[0]) / 1024 if peaks else None

    def cpu_s(self) -> float:
        """CPU seconds of the program so far; 0 where the system does not tell."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        """The next line of the program."""
        assert self._process.stdout is not None, "it is a pipe"
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._process.kill()

        timer = threading.Timer(self._limit_s, end)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if is_late.is_set():
            raise VariantError(f"{self._variant.name} took longer than {self._limit_s:g} s")
        if not line:
            raise self._ended()
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise VariantError(f"{self._variant.name} wrote {line[:100]!r}, which is no record")
        if "error" in record:
            raise VariantError(f"{self._variant.name}: {record['error']}")
        return record

    def _ended(self) -> VariantError:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()[-MAX_ERROR_LINES:]
        said = " | ".join(line.strip() for line in lines if line.strip())
        return VariantError(f"{self._variant.name} ended with exit code {code}: {said or '-'}")
