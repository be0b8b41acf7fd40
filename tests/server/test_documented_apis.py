"""The page that compares the documented APIs with ours, with the class that serves over HTTP."""

from __future__ import annotations

from pathlib import Path

from tools.documented_apis import apis, page, unexplained

PAGE = Path(__file__).parents[2] / "docs" / "documented_apis.md"


def test_the_page_is_current_and_every_difference_has_a_reason() -> None:
    assert unexplained(apis()) == []
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(apis()), "run python tools/documented_apis.py docs/documented_apis.md"
