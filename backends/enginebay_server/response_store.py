"""Stores the responses of /v1/responses for a while, in memory or in a SQLite file."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginebay.errors import InputError
from enginebay_server.settings import ServerSettings


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, the items that it answered, and the messages of the conversation so far."""

    record: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]


class ResponseStore(ABC):
    """Keeps the newest responses, up to a number and an age. Safe from several threads."""

    @abstractmethod
    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response. When there are too many, the oldest is dropped."""

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

    def __init__(
        self, max_responses: int, ttl_s: float, now_s: Callable[[], float] = time.time
    ) -> None:
        self._max_responses = max_responses
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._kept: collections.OrderedDict[str, tuple[float, StoredResponse]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        with self._lock:
            self._kept[response_id] = self._now_s(), stored
            self._drop_old()
            while len(self._kept) > self._max_responses:
                self._kept.popitem(last=False)

    def get(self, response_id: str) -> StoredResponse | None:
        with self._lock:
            self._drop_old()
            found = self._kept.get(response_id)
            return None if found is None else found[1]

    def delete(self, response_id: str) -> bool:
        with self._lock:
            self._drop_old()
            return self._kept.pop(response_id, None) is not None

    def close(self) -> None:
        with self._lock:
            self._kept.clear()

    def _drop_old(self) -> None:
        oldest_s = self._now_s() - self._ttl_s
        while self._kept and next(iter(self._kept.values()))[0] < oldest_s:
            self._kept.popitem(last=False)


SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT UNIQUE NOT NULL,
    made_s REAL NOT NULL,
    stored TEXT NOT NULL
)
"""


class SqliteStore(ResponseStore):
    """Keeps responses in a file, which a later process can read."""

    def __init__(
        self,
        path: str,
        max_responses: int,
        ttl_s: float,
        now_s: Callable[[], float] = time.time,
        journal: str = "WAL",
    ) -> None:
        """InputError for a file that cannot be used."""
        self._max_responses = max_responses
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._lock = threading.Lock()
        try:
            Path(path).touch(mode=0o600)
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            try:
                self._database.execute(f"PRAGMA journal_mode = {journal}")
                self._database.execute("PRAGMA synchronous = NORMAL")
                self._database.execute(SCHEMA)
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
        text = json.dumps(dataclasses.asdict(stored))
        with self._lock, self._transaction():
            self._database.execute(
                "INSERT OR REPLACE INTO responses (id, made_s, stored) VALUES (?, ?, ?)",
                (response_id, self._now_s(), text),
            )
            self._database.execute(
                "DELETE FROM responses WHERE made_s < ? OR number <= "
                "(SELECT number FROM responses ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (self._now_s() - self._ttl_s, self._max_responses),
            )

    def get(self, response_id: str) -> StoredResponse | None:
        with self._lock:
            row = self._database.execute(
                "SELECT stored FROM responses WHERE id = ? AND made_s >= ?",
                (response_id, self._now_s() - self._ttl_s),
            ).fetchone()
        return None if row is None else StoredResponse(**json.loads(row[0]))

    def delete(self, response_id: str) -> bool:
        with self._lock:
            done = self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            return done.rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @contextlib.contextmanager
    def _transaction(self):  # type: ignore[no-untyped-def]
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def open_store(settings: ServerSettings) -> ResponseStore:
    """Return a store in the file of the settings, or in memory without one."""
    path, limits = settings.response_store, (settings.max_responses, settings.response_ttl_s)
    if path is None:
        return MemoryStore(*limits)
    return SqliteStore(path, *limits, journal=settings.response_journal)
