"""html_table: a table as HTML, for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a title for each column, and a row of texts for each of `rows`, whose
    spaces and line ends are kept.
    """
    lines = ["".join(f"<th>{html.escape(title)}</th>" for title in head)]
    lines += ["".join(f"<td>{html_text(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def html_text(text: str) -> str:
    """Return a text as HTML that keeps its spaces and line ends."""
    if text == " ".join(text.split()):
        return html.escape(text)
    return f'<span style="white-space:pre-wrap">{html.escape(text)}</span>'
