"""A table whose rows are printed as they arrive; column widths are fixed in advance."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class Rows:
    """Prints the titles before the first row. `widths` are the minimum widths of the first columns;
    a longer cell shifts the rest of its row to the right.
    """

    titles: Sequence[str]
    widths: Sequence[int] = ()
    is_begun: bool = False

    def add(self, cells: Sequence[str]) -> None:
        """Print a row at once."""
        if not self.is_begun:
            self.is_begun = True
            self._print(self.titles)
        self._print(cells)

    def _print(self, cells: Sequence[str]) -> None:
        widths = [*self.widths, *(0 for _ in cells[len(self.widths) :])]
        least = [max(width, len(title)) for width, title in zip(widths, self.titles, strict=True)]
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, least, strict=True))
        print(line.rstrip(), flush=True)
