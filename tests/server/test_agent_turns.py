"""An agent's conversation with a server: `usage` counts 95 % of each later prompt as cached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginebay import LLM
from enginebay_models.checkpoint import find_folder
from tests.agent_talk import TEMPLATES, TOOLS, turns
from tests.pool import few_sizes
from tests.server.in_process_client import Asker

PATH, LENGTH = "/v1/chat/completions", 12_288
SIZES: dict[str, Any] = {"max_model_len": LENGTH, "max_num_seqs": 1, "max_num_batched_tokens": 1024}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The demo model with a longer context."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(find_folder("demo"), folder, dirs_exist_ok=True)
    config: Path = folder / "config.json"
    values = json.loads(config.read_text(encoding="utf-8")) | {"max_position_embeddings": LENGTH}
    config.write_text(json.dumps(values), encoding="utf-8")
    with few_sizes(), LLM(str(folder), **SIZES) as made:
        yield made


@pytest.mark.slow
def test_95_percent_of_each_later_prompt_are_cached(llm: LLM) -> None:
    asker = Asker(llm, {"chat_template": TEMPLATES["qwen3"]})
    shares: list[float] = []

    def ask(messages: Any, salt: str) -> Any:
        fields: dict[str, Any] = {"messages": messages, "tools": TOOLS, "cache_salt": salt}
        body = asker.ok(PATH, **fields, max_tokens=24, temperature=0, ignore_eos=True)
        usage = body["usage"]
        shares.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
        return body["choices"][0]["message"]

    *_, last = [ask(messages, "a") for messages in turns(reasons=False)]
    assert shares[0] == 0.0
    assert min(shares[1:]) >= 0.95, shares
    anew = ask(turns(reasons=False)[-1], "b")
    assert (shares[-1], anew) == (0.0, last)
