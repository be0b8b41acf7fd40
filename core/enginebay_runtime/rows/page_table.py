"""PageTable: the pages of every row in one cache group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay.errors import InputError


class PageTable:
    """The page ids of each row. Entries after a row's last page, and all entries of a free row, are
    zeros.

    Columns (NumPy, first axis is the row)::

        page_ids   int32 [max_num_reqs, max_pages_per_req]   in the order of the tokens
        num_pages  int32 [max_num_reqs]

    The engine's ledger writes the pages that it leases to a row. The RowTable frees a row together
    with its request.
    """

    def __init__(self, max_num_reqs: int, max_pages_per_req: int, page_size: int) -> None:
        self.page_size = page_size
        self.page_ids = np.zeros((max_num_reqs, max_pages_per_req), np.int32)
        self.num_pages = np.zeros(max_num_reqs, np.int32)

    @property
    def max_pages_per_req(self) -> int:
        """Max number of pages of a row."""
        return self.page_ids.shape[1]

    def append(self, row: int, page_ids: Sequence[int] | np.ndarray) -> None:
        """Add pages to a row. InputError, and no change, when they do not fit."""
        start = int(self.num_pages[row])
        if start + len(page_ids) > self.page_ids.shape[1]:
            self.check_memory(start + len(page_ids))
        self.page_ids[row, start : start + len(page_ids)] = page_ids
        self.num_pages[row] = start + len(page_ids)

    def check_memory(self, num_pages: int) -> None:
        """Raise InputError when a row cannot have `num_pages` pages."""
        if num_pages > self.max_pages_per_req:
            raise InputError(
                f"{num_pages} pages of {self.page_size} tokens for one row",
                f"{self.max_pages_per_req}, the number that max_model_len needs",
                "Raise --max-model-len, or give the row fewer pages.",
            )

    def reset(self, row: int) -> None:
        """Remove all pages of a row."""
        self.page_ids[row] = 0
        self.num_pages[row] = 0
