"""The pages of the site that are made from data while the site is built. The repository has the
data in their place, and its pages link to the data; on the site these links lead to the made pages.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from tools import documented_apis, promises, support_page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """A page with the path of its data in the repository, and the function that makes its text."""

    data: str
    make: Callable[[], str]


def support() -> str:
    """Return the text of the support matrix."""
    parts = json.loads((ROOT / "docs" / "support.json").read_text(encoding="utf-8"))
    return support_page.page(parts)


def documented() -> str:
    """Return the text of the comparison with the documented APIs."""
    data = documented_apis.apis()
    if wrong := documented_apis.unexplained(data):  # or packages that this environment lacks
        raise ValueError("documented_apis.md cannot be made:\n" + "\n".join(wrong))
    return documented_apis.page(data)


PAGES = {
    "promises.md": Generated("tests/promises.toml", lambda: promises.page(promises.promises())),
    "support.md": Generated("docs/support.json", support),
    "documented_apis.md": Generated("tools/documented_apis.toml", documented),
}


def link_pages(markdown: str, name: str) -> str:
    """Return the text of the page `name` with links to generated pages in place of their data."""
    folder = posixpath.dirname(posixpath.join("docs", name))
    made = {one.data: posixpath.join("docs", page) for page, one in PAGES.items()}

    def link(found: re.Match[str]) -> str:
        there = made.get(posixpath.normpath(posixpath.join(folder, found[1])))
        return f"]({posixpath.relpath(there, folder)})" if there else found[0]

    return LINK.sub(link, markdown)
