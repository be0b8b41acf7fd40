"""PageTable, the pages of every row in one cache group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginebay.errors import InputError


class PageTable:
    """Page ids by row; a free row, and a row from its num_pages on, holds zeros.

    Columns (NumPy, first axis is the row)::

        page_ids   int32 [max_num_reqs, max_pages_per_req]   in the order of the tokens
        num_pages  int32 [max_num_reqs]

    The ledger of an engine writes the rows that it promises pages to; a row is freed with its
    request, by the RowTable that the table belongs to.
    """

    def __init__(self, max_num_reqs: int, max_pages_per_req: int, page_size: int) -> None:
        self.page_size = page_size
        self.page_ids = np.zeros((max_num_reqs, max_pages_per_req), np.int32)
        self.num_pages = np.zeros(max_num_reqs, np.int32)

    @property
    def max_pages_per_req(self) -> int:
        """How many pages a row can have."""
        return self.page_ids.shape[1]

    def append(self, row: int, page_ids: Sequence[int] | np.ndarray) -> None:
        """Add pages to a row. InputError when they are more than fit; then none is added."""
        start = int(self.num_pages[row])
        self.check_fits(start + len(page_ids))
        self.page_ids[row, start : start + len(page_ids)] = page_ids
        self.num_pages[row] = start + len(page_ids)

    def check_fits(self, num_pages: int) -> None:
        """InputError when a row cannot have so many pages."""
        if num_pages > self.max_pages_per_req:
            raise InputError(
                f"{num_pages} pages of {self.page_size} tokens for one row",
                f"{self.max_pages_per_req}, as many as max_model_len needs",
                "Give the row no pages beyond its context.",
            )

    def reset(self, row: int) -> None:
        """Take all pages off a row."""
        self.page_ids[row] = 0
        self.num_pages[row] = 0

    def exchange(self, i1: int, i2: int) -> None:
        """Exchange the pages of two rows."""
        pair, other = [i1, i2], [i2, i1]
        self.page_ids[pair] = self.page_ids[other]
        self.num_pages[pair] = self.num_pages[other]
