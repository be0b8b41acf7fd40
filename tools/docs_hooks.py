"""Hooks of mkdocs: what differs between a page in the repository and on the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.pages import Page

FENCE = re.compile(r"^```(\w+) [^\n`]+$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:tests|README|CONTRIBUTING|tools)[^)]*\)")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Code blocks keep their language alone ("sh run" is "sh"), links to files that are in the
    repository but not on the site become text, and the page of decisions lists them.
    """
    if page.file.src_uri == "decisions/index.md":
        folder = Path(page.file.abs_src_path or "").parent
        titles = [(p.name, p.read_text().splitlines()[0]) for p in sorted(folder.glob("0*.md"))]
        markdown += "".join(f"\n- [{title.lstrip('# ')}]({name})" for name, title in titles)
    return OUTSIDE.sub(r"\1", FENCE.sub(r"```\1", markdown))
