"""Loads and unloads adapters in all replicas, so that all replicas serve the same names."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import orjson

from enginebay.errors import shown
from enginebay_server.document import ADAPTER_PATHS
from enginebay_server.errors import ApiError, to_json
from enginebay_server.replicas.exchange import BrokenError, Headers
from enginebay_server.replicas.table import Replica, ReplicaTable

log = logging.getLogger("enginebay.server")

LOAD, UNLOAD = ADAPTER_PATHS
CHANGE_S = 300.0
"""Max seconds that a replica has to load an adapter."""
ENDING_S = 10.0
"""Max seconds that a replica has to end requests of an adapter whose clients have left."""
POLL_S = 0.1
JSON: Headers = ((b"content-type", b"application/json"),)

AdapterName = tuple[str, str]
"""The name of a model and of its adapter."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """A replica's answer to a change of its adapters."""

    status: int
    headers: Headers
    body: bytes

    @property
    def code(self) -> str | None:
        """The code of an error; None for other answers."""
        with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
            code: str | None = orjson.loads(self.body)["error"]["code"]
            return code
        return None

    def named(self, number: int) -> Self:
        """Return the same error with a message that begins with the replica's number."""
        record = orjson.loads(self.body)
        record["error"]["message"] = f"replica {number}: {record['error']['message']}"
        kept = [one for one in self.headers if one[0] != b"content-length"]
        return dataclasses.replace(self, headers=kept, body=to_json(record))


