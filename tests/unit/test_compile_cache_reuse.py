"""A second start of a process compiles no program: each that warmup() needs is in the folder of
compiled programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.brief import TINY

SCRIPT = """
import collections, json, sys
import jax.monitoring

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name.rpartition("/")[2]]))
from enginebay import LLM, SamplingParams

model, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with LLM(
    model, compile_cache=folder, dtype="float32", max_model_len=32, max_num_seqs=1,
    max_num_batched_tokens=16, **options,
) as llm:
    programs = llm.warmup()
    ids = llm.generate([[3, 5, 9]], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0]
    json.dump({"programs": programs, "ids": ids.token_ids, **counts}, sys.stdout)
"""


def start(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The programs of a process, its tokens, and the events of JAX's cache by name."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(TINY), str(folder), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"engine": "vinference", "full_vocab_logprobs": True}, marks=pytest.mark.slow),
        pytest.param(
            {"kernels": {"attention": "xla"}, "quantization": "int8"}, marks=pytest.mark.slow
        ),
    ],
    ids=["default", "vinference", "xla_int8"],
)
def test_a_second_start_compiles_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    first = start(tmp_path, options)
    asked = "compile_requests_use_cache"
    assert first[asked] > first["programs"] > 4
    assert first.get("cache_hits", 0) < first[asked]
    entries = {path.name: path.stat().st_size for path in tmp_path.rglob("*-cache")}
    second = start(tmp_path, options)
    assert second["programs"] == first["programs"]
    assert second["ids"] == first["ids"]
    hits = second.get("cache_hits", 0)
    assert hits == second.get(asked, 0), "programs that were stored and not accepted"
    assert {path.name: path.stat().st_size for path in tmp_path.rglob("*-cache")} == entries
