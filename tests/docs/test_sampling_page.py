"""The tables of sampling parameters are those that the fields of SamplingParams make."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.sampling_page import END, written

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "title"), [("sampling.md", "sampling parameters"), ("commands.md", "sampling flags")]
)
def test_the_table_is_what_the_fields_make(page: str, title: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert END.format(title) in text
    assert written(text) == text, (
        "run python tools/sampling_page.py docs/sampling.md docs/commands.md"
    )
