"""Hooks of mkdocs: makes pages and tables from data, and changes pages where the site must differ
from the repository.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[1]))  # mkdocs is started from its own folder

from tools.generated_pages import PAGES, link_pages
from tools.reference_tables import with_tables

FENCE = re.compile(r"^```(\w+) [^\n`]+$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:tests|README|CONTRIBUTING|tools|deploy)[^)]*\)")


def on_files(files: Files, config: MkDocsConfig, **_: object) -> None:
    """Add the pages that are made from data."""
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page.make()))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Keep only the language of code blocks ("sh run" becomes "sh"), add the tables that are made
    from code, let links to data lead to the pages that are made from it, and turn links to files
    that are not on the site into text.
    """
    if page.file.src_uri not in PAGES:
        markdown = link_pages(with_tables(markdown), page.file.src_uri)
    return OUTSIDE.sub(r"\1", FENCE.sub(r"```\1", markdown))
