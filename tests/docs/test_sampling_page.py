"""The table of sampling parameters is the one that the fields of SamplingParams make."""

from __future__ import annotations

from pathlib import Path

from tools.reference_tables import with_tables
from tools.sampling_page import parameters

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"


def test_the_table_is_what_the_fields_make() -> None:
    text = with_tables(PAGE.read_text(encoding="utf-8"))
    assert "\n".join(parameters()) in text
