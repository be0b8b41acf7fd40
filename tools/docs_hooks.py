"""Hooks of mkdocs: changes pages where the site must differ from the repository."""

from __future__ import annotations

import re

FENCE = re.compile(r"^```(\w+) [^\n`]+$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:tests|README|CONTRIBUTING|tools)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Keep only the language of code blocks ("sh run" becomes "sh"), and turn links to files that
    are not on the site into text.
    """
    return OUTSIDE.sub(r"\1", FENCE.sub(r"```\1", markdown))
