"""The table of sampling parameters is the one that the fields of SamplingParams make."""

from __future__ import annotations

from pathlib import Path

from tools.sampling_page import END, written

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"


def test_the_table_is_what_the_fields_make() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert END in text
    assert written(text) == text, "run python tools/sampling_page.py docs/sampling.md"
