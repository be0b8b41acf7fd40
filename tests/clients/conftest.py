"""Clients of others against one server: each runs in an environment of its own, which
`make test-clients` makes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.process import ServerProcess

if TYPE_CHECKING:
    import openai

    from enginebay import LLM

HERE = Path(__file__).parent
CLIENTS = HERE.parents[1] / ".venv-clients"
KEY = "key-of-the-clients"
OFFLINE = {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""What keeps clients from asking other hosts."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where the server's extra is missing."""
    if any(importlib.util.find_spec(one) is None for one in ("uvicorn", "openai")):
        for item in items:
            if item.get_closest_marker("clients") is not None:
                item.add_marker(pytest.mark.skip(reason="see `make test-clients`"))


def program(client: str, name: str = "python") -> str:
    """A program of a client's environment. Skips the test where the environment is missing."""
    found = CLIENTS / client / "bin" / name
    if not found.exists():
        pytest.skip(f"{found.relative_to(CLIENTS.parent)} is missing; see `make test-clients`")
    return str(found)


def run(*command: str, **environment: str) -> str:
    """The standard output of a program that succeeds, with no network but the server."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **OFFLINE, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_script(client: str, *arguments: str) -> dict[str, Any]:
    """The JSON that the script of a client prints on its last line."""
    script = HERE / f"with_{client.replace('-', '_')}.py"
    found: dict[str, Any] = json.loads(
        run(program(client), str(script), *arguments).splitlines()[-1]
    )
    return found


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    flags = ("--warmup", "lazy", "--tool-parser", "hermes")
    with ServerProcess(*flags, environment={"ENGINEBAY_API_KEY": KEY}) as started:
        yield started


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The same model in this process."""
    from enginebay import LLM

    with LLM("demo", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64) as made:
        yield made


@pytest.fixture(scope="session")
def answer(server: ServerProcess) -> Iterator[Callable[..., openai.types.chat.ChatCompletion]]:
    """The server's answer to a message with OpenAI's client, of at most 8 tokens."""
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:

        def ask(text: str = "Hello!", **fields: Any) -> openai.types.chat.ChatCompletion:
            messages: Any = [{"role": "user", "content": text}]
            return client.chat.completions.create(
                **{"model": "demo", "messages": messages, "max_tokens": 8, **fields}
            )

        yield ask
