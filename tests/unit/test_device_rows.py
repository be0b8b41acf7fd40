"""Rows on the device: the history of tokens that penalties count, however a row comes to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from enginebay import LLM
from enginebay.contracts.cache import Lease
from enginebay.contracts.engine import RowPlan
from enginebay.errors import CompilationError, InputError
from enginebay.ops.sampling import position_keys
from enginebay.types import MAX_STOP_TOKENS, SamplingParams
from enginebay_runtime.assemble import prefill_writes
from enginebay_runtime.device import COLUMNS, DeviceRows, write_history
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.rows import RowTable
from enginebay_runtime.verify import _at_every_position, advance_guessed
from enginebay_testing.driver import RequestDriver, request_of
from enginebay_testing.subject import penalty_params
from tests.brief import LEAST
from tests.pool import few_sizes
from tests.unit.serving import SIZES

ROWS, LENGTH = 4, 12
MANY = 10**6
WHOLE_PROMPTS = SIZES | {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "processors": (),
}
PROMPT = [int(t) for t in np.random.default_rng(3).integers(4, 96, 40)]

EMPTY = jax.jit(DeviceRows.empty, static_argnums=(0, 1))
TAKE = jax.jit(DeviceRows.take, static_argnums=2)
PUT, RECORD, ADVANCED = (
    jax.jit(f) for f in (DeviceRows.put, DeviceRows.record, DeviceRows.advanced)
)
WRITE_HISTORY = jax.jit(write_history)


def some_rows() -> DeviceRows:
    empty = jax.tree.map(np.asarray, EMPTY(ROWS, LENGTH))
    penalty = np.asarray([1.5, 2.0, 1.0, 0.5], np.float32)
    return dataclasses.replace(
        empty,
        length=np.asarray([3, 5, 0, 7], np.int32),
        max_length=np.full(ROWS, LENGTH, np.int32),
        finished=np.asarray([False, True, True, False]),
        params=dataclasses.replace(empty.params, repetition_penalty=penalty),
        token_ids=np.arange(1, 1 + ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH),
    )


def int32(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def equal(first: DeviceRows, second: DeviceRows) -> bool:
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


def test_an_id_past_the_end_is_a_finished_row_that_changes_no_score() -> None:
    taken = TAKE(some_rows(), int32(3, ROWS), 5)
    past = jax.tree.map(lambda a: np.asarray(a)[1:], taken)
    assert equal(past, EMPTY(1, 5))
    assert np.array_equal(taken.token_ids[0], some_rows().token_ids[3, :5])
    assert taken.params.repetition_penalty[0] == 0.5


@pytest.mark.parametrize("num_tokens", [1, 5, LENGTH, MANY])
def test_rows_put_back_as_they_were_taken_change_nothing(num_tokens: int) -> None:
    ids = int32(2, 0, ROWS)
    rows = some_rows()
    taken = TAKE(rows, ids, num_tokens)
    assert taken.token_ids.shape == (3, min(num_tokens, LENGTH))
    assert equal(PUT(rows, ids, taken), rows)


def test_a_sampled_token_is_written_where_the_row_is_active() -> None:
    rows = some_rows()
    after = ADVANCED(rows, int32(91, 92, 93, 94), ~rows.finished)
    expected = np.array(rows.token_ids)
    expected[0, 3], expected[3, 7] = 91, 94
    assert np.array_equal(after.token_ids, expected)
    assert np.array_equal(after.length, [4, 5, 0, 8])


def test_a_row_is_finished_by_its_length_and_by_its_stop_tokens_alone() -> None:
    rows = dataclasses.replace(
        some_rows(),
        max_length=int32(4, 5, 9, 9),
        finished=np.zeros(ROWS, bool),
        stop_ids=np.full((ROWS, MAX_STOP_TOKENS), -1, np.int32),
    )
    rows.stop_ids[2, -1] = 93
    active = np.asarray([True, False, True, True])
    after = ADVANCED(rows, int32(91, 92, 93, 94), active)
    assert after.finished.tolist() == [True, False, True, False], (
        "at its length, not active, at a stop token, one token before its length"
    )


def test_a_row_takes_guessed_tokens_to_its_end_and_to_the_first_wrong_guess() -> None:
    rows = dataclasses.replace(
        some_rows(),
        max_length=int32(5, 9, 9, 12),
        finished=np.asarray([False, True, False, False]),
        stop_ids=np.full((ROWS, MAX_STOP_TOKENS), -1, np.int32),
    )
    rows.stop_ids[2, 0] = 93
    tokens = np.asarray([[91] * 3, [92] * 3, [93] * 3, [94] * 3], np.int32)
    guesses = tokens.copy()
    guesses[3, 1] = 1
    after, kept, holds = jax.jit(advance_guessed)(rows, guesses, tokens)
    assert kept.tolist() == [[91, 91, -1], [-1, -1, -1], [93, -1, -1], [94, 94, -1]]
    assert after.length.tolist() == [5, 5, 1, 9]
    assert not holds.any()


def test_guessed_tokens_are_drawn_with_the_keys_of_tokens_that_are_decoded_one_by_one() -> None:
    width, keys = 3, np.arange(2 * ROWS, dtype=np.uint32).reshape(ROWS, 2)
    rows = dataclasses.replace(some_rows(), keys=keys, token_ids=np.zeros((ROWS, 0), np.int32))

    def drawn_with(rows: DeviceRows) -> tuple[jax.Array, jax.Array]:
        state = rows.sampling_state()
        return jax.random.key_data(position_keys(state)), state.params.repetition_penalty

    @jax.jit
    def at_once(rows: DeviceRows) -> tuple[jax.Array, jax.Array]:
        return drawn_with(_at_every_position(rows, width))

    def one_by_one(rows: DeviceRows) -> Iterator[tuple[jax.Array, jax.Array]]:
        for _ in range(width):
            yield jax.jit(drawn_with)(rows)
            rows = ADVANCED(rows, int32(*[91] * ROWS), np.ones(ROWS, np.bool_))

    for place, expected in enumerate(one_by_one(rows)):
        for found, wanted in zip(at_once(rows), expected, strict=True):
            np.testing.assert_array_equal(found[place::width], wanted)


def test_tokens_are_recorded_by_row_and_position_and_padding_is_dropped() -> None:
    rows = some_rows()
    where = int32(2, 2, 0, ROWS), int32(4, 5, 11, 0)
    expected = np.array(rows.token_ids)
    expected[2, 4:6], expected[0, 11] = (70, 71), 72
    after = RECORD(rows, *where, int32(70, 71, 72, 73))
    assert np.array_equal(after.token_ids, expected)
    expected[1] = np.arange(LENGTH)
    assert np.array_equal(WRITE_HISTORY(after, 1, int32(*range(LENGTH))).token_ids, expected)


@pytest.mark.parametrize(
    ("params", "start", "num_cached", "known"),
    [
        (penalty_params(), 6, 6, True),
        (penalty_params(), 9, 6, False),
        (penalty_params(), 0, 0, False),
        (penalty_params(), 3, 0, False),
        (SamplingParams(), 6, 6, False),
    ],
    ids=[
        "first chunk",
        "later chunk",
        "nothing cached",
        "later chunk of a whole prompt",
        "no penalties",
    ],
)
def test_cached_tokens_are_sent_with_the_first_chunk_of_rows_that_count_them(
    params: SamplingParams, start: int, num_cached: int, known: bool
) -> None:
    table = RowTable(ROWS, 64, 64, 2048, [64])
    table.add_request(request_of(PROMPT, params), 2)
    lease = Lease(row=2, capacity=64, num_cached=num_cached)
    writes = prefill_writes([RowPlan(2, lease, start, 4, samples=False)], table)
    assert [(one.row, one.token_ids.tolist()) for one in writes.known] == (
        [(2, PROMPT[:num_cached])] if known else []
    )


def history_after_a_hit(engine: StepEngine, params: SamplingParams, num_cached: int) -> list[int]:
    """A row's tokens on the device, of a request that found its first ones in the cache, where
    others' had been.
    """
    first = RequestDriver(engine, request_of(PROMPT, SamplingParams(max_tokens=1)))
    first.prefill()
    first.close()
    rows = engine.executor.arrays().rows
    others = dataclasses.replace(rows, token_ids=jax.device_put(np.asarray(rows.token_ids) + 1))
    engine.executor.state = dataclasses.replace(engine.executor.arrays(), rows=others)
    second = RequestDriver(engine, request_of(PROMPT, params))
    second.lease.num_cached = second.num_computed = num_cached
    assert second.row == first.row
    tokens = second.prefill() + second.decode(4) + second.decode(4)
    history = np.asarray(engine.executor.arrays().rows.token_ids)[
        second.row, : len(PROMPT) + len(tokens)
    ].tolist()
    assert history[-len(tokens) :] == tokens
    second.close()
    return history


@dataclasses.dataclass
class Warm:
    """An engine after warmup(), how many programs that compiled, and the error of a step
    before it.
    """

    llm: LLM
    num_programs: int
    error: pytest.ExceptionInfo[CompilationError]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with few_sizes(), LLM(LEAST, **WHOLE_PROMPTS) as llm:

        def without_warmup() -> pytest.ExceptionInfo[CompilationError]:
            llm.engine.compilations.forbidden = True
            driver = RequestDriver(llm.engine, request_of(PROMPT, penalty_params()))
            driver.lease.num_cached = driver.num_computed = 24
            with pytest.raises(CompilationError) as error:
                driver.prefill()
            driver.close()
            return error

        error = llm.run_on_engine(without_warmup)
        yield Warm(llm, llm.warmup(), error)


@pytest.mark.long
def test_a_prompt_that_was_cached_is_counted_all_the_same(warm: Warm) -> None:
    for kind in (0, 1, 3):
        params = penalty_params(16, kind)
        whole, hit = (
            warm.llm.run_on_engine(lambda n=n, p=params: history_after_a_hit(warm.llm.engine, p, n))
            for n in (0, 24)
        )
        assert len(whole) == len(PROMPT) + 9
        assert whole[: len(PROMPT)] == PROMPT
        assert hit == whole


@pytest.mark.long
def test_cached_tokens_need_no_program_that_warmup_has_not_compiled(warm: Warm) -> None:
    assert warm.error.match("not compiled: history of a row")
    compilations = warm.llm.engine.compilations
    assert compilations.count == warm.num_programs
    warm.llm.run_on_engine(lambda: history_after_a_hit(warm.llm.engine, penalty_params(16), 24))
    assert compilations.count == warm.num_programs


@pytest.mark.long
def test_a_state_has_its_tokens_once_and_too_many_of_them_are_refused(warm: Warm) -> None:
    engine = warm.llm.engine

    def take_and_put() -> None:
        driver = RequestDriver(engine, request_of(PROMPT, penalty_params(8)))
        driver.prefill()
        state = engine.take(driver.lease)
        assert len(state.token_ids) == len(PROMPT) + 1
        assert set(state.sampling) == set(COLUMNS)
        assert all(column.size <= MAX_STOP_TOKENS for column in state.sampling.values())
        longer = dataclasses.replace(state, token_ids=np.zeros(MANY, np.int32))
        with pytest.raises(InputError, match=f"{MANY} tokens.*at most"):
            engine.put(driver.lease, longer)
        driver.close()

    warm.llm.run_on_engine(take_and_put)
