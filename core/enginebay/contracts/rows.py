"""The contract of an engine's row table, which the loop fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from enginebay.types import Request


class EngineRows(Protocol):
    """The host's table of an engine's rows. The first axis of an array is the row; a free row holds
    zeros. The usual class is `enginebay_runtime.rows.RowTable`.

    token_ids: int32 [rows, max_model_len], prompt and output. num_tokens: int32 [rows], prompt and
    output tokens. num_computed_tokens: int32 [rows], tokens that are in the cache.
    """

    vocab_size: int
    page_sizes: list[int]
    """The page size of each cache group."""
    token_ids: np.ndarray
    num_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    adapters: np.ndarray
    """int32 [rows]: the place of each row's adapter; 0 for a row without one."""

    @property
    def num_reqs(self) -> int:
        """Number of rows that hold a request."""

    def add_request(self, request: Request) -> int:
        """Put a request with its prompt into the lowest free row, and return the row."""

    def append_tokens(self, row: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append output tokens to a taken row. InputError, and no change, when the row would exceed
        max_model_len.
        """

    def append_step(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """Append the first counts[i] tokens of token_ids[i] to row rows[i]: rows int [n], all
        different, and token_ids int32 [n, steps].
        """

    def remove_request(self, req_id: str) -> int | None:
        """Free the row of a request. Returns the row, or None for an unknown id."""

    def clear(self) -> None:
        """Free all rows."""
