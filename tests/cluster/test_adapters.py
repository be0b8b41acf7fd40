"""Adapters of two replicas: loaded and unloaded in both or in neither, also after a restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from enginebay_models.checkpoint import find_folder
from tests.adapters import write_adapter
from tests.cluster.client import (
    Stream,
    answered,
    are_ready,
    body_of,
    client,
    processes,
    samples,
    streams,
    until,
)
from tests.cluster.conftest import FLAGS, KEY
from tests.server.process import ServerProcess

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SLOTS = ("--max-loras", "2", "--max-lora-rank", "8", "--lora-routes")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(made / name, find_folder("demo"), seed=seed, scale=2.0))
        for seed, name in enumerate(("held", "a", "b"))
    }


@pytest.fixture(scope="module")
def adapted(folders: dict[str, str]) -> Iterator[ServerProcess]:
    """Two replicas, each with the adapter held."""
    flags = ("--replicas", "2", *FLAGS, "--lora", f"held={folders['held']}", *SLOTS)
    with ServerProcess(*flags, environment={"ENGINEBAY_API_KEY": KEY}) as made:
        made.wait_for("ready: 2 replicas answer requests")
        yield made


def change(server: ServerProcess, path: str, name: str, **more: Any) -> tuple[int, dict[str, Any]]:
    with client(server) as http:
        answer = http.post(path, json={"lora_name": name, **more})
    record: dict[str, Any] = answer.json()
    return answer.status_code, record.get("error", record)


def served(server: ServerProcess) -> list[str]:
    with client(server) as http:
        return [one["id"] for one in http.get("/v1/models").json()["data"]]


def num_loaded(server: ServerProcess) -> list[float]:
    return list(samples(server, "lora_adapters_loaded").values())


def texts_of_both(server: ServerProcess, name: str) -> set[str]:
    """The text of an adapter, when both replicas have answered."""
    before, found = answered(server), set()
    for _ in range(10):
        body = {**body_of("Once upon a time", 8), "model": name, "temperature": 0}
        found |= {stream.text for stream in streams(server, [body] * 4)}
        if all(value > before[one] for one, value in answered(server).items()):
            return found
    raise AssertionError("one replica got no request")


def test_an_adapter_is_loaded_in_both_replicas(
    adapted: ServerProcess, folders: dict[str, str]
) -> None:
    assert served(adapted) == ["demo", "held"]
    assert change(adapted, LOAD, "a", lora_path=folders["a"])[0] == 200
    assert served(adapted) == ["demo", "held", "a"]
    assert num_loaded(adapted) == [2, 2]
    each = [texts_of_both(adapted, name) for name in ("demo", "held", "a")]
    assert [len(one) for one in each] == [1, 1, 1], "both replicas give the same text"
    assert len(set.union(*each)) == 3
    code = change(adapted, LOAD, "a", lora_path=folders["a"])[1]["code"]
    assert code == "adapter_already_loaded"
    assert change(adapted, UNLOAD, "a")[0] == 200
    assert change(adapted, UNLOAD, "a")[0] == 404
    assert num_loaded(adapted) == [1, 1]


def test_a_load_that_one_replica_refuses_leaves_nothing(
    adapted: ServerProcess, folders: dict[str, str]
) -> None:
    messages = []
    pids = processes(adapted, "ReplicaActor")
    assert len(pids) == 2
    for pid in pids:
        # This path leads to the folder in the process with this number only.
        path = f"/proc/self/task/{pid}/root{folders['b']}"
        status, refused = change(adapted, LOAD, "b", lora_path=path)
        assert status == 400
        messages.append(refused["message"])
        assert num_loaded(adapted) == [1, 1]
        assert served(adapted) == ["demo", "held"]
    assert sorted(message.startswith("replica 1: ") for message in messages) == [False, True]
    assert processes(adapted, "ReplicaActor") == pids, "no process was ended"
    assert change(adapted, LOAD, "b", lora_path=folders["b"])[0] == 200
    assert change(adapted, UNLOAD, "b")[0] == 200


def test_an_adapter_in_use_stays_in_both(adapted: ServerProcess) -> None:
    def unload(_: Sequence[Stream]) -> None:
        status, refused = change(adapted, UNLOAD, "held")
        assert (status, refused["code"]) == (409, "adapter_in_use")
        assert num_loaded(adapted) == [1, 1]

    [stream] = streams(adapted, [{**body_of("Once upon a time", 200), "model": "held"}], unload)
    assert stream.events[-1] == "[DONE]"


def test_a_replica_that_returns_has_the_adapters_of_the_other(
    adapted: ServerProcess, folders: dict[str, str]
) -> None:
    assert change(adapted, LOAD, "a", lora_path=folders["a"])[0] == 200
    assert change(adapted, UNLOAD, "held")[0] == 200
    before = texts_of_both(adapted, "a")
    os.kill(processes(adapted, "ReplicaActor")[0], signal.SIGKILL)
    status, refused = change(adapted, LOAD, "b", lora_path=folders["b"])
    assert status == 503
    assert refused["code"] in ("replica_failed", "model_not_ready")
    until(lambda: are_ready(adapted))
    assert num_loaded(adapted) == [1, 1]
    assert served(adapted) == ["demo", "a"]
    assert texts_of_both(adapted, "a") == before
    assert change(adapted, LOAD, "held", lora_path=folders["held"])[0] == 200
    assert change(adapted, UNLOAD, "a")[0] == 200
    assert num_loaded(adapted) == [1, 1]
