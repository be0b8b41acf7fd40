"""The contiguous engine: every row has one slot, whose size doubles as it fills."""

from __future__ import annotations

from typing import TypeGuard

from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.engine import AttentionProblem, Engine
from enginebay.contracts.executor import EngineParts, make_layouts
from enginebay_contiguous.ledger import SlotLedger
from enginebay_contiguous.slot_sizes import slot_shape, slot_sizes
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.rows.make import make_row_table

ContiguousEngine = StepEngine
"""The class of an engine that make_engine returns; `is_contiguous` tells such an engine."""


class VInferenceOptions(BaseModel):
    """Options of the contiguous engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_size: int = Field(
        default=64,
        ge=8,
        le=1024,
        description="tokens per page, for layouts in which a row has several pages",
    )
    grow: bool = Field(
        default=True,
        description="start with small slots and double their size when needed; "
        "False allocates full-size slots at once",
    )


def make_engine(parts: EngineParts, options: VInferenceOptions) -> ContiguousEngine:
    """Make a contiguous engine from these parts."""
    config, info = parts.config, parts.model.info
    assert config.max_model_len is not None, "the composition root resolves max_model_len"
    rows = make_row_table(parts, config.max_model_len)
    groups, states = ([g.name for g in each] for each in (info.groups, info.states))
    sizes_of_rows = config.max_num_seqs, config.max_model_len
    ledger = SlotLedger(*sizes_of_rows, groups, rows.page_tables, states)
    sizes = slot_sizes(parts, options.page_size, grow=options.grow)
    return StepEngine(parts, rows, ledger, sizes)


def is_contiguous(engine: Engine) -> TypeGuard[ContiguousEngine]:
    """Return whether an engine is a contiguous engine."""
    return isinstance(engine, StepEngine) and isinstance(engine.ledger, SlotLedger)


def attention_problems(parts: EngineParts, options: VInferenceOptions) -> list[AttentionProblem]:
    """Return the attention problems of an engine of these parts, for every length that its slots
    can have.
    """
    sizes = slot_sizes(parts, options.page_size)
    num_slots, lengths = sizes.steps.decode_rows[-1], sizes.steps.kv_lens
    found: list[AttentionProblem] = []
    for length in lengths if options.grow else lengths[-1:]:
        shape = slot_shape(num_slots, length, sizes.page_size)
        shapes = {group.name: shape for group in parts.info.groups}
        layouts = make_layouts(parts.info.attention, parts.layout_type, shapes)
        geometry = sizes.geometry(shapes)
        found += geometry.problems(layouts, drafts_are_rows=parts.drafts_are_rows)
    return found
