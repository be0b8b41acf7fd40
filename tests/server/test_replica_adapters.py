"""Adapters of several replicas: each change is made in all of them or in none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.server.raw import RawClient
from tests.server.test_replicas import KEY, asked, front_over

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TEXT = "/v1/completions"
AT_START = {("demo", "held"): "/held"}


class Served:
    """A replica's application, with adapters as a dictionary of folders."""

    def __init__(self) -> None:
        self.loaded = {name: folder for (_, name), folder in AT_START.items()}
        self.missing: set[str] = set()
        """Folders that this replica cannot read."""
        self.in_use: set[str] = set()
        self.breaks = False
        self.is_slow = asyncio.Event()
        """While it is set, changes wait."""
        self.changes: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        record = json.loads(body)
        if scope["path"] in (LOAD, UNLOAD):
            self.changes.append(scope["path"])
            if self.breaks:
                send.__self__.transport.abort()
                return
            while self.is_slow.is_set():
                await asyncio.sleep(0.01)
        status, answer = self.answer(scope["path"], record)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def answer(self, path: str, record: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = record.get("lora_name", record.get("model"))
        if not isinstance(name, str):
            return 400, error("lora_name", "bad")
        if path == LOAD:
            if name in self.loaded:
                return 409, error(name, "adapter_already_loaded")
            if record["lora_path"] in self.missing:
                return 400, error("no such folder", None)
            self.loaded[name] = record["lora_path"]
        elif name not in self.loaded:
            return 404, error(name, "adapter_not_found")
        elif path == UNLOAD:
            if name in self.in_use:
                return 409, error(name, "adapter_in_use")
            del self.loaded[name]
        return 200, {"name": name}


def error(message: str, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "code": code}}


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[Any, Any, Served, Served]]:
    """The front, its state, and two replicas."""
    from enginebay_server.replicas.adapters import SharedAdapters

    first, second = Served(), Served()
    async with front_over(first, second) as (front, state):
        state.adapters = SharedAdapters(state.table, state.names, AT_START)
        yield front, state, first, second


async def change(front: Any, path: str, name: str, **more: Any) -> tuple[int, dict[str, Any]]:
    client = await asked(front, path, {"lora_name": name, **more})
    found: dict[str, Any] = json.loads(client.body)
    assert client.status is not None
    return client.status, found.get("error", found)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("enginebay_server.replicas.adapters")
    monkeypatch.setattr("enginebay_server.replicas.adapters.ENDING_S", 0.3)


def test_changes_reach_every_replica() -> None:
    async def run() -> None:
        async with two() as (front, _, first, second):
            assert (await change(front, LOAD, "a", lora_path="/a"))[0] == 200
            assert first.loaded == second.loaded == {"held": "/held", "a": "/a"}
            assert (await change(front, LOAD, "a", lora_path="/b"))[1]["code"] == (
                "adapter_already_loaded"
            )
            assert (await change(front, UNLOAD, "held", model="demo"))[0] == 200
            assert first.loaded == second.loaded == {"a": "/a"}
            assert (await change(front, UNLOAD, "held"))[0] == 404

    asyncio.run(run())


def test_a_load_that_one_replica_refuses_is_undone_in_the_others() -> None:
    async def run() -> None:
        async with two() as (front, state, first, second):
            second.missing.add("/a")
            status, refused = await change(front, LOAD, "a", lora_path="/a")
            assert (status, refused["message"]) == (400, "replica 1: no such folder")
            assert first.loaded == second.loaded == {"held": "/held"}
            assert first.changes == [LOAD, UNLOAD]
            first.missing.add("/a")
            assert (await change(front, LOAD, "a", lora_path="/a"))[0] == 400
            assert second.changes == [LOAD], "the first refusal is the answer"
            assert not any(one.is_failed for one in state.table)
            first.missing.clear()
            second.missing.clear()
            assert (await change(front, LOAD, "a", lora_path="/a"))[0] == 200

    asyncio.run(run())


