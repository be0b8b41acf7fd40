"""Tests of the HTTP server: one model for all, and no tests where the server's extra is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from enginebay import LLM
    from tests.server.in_process_client import Asker

NEEDED = ("fastapi", "uvicorn", "orjson", "prometheus_client", "httpx", "openai")
SIZES: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}


MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

# Several modules import these libraries, so without them no module of this folder is collected.
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str:
    """Return why the folder is left out; nothing when it is not."""
    why = "`make test-serve` runs tests/server in an environment with the extras serve, serve-test"
    return f"tests/server is left out without {', '.join(MISSING)}: {why}" if MISSING else ""


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The demo model, each of whose steps has one size: few programs."""
    from enginebay import LLM
    from tests.pool import few_sizes

    with few_sizes(), LLM("demo", **SIZES) as made:
        yield made


@pytest.fixture
def asker(llm: LLM) -> Iterator[Asker]:
    """A client of an application with default settings; nothing is left allocated at its end."""
    from tests.server.in_process_client import Asker

    yield Asker(llm)
    llm.run_on_engine(llm.engine.ledger.check)
    assert llm.run_on_engine(lambda: llm.engine.rows.num_reqs) == 0
    counts = llm.counts()
    assert (counts.waiting, counts.running) == (0, 0)


@pytest.fixture
def held(llm: LLM) -> Iterator[None]:
    """The engine takes in requests and runs none."""
    from tests.server.in_process_client import set_paused

    set_paused(llm.loop, paused=True)
    try:
        yield
    finally:
        set_paused(llm.loop, paused=False)
