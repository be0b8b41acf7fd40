"""Hooks of mkdocs: what differs between a page in the repository and on the site."""

from __future__ import annotations

import re

FENCE = re.compile(r"^```(\w+) [^\n`]+$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:tests|README|CONTRIBUTING|tools)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Code blocks keep their language alone ("sh run" is "sh"), and links to files that are in the
    repository but not on the site become text.
    """
    return OUTSIDE.sub(r"\1", FENCE.sub(r"```\1", markdown))