@pytest.mark.slow
def test_an_unload_that_one_replica_refuses_is_undone_in_the_others() -> None:
    async def run() -> None:
        async with two() as (front, state, first, second):
            second.in_use.add("held")
            status, refused = await change(front, UNLOAD, "held")
            assert (status, refused["code"]) == (409, "adapter_in_use")
            assert first.loaded == second.loaded == {"held": "/held"}
            second.in_use.clear()
            # A process whose adapter has no folder any more is ended, and another one starts.
            second.in_use.add("held")
            first.missing.add("/held")
            assert (await change(front, UNLOAD, "held"))[0] == 409
            assert [one.is_failed for one in state.table] == [True, False]
            assert second.loaded == {"held": "/held"}

    asyncio.run(run())


@pytest.mark.slow
def test_a_request_that_has_no_client_any_more_is_waited_for() -> None:
    async def run() -> None:
        async with two() as (front, _, first, second):
            second.in_use.add("held")
            asyncio.get_running_loop().call_later(0.1, second.in_use.clear)
            assert (await change(front, UNLOAD, "held"))[0] == 200
            assert first.loaded == second.loaded == {}

    asyncio.run(run())


@pytest.mark.slow
def test_a_replica_that_ends_during_a_change_is_ended_and_the_change_undone() -> None:
    async def run() -> None:
        async with two() as (front, state, first, second):
            second.breaks = True
            status, refused = await change(front, LOAD, "a", lora_path="/a")
            assert (status, refused["code"]) == (503, "replica_failed")
            assert first.loaded == {"held": "/held"}
            assert [one.is_failed for one in state.table] == [False, True]
            status, refused = await change(front, LOAD, "a", lora_path="/a")
            assert (status, refused["code"]) == (503, "model_not_ready")
            assert "replica 1 is not ready" in refused["message"]

    asyncio.run(run())


def test_a_new_process_gets_the_adapters_of_the_others() -> None:
    async def run() -> None:
        async with two() as (front, state, first, second):
            assert (await change(front, LOAD, "a", lora_path="/a"))[0] == 200
            assert (await change(front, UNLOAD, "held"))[0] == 200
            second.loaded = {"held": "/held"}  # as after a start
            second.missing.add("/a")
            replica = state.table[1]
            assert not await state.adapters.catch_up(replica)
            second.missing.clear()
            assert await state.adapters.catch_up(replica)
            assert first.loaded == second.loaded == {"a": "/a"}
            second.changes.clear()
            assert await state.adapters.catch_up(replica)
            assert not second.changes, "it has them"

    asyncio.run(run())


def test_requests_wait_while_their_adapter_is_changed() -> None:
    async def run() -> None:
        async with two() as (front, _, first, second):
            second.is_slow.set()
            loading = asyncio.create_task(change(front, LOAD, "a", lora_path="/a"))
            while not second.changes:
                await asyncio.sleep(0.01)
            assert "a" in first.loaded
            key = {"authorization": f"Bearer {KEY}"}
            waiting = [RawClient(front, TEXT, {"model": name}, key) for name in ("a", "demo:a")]
            other = await asked(front, TEXT, {"model": "held"})
            assert other.status == 200
            await asyncio.sleep(0.05)
            assert not any(client.task.done() for client in waiting)
            second.is_slow.clear()
            assert (await loading)[0] == 200
            await asyncio.gather(*(client.task for client in waiting))
            assert waiting[0].status == 200

    asyncio.run(run())


@pytest.mark.slow
def test_wrong_bodies_change_nothing() -> None:
    async def run() -> None:
        async with two() as (front, _, first, second):
            right = {"lora_name": "a", "lora_path": "/a"}
            for body in ({}, {"lora_name": "a"}, {**right, "lora_name": 7}, {**right, "model": []}):
                assert (await asked(front, LOAD, body)).status == 400
            client = RawClient(front, LOAD, None, {"authorization": f"Bearer {KEY}"})
            await client.task
            assert client.status == 400
            status, refused = await change(front, LOAD, "a", lora_path="/a", model="other")
            assert (status, refused["code"]) == (404, "model_not_found")
            assert not first.changes + second.changes
            assert first.loaded == second.loaded == {"held": "/held"}

    asyncio.run(run())
