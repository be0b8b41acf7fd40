"""Pages that the site makes from data: their links lead somewhere, and pages link to their data."""

from __future__ import annotations

import re

import pytest

from tools.generated_pages import LINK, PAGES, ROOT, link_pages

DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_has_its_data_and_a_place_in_the_site(name: str) -> None:
    assert (ROOT / PAGES[name].data).is_file()
    assert not (DOCS / name).exists(), f"docs/{name} is made from {PAGES[name].data}"
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(rf"^ +- .+: {re.escape(name)}$", navigation, re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in PAGES if name != "documented_apis.md"])
def test_links_of_a_generated_page_lead_somewhere(name: str) -> None:
    """Those of documented_apis.md are in its data, and tests/docs/test_documented_apis.py."""
    text = PAGES[name].make()
    assert text.startswith("# ")
    assert not [to for to in LINK.findall(text) if not (DOCS / to).exists() and to not in PAGES]


@pytest.mark.parametrize(
    ("name", "data", "page"),
    [
        ("testing.md", "../tests/promises.toml", "promises.md"),
        ("paths/operator.md", "../../tests/promises.toml", "../promises.md"),
        ("supported.md", "support.json", "support.md"),
        ("decisions/index.md", "../support.json", "../support.md"),
        ("supported.md", "../tests/zoo", "../tests/zoo"),
        ("supported.md", "https://example.org/support.json", "https://example.org/support.json"),
    ],
)
def test_a_link_to_the_data_leads_to_the_page_on_the_site(name: str, data: str, page: str) -> None:
    text = "[it]({}) and [more](quickstart.md#install)."
    assert link_pages(text.format(data), name) == text.format(page)
