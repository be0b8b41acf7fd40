"""The row table of an engine: tokens, counts and pages of the running requests."""

from __future__ import annotations

from enginebay_runtime.rows.page_table import PageTable
from enginebay_runtime.rows.table import RowTable

__all__ = ["PageTable", "RowTable"]
