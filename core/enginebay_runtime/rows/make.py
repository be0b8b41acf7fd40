"""Makes the row table of an engine."""

from __future__ import annotations

from enginebay.contracts.executor import EngineParts
from enginebay_runtime.rows.table import RowTable


def make_row_table(parts: EngineParts, page_size: int) -> RowTable:
    """Make the empty row table of an engine. Groups with keys and values have pages of `page_size`
    tokens, groups with a state one page per row.
    """
    config, info = parts.config, parts.model.info
    assert config.max_model_len is not None, "the composition root resolves max_model_len"
    return RowTable(
        max_num_reqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=info.vocab_size,
        page_sizes=[page_size] * len(info.groups) + [config.max_model_len] * len(info.states),
    )
