"""The row table of an engine: what it takes, what it keeps for each request, and the batch it makes
of them.
"""

from __future__ import annotations

from enginebay.rows.batch import DecodeRowInfo, ModelRunBatch
from enginebay.rows.buffer import SequenceBuffer, append_step
from enginebay.rows.page_table import PageTable
from enginebay.rows.requests import DocumentedRequest
from enginebay.rows.sparse import SparseParams

__all__ = [
    "DecodeRowInfo",
    "DocumentedRequest",
    "ModelRunBatch",
    "PageTable",
    "SequenceBuffer",
    "SparseParams",
    "append_step",
]
