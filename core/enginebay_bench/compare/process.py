"""VariantProcess: a variant's program, its answers, and what it takes of the machine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from enginebay.errors import EnginebayError, InputError
from enginebay_bench.compare.variants import ComparedVariant

MAX_ERROR_LINES = 8
END_S = 5.0
"""Seconds that an ended program may take to go."""

LATE_S, LATE_SHARE = 0.5, 0.1
"""Seconds, and share of a run, that an answer may be on its way to us."""


class VariantError(EnginebayError):
    """The program of a variant failed, ended, took too long, or gave a wrong answer."""


class VariantInputError(VariantError, InputError):
    """What a variant was given is wrong, such as the name of a kernel."""


class KernelCheatError(VariantError):
    """A kernel of a variant cheats."""


class VariantProcess:
    """Runs a variant's program. A limit of seconds holds for the start and for each run; what
    takes longer is ended, with all that it has started.
    """

    def __init__(self, variant: ComparedVariant, limit_s: float) -> None:
        self._name, self._limit_s = variant.name, limit_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._began_s = time.monotonic()
        self._num_runs = 0
        self.took_s = 0.0
        """Seconds from the last run's sending to its answer, by our clock."""
        self.said: list[str] = []
        """What the program said with its last answer."""
        try:
            self._process = subprocess.Popen(
                variant.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C ends the comparison, which ends its programs
            )
        except OSError as error:
            self._errors.close()
            raise VariantError(f"{self._name} cannot be started: {error}") from error
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        """Wait until the program is ready, and take its facts."""
        with self._limited():
            ready = self._read().get("ready")
        if not isinstance(ready, dict) or not _are_facts(ready):
            raise VariantError(f"the first line of {self._name} has no valid record `ready`")
        self.facts = {**ready, "ready_s": time.monotonic() - self._began_s}

    def run(self, run: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The records of a run's requests."""
        assert self._process.stdin is not None, "it is a pipe"
        self._num_runs += 1
        start_s = time.monotonic()
        with self._limited():
            try:
                line = json.dumps({"id": self._num_runs, **run}) + "\n"
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            except OSError:
                raise self._ended() from None
            answer = self._read()
        self.took_s = took_s = time.monotonic() - start_s
        records = answer.get("requests")
        if answer.get("id") != self._num_runs or not isinstance(records, list):
            raise VariantError(f"{self._name} did not answer run {self._num_runs}")
        if len(records) != len(run["prompts"]):
            raise VariantError(f"{self._name} did not answer each request of a run")
        for record, num in zip(records, run["new_tokens"], strict=True):
            if fault := _fault_of(record, num):
                raise VariantError(f"{self._name} answered a request with {fault}")
        self.said = answer.get("said", [])
        if not isinstance(self.said, list) or not all(isinstance(one, str) for one in self.said):
            raise VariantError(f"{self._name} answered with `said` that is no list of texts")
        says_s = max(record["end_s"] for record in records)
        if not took_s * (1 - LATE_SHARE) - LATE_S <= says_s <= took_s:
            raise VariantError(
                f"{self._name} says that a run of {took_s:.3g} s took {says_s:.3g} s"
            )
        return records

    @property
    def is_local(self) -> bool:
        """Whether the work is done by this program: not for a server."""
        return self.facts.get("local") is not False

    @property
    def peak_mib(self) -> float | None:
        """The largest resident memory of the program so far; None where the system does not tell,
        and for a server.
        """
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return None
        peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peaks[0]) / 1024 if peaks and self.is_local else None

    def cpu_s(self) -> float:
        """CPU seconds of the program so far; 0 where the system does not tell."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the program and what it has started."""
        self._kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._errors.close()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """End the program when the time of a `with` block is over."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._kill()

        timer = threading.Timer(self._limit_s, end)
        timer.start()
        try:
            yield
        except VariantError:
            if not is_late.is_set():
                raise
        finally:
            timer.cancel()
        if is_late.is_set():
            raise VariantError(f"{self._name} took longer than {self._limit_s:g} s")

    def _read(self) -> dict[str, Any]:
        """The next line of the program."""
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            said = line[:100].decode(errors="replace")
            raise VariantError(f"{self._name} wrote {said!r}, which is no record")
        if "error" in record:
            kind = VariantInputError if record.get("input") is True else VariantError
            raise kind(f"{self._name}: {str(record['error'])[:1000]!r}")
        return record

    def _ended(self) -> VariantError:
        try:
            code: int | str = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return VariantError(f"{self._name} closed its output and goes on")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()[-MAX_ERROR_LINES:]
        text = " | ".join(line.strip() for line in lines if line.strip())
        said = "".join(letter if letter.isprintable() else "?" for letter in text)
        return VariantError(f"{self._name} ended with exit code {code}: {said or '-'}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_facts(ready: Mapping[str, Any]) -> bool:
    """Whether the facts that are read have their types."""
    texts = ("name", "dtype", "weight_format", "platform")
    counts = ("num_token_ids", "max_model_len", "num_programs")
    return (
        all(isinstance(ready.get(name, ""), str) for name in texts)
        and all(_is_count(ready.get(name) or 0) for name in counts)
        and _is_number(ready.get("compile_s", 0.0))
    )


def _fault_of(record: object, num_tokens: int) -> str:
    """What is wrong with the answer to a request, or ""."""
    if not isinstance(record, dict):
        return "no record"
    end_s, first_s = record.get("end_s"), record.get("first_s")
    if not _is_number(end_s) or not end_s > 0:
        return f"end_s {end_s!r}, which is no time"
    if first_s is not None and not (_is_number(first_s) and 0 < first_s <= end_s):
        return f"first_s {first_s!r}, which is no time before end_s {end_s!r}"
    for name in ("cached", "drafted", "num_tokens"):
        if record.get(name) is not None and not _is_count(record[name]):
            return f"{name} {record[name]!r}, which is no number of tokens"
    token_ids, text = record.get("token_ids"), record.get("text")
    if token_ids is not None and not (
        isinstance(token_ids, list) and all(map(_is_count, token_ids))
    ):
        return "token_ids that are no list of numbers"
    if text is not None and not isinstance(text, str):
        return "a text that is none"
    if token_ids is None and text is None:
        return "neither token_ids nor text"
    if token_ids is not None and len(token_ids) > num_tokens:
        return f"{len(token_ids)} tokens, asked were {num_tokens}"
    logprobs = record.get("logprobs")
    if logprobs is not None and not _are_logprobs(logprobs, token_ids):
        return "logprobs that are no numbers by token, one record for each token"
    return ""


def _are_logprobs(logprobs: object, token_ids: Sequence[int] | None) -> bool:
    return (
        isinstance(logprobs, list)
        and len(logprobs) == len(token_ids or ())
        and all(
            isinstance(one, dict)
            and all(str(key).isdecimal() and _is_number(value) for key, value in one.items())
            for one in logprobs
        )
    )
