"""Pages and tables that the site makes; pages link to the data of the pages that are made."""

from __future__ import annotations

import re

import pytest

from tools.generated_pages import LINK, PAGES, ROOT, link_pages
from tools.reference_tables import MARK, TABLES, with_tables

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


def without_code(line: str) -> str:
    return re.sub(r"`[^`]*`|\\\|", "", line)


def test_every_table_of_a_page_is_made_and_a_name_that_is_unknown_is_refused() -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))]
    shown = {name for text in pages for name in MARK.findall(text)}
    assert shown >= TABLES.keys()
    for name in sorted(shown):
        lines = with_tables(f"before\n\n<!-- table: {name} -->\n\nafter").splitlines()
        rows = [line.count("|") for line in map(without_code, lines) if line.startswith("|")]
        assert len(rows) > 2
        assert len(set(rows)) == 1
    with pytest.raises(KeyError):
        with_tables("<!-- table: colours -->")
