"""Stores the responses of /v1/responses for a while, in memory or in a SQLite file."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginebay.errors import InputError, error_line
from enginebay_server.settings import ServerSettings

log = logging.getLogger("enginebay.server")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, the items that it answered, and the messages of the conversation so far."""

    record: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]

    def to_bytes(self) -> bytes:
        """Return the response as JSON, whose length is what a store counts."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes | str) -> StoredResponse:
        """Return the response that to_bytes() wrote."""
        return cls(**json.loads(data))


@dataclasses.dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a store keeps: a number of responses, their bytes together, and seconds of each."""

    max_responses: int
    max_bytes: int
    ttl_s: float


class ResponseStore(ABC):
    """Keeps the newest responses, up to a number, a size and an age. Safe from several threads."""

    @abstractmethod
    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response. While there are too many, or too many bytes, the oldest is dropped: the
        new one too, if it is larger than all together may be.
        """

    @abstractmethod
    def get(self, response_id: str) -> StoredResponse | None:
        """Return a stored response; None if there is none or it has expired."""

    @abstractmethod
    def delete(self, response_id: str) -> bool:
        """Delete a response; returns False for an unknown id."""

    @abstractmethod
    def close(self) -> None:
        """Close the store. Afterwards it stores and finds nothing."""


class MemoryStore(ResponseStore):
    """Keeps responses until the process ends."""

    def __init__(self, limits: StoreLimits, now_s: Callable[[], float] = time.time) -> None:
        self._limits = limits
        self._now_s = now_s
        self._kept: collections.OrderedDict[str, tuple[float, bytes]] = collections.OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        data = stored.to_bytes()
        with self._lock:
            self._drop(response_id)
            self._kept[response_id] = self._now_s(), data
            self._num_bytes += len(data)
            self._drop_old()
            limits = self._limits
            while len(self._kept) > limits.max_responses or self._num_bytes > limits.max_bytes:
                self._drop(next(iter(self._kept)))

    def get(self, response_id: str) -> StoredResponse | None:
        with self._lock:
            self._drop_old()
            found = self._kept.get(response_id)
        return None if found is None else StoredResponse.from_bytes(found[1])

    def delete(self, response_id: str) -> bool:
        with self._lock:
            self._drop_old()
            return self._drop(response_id)

    def close(self) -> None:
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    def _drop(self, response_id: str) -> bool:
        found = self._kept.pop(response_id, None)
        if found is not None:
            self._num_bytes -= len(found[1])
        return found is not None

    def _drop_old(self) -> None:
        oldest_s = self._now_s() - self._limits.ttl_s
        while self._kept and (first := next(iter(self._kept.items())))[1][0] < oldest_s:
            self._drop(first[0])


SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT UNIQUE NOT NULL,
    made_s REAL NOT NULL,
    stored TEXT NOT NULL,
    num_bytes INTEGER NOT NULL DEFAULT 0
)
"""
DROP = """
DELETE FROM responses WHERE made_s < ? OR number <= (
    SELECT max(number) FROM (
        SELECT number, row_number() OVER newest AS place, sum(num_bytes) OVER newest AS size
        FROM responses WINDOW newest AS (ORDER BY number DESC)
    ) WHERE place > ? OR size > ?
)
"""
"""Deletes responses that are too old, and those older than the newest that the limits allow."""


class SqliteStore(ResponseStore):
    """Keeps responses in a file, which a later process can read."""

    def __init__(
        self,
        path: str,
        limits: StoreLimits,
        now_s: Callable[[], float] = time.time,
        journal: str = "WAL",
    ) -> None:
        """InputError for a file that cannot be used."""
        self._limits = limits
        self._now_s = now_s
        self._lock = threading.Lock()
        try:
            Path(path).touch(mode=0o600)
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            try:
                self._database.execute(f"PRAGMA journal_mode = {journal}")
                self._database.execute("PRAGMA synchronous = NORMAL")
                self._database.execute(SCHEMA)
                self._add_sizes()
            except sqlite3.Error:
                self._database.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"--response-store {path}: {error}",
                "a file of SQLite that can be written, or a new one",
                "Pass its path.",
            ) from None

    def put(self, response_id: str, stored: StoredResponse) -> None:
        data, limits = stored.to_bytes(), self._limits
        with self._lock, self._transaction():
            self._database.execute(
                "INSERT OR REPLACE INTO responses (id, made_s, stored, num_bytes) "
                "VALUES (?, ?, ?, ?)",
                (response_id, self._now_s(), data.decode(), len(data)),
            )
            oldest_s = self._now_s() - limits.ttl_s
            self._database.execute(DROP, (oldest_s, limits.max_responses, limits.max_bytes))

    def get(self, response_id: str) -> StoredResponse | None:
        if not is_text(response_id):
            return None
        with self._lock:
            row = self._database.execute(
                "SELECT stored FROM responses WHERE id = ? AND made_s >= ?",
                (response_id, self._now_s() - self._limits.ttl_s),
            ).fetchone()
        return None if row is None else StoredResponse.from_bytes(row[0])

    def delete(self, response_id: str) -> bool:
        if not is_text(response_id):
            return False
        with self._lock:
            done = self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            return done.rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _add_sizes(self) -> None:
        """Add the column of sizes to a file that an earlier version made."""
        columns = self._database.execute("PRAGMA table_info(responses)").fetchall()
        if all(name != "num_bytes" for _, name, *_ in columns):
            self._database.execute(
                "ALTER TABLE responses ADD COLUMN num_bytes INTEGER NOT NULL DEFAULT 0"
            )
            self._database.execute("UPDATE responses SET num_bytes = length(stored)")

    @contextlib.contextmanager
    def _transaction(self):  # type: ignore[no-untyped-def]
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def is_text(response_id: str) -> bool:
    """Return whether SQLite can look for an id, which half of a UTF-16 pair does not let it."""
    return not any(0xD800 <= ord(char) <= 0xDFFF for char in response_id)


def store(responses: ResponseStore, response_id: str, stored: StoredResponse) -> None:
    """Store a response. A store that fails, such as one on a full disk, is logged: the client gets
    its answer all the same.
    """
    try:
        responses.put(response_id, stored)
    except (OSError, sqlite3.Error, RecursionError) as error:
        log.warning("the response %s is not stored: %s", response_id, error_line(error))


def open_store(settings: ServerSettings) -> ResponseStore:
    """Return a store in the file of the settings, or in memory without one."""
    limits = StoreLimits(settings.max_responses, settings.max_stored_bytes, settings.response_ttl_s)
    if settings.response_store is None:
        return MemoryStore(limits)
    return SqliteStore(settings.response_store, limits, journal=settings.response_journal)
