"""A process whose memory maps are used up compiles nothing, and lives."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import CompilationError
from enginebay_runtime import memory_maps
from tests.brief import BRIEF
from tests.unit.serving import SIZES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux limits memory maps")

PARAMS = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A limit of 100 maps, until it is undone."""
    limit = tmp_path / "max_map_count"
    limit.write_text("100\n")
    monkeypatch.setattr(memory_maps, "LIMIT", limit)
    return monkeypatch


def test_a_request_that_needs_a_program_ends_with_the_reason_and_the_next_one_is_served(
    few: pytest.MonkeyPatch,
) -> None:
    with LLM(BRIEF, engine="oengine", **SIZES) as llm:
        reason = r"this process has \d+ memory maps.* at most 90\. .*vm\.max_map_count=400"
        with pytest.raises(CompilationError, match=reason):
            llm.generate("Once upon a time", PARAMS)
        few.undo()
        assert len(llm.generate("Once upon a time", PARAMS)[0].outputs[0].token_ids) == 4


def test_the_maps_that_there_are_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_maps.require_maps("a step")
    monkeypatch.setattr(memory_maps, "SHARE", 0.0)
    with pytest.raises(CompilationError, match=r"a step is not compiled") as raised:
        memory_maps.require_maps("a step")
    found = re.search(r"has (\d+) memory maps", str(raised.value))
    assert found
    assert 50 < int(found[1]) < 10**6


def test_where_no_limit_is_told_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_maps, "LIMIT", tmp_path / "none")
    monkeypatch.setattr(memory_maps, "SHARE", 0.0)
    memory_maps.require_maps("a step")
