"""The log file of a monitored engine: JSON lines with its figures at intervals, and one line per
request.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import logging
import queue
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from enginebay.errors import InputError
from enginebay_esurge.observing import Figures
from enginebay_esurge.outputs import RequestOutput
from enginebay_esurge.repeating import Repeater

log = logging.getLogger("enginebay.esurge")


class LogFile:
    """Appends to `path` on a thread of its own, creating missing folders. A write error, such as a
    full disk, loses lines but does not affect requests.
    """

    def __init__(
        self, path: str, read: Callable[[], Figures], interval_s: float, *, is_detailed: bool
    ) -> None:
        self._read = read
        self._is_detailed = is_detailed
        self._ended: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  # closed by close()
        except OSError as error:
            raise InputError(
                f"log_file = {str(path)!r}, which cannot be written ({error.strerror})",
                "a file that can be created or appended to",
                "Pass another log_file.",
            ) from error
        self._repeater = Repeater("esurge-log", interval_s, self._write)

    def completed(self, output: RequestOutput) -> None:
        """Record a completed request. Called on the reader's thread, so that it must not wait for
        the disk.
        """
        if self._is_detailed:
            first = output.outputs[0]
            self._ended.put(
                {
                    "time": _now(),
                    "event": "request",
                    "request_id": output.request_id,
                    "finish_reason": first.finish_reason,
                    "num_generated_tokens": output.num_generated_tokens,
                    "first_token_s": output.first_token_time,
                    "latency_s": output.processing_time,
                    "tokens_per_second": output.tokens_per_second,
                }
                | _counts(output)
            )

    def close(self) -> None:
        """Write the remaining lines, and close the file."""
        self._repeater.stop()
        self._write()
        self._file.close()

    def _write(self) -> None:
        figures = dataclasses.asdict(self._read())
        del figures["unix_s"]
        lines = [{"time": _now(), "event": "figures"} | figures]
        while not self._ended.empty():
            lines.insert(-1, dict(self._ended.get()))
        try:
            self._file.write("".join(json.dumps(line) + "\n" for line in lines))
            self._file.flush()
        except (OSError, ValueError) as error:
            log.warning("cannot write the monitoring log (%s): lines are lost", error)


def _counts(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics or {}
    return {name: metrics.get(name) for name in ("prompt_tokens", "cached_tokens", "queue_time")}


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
