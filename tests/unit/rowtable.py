"""Requests for tests of the row table, and what a row must hold of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from enginebay.types import MAX_STOP_TOKENS, FrozenSampling, Request, SamplingParams
from enginebay_oengine import SequenceBuffer
from enginebay_oengine.documented_rows import SparseParams
from enginebay_paged.lease_records import GroupPages
from enginebay_paged.ledger import PageLedger
from enginebay_paged.pool import PagePool
from enginebay_paged.store import PageStore
from enginebay_runtime.rows import RowTable
from enginebay_testing.driver import RequestDriver, request_of
from tests.fake_engine import FakeEngine

ROWS, LENGTH, VOCAB = 5, 12, 100
PAGE_SIZES = [4, 3]


@dataclasses.dataclass(frozen=True)
class RichSampling(FrozenSampling):
    """Sampling parameters with the rare ones."""

    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int = 0
    bad_words_token_ids: list[list[int]] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """A record as users of the documented API make it."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: object = None
    page_ids: object = None
    output_token_ids: tuple[int, ...] = ()


def make_sampling(number: int = 0) -> RichSampling:
    """Parameters that differ by number in every field; 0 asks for nothing."""
    return RichSampling(
        4,
        SamplingParams(
            temperature=0.25 * number,
            top_k=number,
            top_p=1.0 - number / 16,
            min_p=number / 32,
            presence_penalty=number / 8,
            frequency_penalty=-number / 8,
            repetition_penalty=1.0 + number / 4,
        ),
        stop_token_ids=tuple(range(number % 4)),
        num_logprobs=number or None,
        logit_bias={number: -float(number)} if number else None,
        allowed_token_ids=[number, number + 1] if number else None,
        min_tokens=number,
        bad_words_token_ids=[[number], [1, number]] if number else None,
        logprobs=number or None,
        prompt_logprobs=number or None,
    )


def with_fields(sampling: RichSampling, **fields: Any) -> RichSampling:
    """`sampling` with other fields of RichSampling or of SamplingParams."""
    own = {field.name for field in dataclasses.fields(RichSampling)}
    params = sampling.params.model_copy(update={n: v for n, v in fields.items() if n not in own})
    others = {name: value for name, value in fields.items() if name in own}
    return dataclasses.replace(sampling, params=params, **others)


def make_request(name: str, prompt: list[int], number: int = 0) -> Request:
    return Request(
        name,
        np.asarray(prompt, np.int32),
        make_sampling(number),
        key=(number, 2**32 - 1 - number),
        arrival_s=0.0,
    )


def make_table() -> SequenceBuffer:
    """An empty table; see the fixture `row_tables` for whose it is."""
    return new_table()


def new_table() -> SequenceBuffer:
    """A table of its own."""
    return SequenceBuffer(
        max_num_reqs=ROWS,
        max_model_len=LENGTH,
        max_num_batched_tokens=64,
        vocab_size=VOCAB,
        page_sizes=PAGE_SIZES,
    )


@functools.cache
def served_tables() -> Iterator[SequenceBuffer]:
    """Tables of three engines that have served a request, in turn: views, emptied before
    each use.
    """

    def turns() -> Iterator[SequenceBuffer]:
        for engine in itertools.cycle([working_engine() for _ in range(3)]):
            table = SequenceBuffer.of(engine.rows)
            table.clear()
            table.token_ids[:] = 0  # tests write beyond a row's tokens too
            yield table

    return turns()


def working_engine() -> FakeEngine:
    """An engine of the documented tests' sizes that has served a request, and serves another."""
    rows = RowTable(ROWS, LENGTH, 64, VOCAB, PAGE_SIZES)
    pages = GroupPages(PageStore(PagePool(ROWS * LENGTH)), rows.page_tables[0])
    ledger = PageLedger({"full": pages}, ROWS, LENGTH)
    engine = FakeEngine(rows, ledger, {"full": ROWS * LENGTH})
    engine.make_arrays()
    params = SamplingParams(max_tokens=3, temperature=0.5, logprobs=1)
    for name in ("ended", "runs"):
        driver = RequestDriver(engine, request_of([5, 6, 7], params, name))
        assert len(driver.prefill() + driver.decode(2)) == 3
        if name == "ended":
            driver.close()
    return engine


def penalties(table: SequenceBuffer, row: int) -> tuple[float, float, float]:
    return (
        table.frequency_penalties[row],
        table.presence_penalties[row],
        table.repetition_penalties[row],
    )


def pages_of(table: SequenceBuffer, row: int) -> list[list[int]]:
    """The pages of a row in each group, where the table behind them must be empty."""
    found = []
    for pages in table.page_tables:
        count = int(pages.num_pages[row])
        assert not pages.page_ids[row, count:].any()
        found.append(pages.page_ids[row, :count].tolist())
    return found


def assert_row_is_free(table: SequenceBuffer, row: int) -> None:
    assert not table.token_ids[row].any()
    assert (
        table.num_tokens[row],
        table.num_prompt_tokens[row],
        table.num_computed_tokens[row],
    ) == (0, 0, 0)
    got = (table.temperature[row], table.top_p[row], table.min_p[row], table.top_k[row])
    assert got == (0.0, 1.0, 0.0, 0)
    assert penalties(table, row) == (0.0, 0.0, 1.0)
    assert (table.stop_token_ids[row] == -1).all()
    assert not table.keys[row].any()
    assert (table.returns_logprobs[row], table.variants[row]) == (False, 0)
    assert pages_of(table, row) == [[], []]
    assert table.sparse[row] == SparseParams()
    assert table.get_active_sampling_params(row) == {}


def assert_row_holds(table: SequenceBuffer, row: int, request: Request, output: list[int]) -> None:
    tokens = [*request.prompt_token_ids[:LENGTH], *output]
    assert table.request(row) is request
    assert table.token_ids[row].tolist() == tokens + [0] * (LENGTH - len(tokens))
    assert (table.num_tokens[row], table.num_prompt_tokens[row]) == (
        len(tokens),
        len(tokens) - len(output),
    )
    sampling, params = request.sampling, request.sampling.params
    got = (table.temperature[row], table.top_p[row], table.min_p[row], table.top_k[row])
    assert got == (params.temperature, params.top_p, params.min_p, params.top_k)
    wanted = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    assert penalties(table, row) == wanted
    stops = list(sampling.stop_token_ids)
    assert table.stop_token_ids[row].tolist() == stops + [-1] * (MAX_STOP_TOKENS - len(stops))
    assert tuple(table.keys[row].tolist()) == request.key
    expected = (sampling.num_logprobs is not None, sampling.variant)
    assert (table.returns_logprobs[row], table.variants[row]) == expected
    assert isinstance(sampling, RichSampling)
    sparse = table.sparse[row]
    assert sparse.logit_bias == (sampling.logit_bias or {})
    assert list(sparse.allowed_token_ids or ()) == (sampling.allowed_token_ids or [])
    assert [list(word) for word in sparse.bad_words_token_ids] == (
        sampling.bad_words_token_ids or []
    )
    counts = (sparse.min_tokens, sparse.num_logprobs, sparse.num_prompt_logprobs)
    assert counts == (sampling.min_tokens, sampling.logprobs, sampling.prompt_logprobs)
