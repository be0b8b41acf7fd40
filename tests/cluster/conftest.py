"""Tests of several engine processes behind one address: a skip where Ray or smg is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.server.process import ServerProcess

NEEDED = ("ray", "smg", "fastapi", "uvicorn", "orjson", "prometheus_client", "httpx")
KEY = "a-key-of-the-tests"
FLAGS = ("--warmup", "lazy", "--decode-steps", "1", "--max-queue", "64")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where a library is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    skip = pytest.mark.skip(
        reason=f"{', '.join(missing)} is not installed; `make test-cluster` runs this in an "
        "environment with the extras cluster and serve-test"
    )
    for item in items:
        if missing and item.get_closest_marker("cluster") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Two replicas of the demo model, ready, with a key."""
    environment = {"ENGINEBAY_API_KEY": KEY}
    with ServerProcess("--replicas", "2", *FLAGS, environment=environment) as made:
        made.wait_for("ready: 2 replicas answer requests")
        yield made


@pytest.fixture(scope="session")
def alone() -> Iterator[ServerProcess]:
    """A server of the same model in one process."""
    with ServerProcess(*FLAGS, environment={"ENGINEBAY_API_KEY": KEY}) as made:
        yield made
