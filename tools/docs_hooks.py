"""Hooks of mkdocs: changes pages where the site must differ from the repository."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.pages import Page

FENCE = re.compile(r"^```(\w+) [^\n`]+$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:tests|README|CONTRIBUTING|tools)[^)]*\)")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Keep only the language of code blocks ("sh run" becomes "sh"), turn links to files that are
    not on the site into text, and add the list of decisions to the page of decisions.
    """
    if page.file.src_uri == "decisions/index.md":
        folder = Path(page.file.abs_src_path or "").parent
        titles = [(p.name, p.read_text().splitlines()[0]) for p in sorted(folder.glob("0*.md"))]
        markdown += "".join(f"\n- [{title.lstrip('# ')}]({name})" for name, title in titles)
    return OUTSIDE.sub(r"\1", FENCE.sub(r"```\1", markdown))