class SharedAdapters:
    """The adapters of all replicas. One change is made at a time, in every replica or in none.

    While an adapter is loaded or unloaded, requests that name it wait, so that no request uses an
    adapter which only some of the replicas have. A process that Ray has started again gets the
    adapters of the others before it answers requests. The object belongs to one event loop.
    """

    def __init__(
        self, table: ReplicaTable, models: Sequence[str], loaded: Mapping[AdapterName, str]
    ) -> None:
        """`models`: the names of the models, the first one for bodies without a model. `loaded`:
        the folders of the adapters that each process loads when it starts.
        """
        self._table, self._models = table, models
        self._at_start, self._folders = loaded, dict(loaded)
        self._lock = asyncio.Lock()
        self._changing: str | None = None
        self._is_settled = asyncio.Event()
        self._is_settled.set()

    async def settled(self, model: str | None) -> None:
        """Wait while an adapter is loaded or unloaded that requests to `model` use."""
        while self._changing is not None and names_adapter(model, self._changing):
            await self._is_settled.wait()

    async def change(
        self, path: str, record: dict[str, Any], headers: Headers, users: Iterable[int]
    ) -> ReplicaAnswer:
        """Load or unload an adapter in every replica. `record`: the body, with a `lora_name`.
        `users`: the numbers of the replicas that answer requests of this adapter.

        Returns the answer of a replica: if a replica refuses, its refusal. Then the change is
        undone in the others. ApiError 503 unless all replicas are ready.
        """
        model = self._models[0] if record.get("model") is None else record["model"]
        if model not in self._models:
            raise ApiError(
                404,
                f"the model {shown(model)} is not served here. Served: {', '.join(self._models)}.",
                param="model",
                code="model_not_found",
            )
        name = record["lora_name"]
        async with self._lock:
            self._check_ready()
            self._changing = name
            self._is_settled.clear()
            try:
                return await self._everywhere(path, (model, name), record, headers, set(users))
            finally:
                self._changing = None
                self._is_settled.set()

    def _check_ready(self) -> None:
        absent = [str(one.number) for one in self._table if one.state != "ready"]
        if absent:
            raise ApiError(
                503,
                f"replica {', '.join(absent)} is not ready. Adapters are loaded and unloaded in "
                "all replicas or in none. Try again when /readiness shows that all are ready.",
                code="model_not_ready",
                retry_after_s=1,
            )

    async def _everywhere(
        self,
        path: str,
        name: AdapterName,
        record: dict[str, Any],
        headers: Headers,
        users: set[int],
    ) -> ReplicaAnswer:
        body, before = to_json(record), self._folders.get(name)
        # A replica that will refuse the change comes first: then there is nothing to undo.
        first, *others = sorted(self._table, key=lambda one: one.number not in users)
        answer = await self._ask(first, path, body, headers)
        if answer.status != 200:
            return answer
        answers = await asyncio.gather(
            *(self._ask(one, path, body, headers, waits=True) for one in others)
        )
        asked = zip(others, answers, strict=True)
        refused = [(one, given) for one, given in asked if given.status != 200]
        if refused:
            kept = {one.number for one, _ in refused}
            changed = [one for one in self._table if one.number not in kept]
            await asyncio.gather(*(self._restore(one, name, before) for one in changed))
            replica, given = refused[0]
            return given.named(replica.number)
        if path == LOAD:
            self._folders[name] = record["lora_path"]
        else:
            self._folders.pop(name, None)
        return answer

    async def _restore(self, replica: Replica, name: AdapterName, folder: str | None) -> None:
        """Undo a change: load the adapter from its former folder, or (None) unload it. A process
        where this fails is ended; the next process gets the adapters of the others.
        """
        answer = await self._make(replica, name, folder)
        if answer.status != 200:
            log.warning("replica %d is started again: %s", replica.number, answer.body.decode())
            replica.fail()

    async def _make(self, replica: Replica, name: AdapterName, folder: str | None) -> ReplicaAnswer:
        """Load an adapter from a folder, or (None) unload it."""
        record = {"model": name[0], "lora_name": name[1]}
        if folder is None:
            return await self._ask(replica, UNLOAD, to_json(record), JSON, waits=True)
        return await self._ask(replica, LOAD, to_json({**record, "lora_path": folder}), JSON)

    async def _ask(
        self, replica: Replica, path: str, body: bytes, headers: Headers, *, waits: bool = False
    ) -> ReplicaAnswer:
        """Send a change to a replica. `waits`: while the adapter is in use, try again for ENDING_S,
        because the clients of these requests have left and the requests end. A process that does
        not answer is ended, because it may or may not have made the change.
        """
        end_s = asyncio.get_running_loop().time() + (ENDING_S if waits else 0.0)
        while True:
            try:
                async with asyncio.timeout(CHANGE_S):
                    answer = ReplicaAnswer(*await replica.post(path, headers, body))
            except (BrokenError, TimeoutError):
                replica.fail()
                why = f"replica {replica.number} ended before it had answered"
                error = ApiError(503, why, code="replica_failed", retry_after_s=1)
                return ReplicaAnswer(503, JSON, to_json(error.body))
            in_use = answer.code == "adapter_in_use"
            if not in_use or asyncio.get_running_loop().time() >= end_s:
                return answer
            await asyncio.sleep(POLL_S)

    async def catch_up(self, replica: Replica) -> bool:
        """Give a process that has started the adapters of the others; returns whether it has them.
        A later call tries again.
        """
        if replica.adapted == replica.address:
            return True
        async with self._lock:
            address = replica.address
            changed = {
                name: self._folders.get(name)
                for name in (*self._at_start, *self._folders)
                if self._folders.get(name) != self._at_start.get(name)
            }
            for name, folder in changed.items():
                if name in self._at_start:
                    await self._make(replica, name, None)
                answer = ReplicaAnswer(200, (), b"")
                if folder is not None:
                    answer = await self._make(replica, name, folder)
                if answer.status != 200 and answer.code != "adapter_already_loaded":
                    log.warning("replica %d: %s", replica.number, answer.body.decode())
                    return False
            replica.adapted = address
            return True


def names_adapter(model: str | None, adapter: str) -> bool:
    """Whether requests to `model` use the adapter: ADAPTER or MODEL:ADAPTER."""
    return model is not None and (model == adapter or model.endswith(f":{adapter}"))
