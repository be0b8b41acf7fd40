"""The documented example of the row table, and the batches that it prepares."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import numpy as np
import pytest

import enginebay_oengine
from enginebay.types import SamplingParams
from enginebay_oengine.sequence_buffer import SequenceBuffer
from tests.unit.rowtable import VOCAB, make_table

pytestmark = pytest.mark.usefixtures("row_tables")


def test_documented_example_runs() -> None:  # holds B02
    buffer = enginebay_oengine.SequenceBuffer(
        max_num_reqs=32,
        max_model_len=2048,
        max_num_batched_tokens=4096,
        vocab_size=50000,
        page_sizes=[16, 32],
    )
    assert buffer.begin_sequence("req_1", [1, 2, 3]) is None
    batch = buffer.prepare_batch()
    assert isinstance(batch, enginebay_oengine.ModelRunBatch)
    assert batch.req_ids == ("req_1",)
    assert batch.token_ids.tolist() == [1, 2, 3]
    results = doctest.testmod(importlib.import_module("enginebay_oengine.sequence_buffer"))
    assert (results.failed, results.attempted) == (0, 4)


def test_sequences_begin_like_requests_with_these_parameters() -> None:  # holds B02
    table = make_table()
    table.begin_sequence("a", np.array([1, 2]), SamplingParams(temperature=0.5))
    assert table.temperature[0] == 0.5
    with pytest.raises(ValueError, match="request id 'a'"):
        table.begin_sequence("a", [1])


def test_batch_has_decoding_rows_first_and_then_prompts() -> None:  # holds B02
    table = make_table()
    table.begin_sequence("prompt", [11, 12, 13])
    table.begin_sequence("decoding", [21, 22])
    table.append_tokens(1, [23, 24])
    table.num_computed_tokens[1] = 3
    table.begin_sequence("computed", [31])
    table.num_computed_tokens[2] = 1
    table.begin_sequence(
        "cached", [41, 42]
    )  # all but the last token of its prompt was found in the cache
    table.num_computed_tokens[3] = 1
    for pages in table.page_tables:
        pages.append(1, [5, 6])
    batch = table.prepare_batch()
    assert batch.req_ids == ("decoding", "prompt", "cached")
    assert batch.rows.tolist() == [1, 0, 3]
    assert batch.query_lens.tolist() == [1, 3, 1]
    assert batch.kv_lens.tolist() == [4, 3, 2]
    assert batch.token_ids.tolist() == [24, 11, 12, 13, 42]
    assert batch.positions.tolist() == [3, 0, 1, 2, 1]
    assert [pages[0, :3].tolist() for pages in batch.page_ids] == [[5, 6, 0]] * 2
    assert (batch.num_rows, batch.num_tokens) == (3, 5)
    info = enginebay_oengine.DecodeRowInfo(
        1, "decoding", token_id=24, position=3, num_output_tokens=2
    )
    assert batch.decode_rows == (info,)
    arrays = (
        batch.rows,
        batch.query_lens,
        batch.kv_lens,
        batch.token_ids,
        batch.positions,
        *batch.page_ids,
    )
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


def test_batch_is_a_copy_and_leaves_the_table_alone() -> None:
    table = make_table()
    table.begin_sequence("a", [1, 2])
    batch = table.prepare_batch()
    assert table.num_computed_tokens[0] == 0
    table.clear()
    assert batch.token_ids.tolist() == [1, 2]
    empty = table.prepare_batch()
    assert (empty.num_rows, empty.num_tokens, empty.req_ids) == (0, 0, ())


def test_batch_keeps_to_its_size_and_the_rest_comes_next() -> None:
    table = SequenceBuffer(4, 12, 5, VOCAB, [4])
    table.begin_sequence("a", [1, 2, 3, 4])
    table.begin_sequence("b", [5, 6, 7, 8])
    table.begin_sequence("c", [9])
    seen = []
    for _ in range(3):
        batch = table.prepare_batch()
        seen.append(dict(zip(batch.req_ids, batch.query_lens.tolist(), strict=True)))
        table.num_computed_tokens[batch.rows] = batch.kv_lens
    assert seen == [{"a": 4, "b": 1}, {"b": 3, "c": 1}, {}]


def test_documented_names_are_at_the_top_and_import_jax_when_asked_for() -> None:
    assert {
        name for name in enginebay_oengine.__all__ if getattr(enginebay_oengine, name) is None
    } == set()
    assert enginebay_oengine.SequenceBuffer is SequenceBuffer
    with pytest.raises(AttributeError, match="no attribute 'begin_sequence'"):
        enginebay_oengine.begin_sequence  # noqa: B018
    code = "import sys, enginebay_oengine, enginebay_runtime.rows; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
