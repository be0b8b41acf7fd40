"""schemathesis on the server's own document: valid and wrong requests of every operation."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import KEY, program
from tests.server.process import ServerProcess

NUM_CASES = 2000
SEED = 20
EXAMPLES_EACH = 60
LIMIT_S = 120
"""Max seconds of an answer; a request may wait until a program is compiled."""


@pytest.fixture
def short() -> Iterator[ServerProcess]:
    """A server whose answers are short, also those without max_tokens."""
    flags = ("--warmup", "lazy", "--max-model-len", "64", "--lora-routes", "--max-loras", "1")
    with ServerProcess(*flags, environment={"ENGINEBAY_API_KEY": KEY}) as started:
        yield started


def test_every_answer_is_as_the_document_says(short: ServerProcess, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    # A document cannot say what goes together, so bodies that it allows may be refused.
    checks = ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
    limits = ["--request-timeout", f"{LIMIT_S}", "--max-response-time", f"{LIMIT_S}"]
    sizes = ["--seed", f"{SEED}", "--max-examples", f"{EXAMPLES_EACH}"]
    written = ["--report", "json", "--report-json-path", str(report), "--no-color"]
    done = subprocess.run(
        [
            program("schemathesis", "st"), "run", f"{short.url}/openapi.json",
            "--header", f"Authorization: Bearer {KEY}", "--continue-on-failure",
            *checks, *limits, *sizes, *written,
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    found = json.loads(report.read_text(encoding="utf-8"))
    operations = found["operations"]
    assert operations["total"] == operations["tested"] > 20
    assert found["test_cases"]["generated"] >= NUM_CASES
    ran = {name for name, phase in found["phases"].items() if phase["status"] == "success"}
    assert ran == {"examples", "coverage", "fuzzing", "stateful"}
    assert not [line for line in short.errors if "Traceback" in line]
