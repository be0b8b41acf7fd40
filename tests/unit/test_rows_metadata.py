"""Sampling metadata carries all that the rows of a step ask for, and comes back from storage as it
was.
"""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginebay.contracts.processor import RowValues
from enginebay.types import Request, SamplingParams
from enginebay_oengine import ModelRunnerSamplingMetadata, SequenceBuffer
from tests.unit.rowtable import (
    LENGTH,
    PAGE_SIZES,
    ROWS,
    VOCAB,
    EngineRequest,
    make_request,
    make_sampling,
    make_table,
    with_fields,
)

pytestmark = pytest.mark.usefixtures("row_tables")
ARRAYS = ("temperature", "min_p", "top_k", "top_p")


def add(
    table: SequenceBuffer, name: str, prompt: list[int], row: int | None = None, **params: object
) -> None:
    sampling = with_fields(make_sampling(), **params)
    table.add_request(EngineRequest(name, prompt, sampling), row)


def rich_table() -> SequenceBuffer:
    """Row 0 is plain and greedy, 1 is free, 2 asks for everything, 3 for little."""
    table = make_table()
    add(table, "plain", [1, 2, 3])
    add(
        table,
        "rich",
        [4, 5, 6, 7, 8],
        2,
        temperature=0.5,
        min_p=0.25,
        top_k=7,
        top_p=0.75,
        frequency_penalty=1.0,
        presence_penalty=-1.0,
        repetition_penalty=2.0,
        logit_bias={3: 1.5, 4: -math.inf},
        allowed_token_ids=[3, 9, 99],
        min_tokens=2,
        stop_token_ids=(50, 51),
        bad_words_token_ids=[[1], [2, 3]],
        logprobs=1,
    )
    table.append_tokens(2, [9, 3])
    add(table, "little", [9], 3, temperature=1.0, allowed_token_ids=[0])
    return table


def _with_processors(request: Request, values: RowValues) -> Request:
    sampling = dataclasses.replace(request.sampling, processors=(values,))
    return dataclasses.replace(request, sampling=sampling)


def assert_equal(first: ModelRunnerSamplingMetadata, second: ModelRunnerSamplingMetadata) -> None:
    """Same values of the same types, shapes and dtypes in every field."""
    for field in dataclasses.fields(ModelRunnerSamplingMetadata):
        one, other = getattr(first, field.name), getattr(second, field.name)
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array)
        if isinstance(one, jax.Array | np.ndarray):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        else:
            assert (type(one), repr(one)) == (type(other), repr(other))


def test_there_are_sixteen_fields_with_the_documented_defaults() -> None:  # holds B16
    made = ModelRunnerSamplingMetadata(*(jnp.zeros(2) for _ in ARRAYS))
    assert [field.name for field in dataclasses.fields(made)] == [
        *ARRAYS,
        "all_greedy",
        "logprobs",
        "no_penalties",
        "prompt_token_ids",
        "frequency_penalties",
        "presence_penalties",
        "repetition_penalties",
        "output_token_ids",
        "min_tokens",
        "logit_bias",
        "allowed_token_ids_mask",
        "bad_words_token_ids",
    ]
    assert (made.all_greedy, made.logprobs, made.no_penalties) == (True, False, True)
    assert (made.output_token_ids, made.logit_bias) == ([], [])
    optional = ("prompt_token_ids", "min_tokens", "allowed_token_ids_mask", "bad_words_token_ids")
    assert [getattr(made, name) for name in optional] == [None] * 4
    with pytest.raises(TypeError):
        ModelRunnerSamplingMetadata()


def test_greedy_tables_give_zeros_unless_parameters_are_wanted() -> None:  # holds B16
    table = make_table()
    table.begin_sequence("a", [1], SamplingParams(top_k=3, top_p=0.5))
    table.begin_sequence("b", [1])
    made = ModelRunnerSamplingMetadata.from_sequence_buffer(table, 4)
    for name in ARRAYS:
        assert getattr(made, name).tolist() == [0] * 4
    assert [getattr(made, name).dtype for name in ARRAYS] == [
        jnp.float32,
        jnp.float32,
        jnp.int32,
        jnp.float32,
    ]
    assert len({getattr(made, name).unsafe_buffer_pointer() for name in ARRAYS}) == 4, (
        "donation needs four"
    )
    assert (made.all_greedy, made.no_penalties, made.logprobs) == (True, True, False)
    assert made.frequency_penalties is made.prompt_token_ids is made.allowed_token_ids_mask is None
    wanted = ModelRunnerSamplingMetadata.from_sequence_buffer(
        table, 4, generate_params_if_all_greedy=True
    )
    assert wanted.all_greedy
    assert wanted.temperature.tolist() == [0, 0, -1, -1]
    assert wanted.top_k.tolist() == [3, 0, 0, 0]
    assert wanted.top_p.tolist() == [0.5, 1, 1, 1]


@pytest.mark.parametrize("padded", [4, ROWS, 8])
def test_metadata_carries_everything_that_rows_ask_for(padded: int) -> None:  # holds B16
    made = ModelRunnerSamplingMetadata.from_sequence_buffer(rich_table(), padded)
    rest = padded - 4
    assert made.temperature.tolist() == [0, -1, 0.5, 1] + [-1] * rest
    assert made.min_p.tolist() == [0, 0, 0.25, 0] + [0] * rest
    assert made.top_k.tolist() == [0, 0, 7, 0] + [0] * rest
    assert made.top_p.tolist() == [1, 1, 0.75, 1] + [1] * rest
    assert made.frequency_penalties.tolist() == [0, 0, 1, 0] + [0] * rest
    assert made.presence_penalties.tolist() == [0, 0, -1, 0] + [0] * rest
    assert made.repetition_penalties.tolist() == [1, 1, 2, 1] + [1] * rest
    assert (made.all_greedy, made.no_penalties, made.logprobs) == (False, False, True)
    none = [VOCAB] * 8
    prompts = [
        [1, 2, 3, *none[3:]],
        none,
        [4, 5, 6, 7, 8, *none[5:]],
        [9, *none[1:]],
        *[none] * rest,
    ]
    assert made.prompt_token_ids.tolist() == prompts
    assert made.output_token_ids == [[], [], [9, 3], []] + [[]] * rest
    assert made.logit_bias == [{}, {}, {3: 1.5, 4: -math.inf}, {}] + [{}] * rest
    assert made.min_tokens == {2: (2, (50, 51))}
    assert made.bad_words_token_ids == {2: [[1], [2, 3]]}
    disallowed = np.zeros((padded, VOCAB), bool)
    disallowed[2:4] = True
    disallowed[2, [3, 9, 99]] = disallowed[3, 0] = False
    np.testing.assert_array_equal(made.allowed_token_ids_mask, disallowed)


def test_greedy_rows_keep_what_else_they_ask_for() -> None:  # holds B16
    table = make_table()
    add(
        table,
        "a",
        [1],
        repetition_penalty=2.0,
        logit_bias={1: -1.0},
        min_tokens=3,
        allowed_token_ids=[1, 2],
    )
    made = ModelRunnerSamplingMetadata.from_sequence_buffer(table, 2)
    assert (made.all_greedy, made.no_penalties) == (True, False)
    assert made.repetition_penalties.tolist() == [2, 1]
    assert made.logit_bias == [{1: -1.0}, {}]
    assert made.min_tokens == {0: (3, ())}
    assert np.flatnonzero(~np.asarray(made.allowed_token_ids_mask[0])).tolist() == [1, 2]


def test_public_parameters_ask_for_log_probabilities_and_have_their_seed() -> None:  # holds B16
    table = make_table()
    table.begin_sequence("three", [1], SamplingParams(logprobs=3, seed=2**32 + 5))
    table.begin_sequence("all", [1], SamplingParams(logprobs=-1, prompt_logprobs=0))
    table.begin_sequence("none", [1])
    assert table.returns_logprobs.tolist() == [True, True, False, False, False]
    assert table.variants.tolist() == [1, 1, 0, 0, 0]
    assert [table.request(row).sampling.num_logprobs for row in range(3)] == [3, VOCAB, None]
    assert table.request(1).sampling.num_prompt_logprobs == 0
    assert table.keys[:2].tolist() == [[1, 5], [0, 0]]
    assert ModelRunnerSamplingMetadata.from_sequence_buffer(table, 4).logprobs


@pytest.mark.parametrize(
    "params",
    [
        {"bad_words": ("x",)},
        {"stop_words_ids": ((1, 2),)},
        {"no_repeat_ngram_size": 2},
        {"typical_p": 0.5},
        {"suppress_repetition_in_generation": True},
        {"processors": {"xtc": {}}},
        {"json_object": True},
        {"choice": ("a", "b")},
    ],
)
def test_what_metadata_cannot_carry_is_refused_when_the_request_is_made(
    params: dict,
) -> None:  # holds B16
    table = make_table()
    [name] = params
    with pytest.raises(ValueError, match=rf"{name} = .* a row table cannot store"):
        table.begin_sequence("a", [1], SamplingParams(**params))
    assert table.num_reqs == 0


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("typical", {"typical_p": np.float32(0.5)}, "typical"),
        ("penalties", {"output_only": np.bool_(True)}, "suppress_repetition_in_generation"),
    ],
)
def test_metadata_of_an_engines_row_loses_no_processor(
    name: str, values: dict, told: str
) -> None:  # holds B16
    table = make_table()
    request = make_request("a", [1])
    used = RowValues(name, values)
    table.add_request(_with_processors(request, used))
    with pytest.raises(ValueError, match=f"row 0 with {told}"):
        ModelRunnerSamplingMetadata.from_sequence_buffer(table, 4)
    table.clear()
    table.add_request(_with_processors(request, RowValues("min_tokens", {})))
    assert ModelRunnerSamplingMetadata.from_sequence_buffer(table, 4).all_greedy


def test_metadata_does_not_change_with_the_table() -> None:  # holds B16
    table = rich_table()
    made = ModelRunnerSamplingMetadata.from_sequence_buffer(table, 4)
    kept = made.to_json()
    table.clear()
    table.token_ids[:] = 1
    table.top_p[:] = 0.1
    assert made.to_json() == kept


def test_rows_beyond_the_padded_ones_are_an_error() -> None:  # holds B16
    with pytest.raises(ValueError, match=r"3 rows for 3 requests in rows \[0, 2, 3\].*condense"):
        ModelRunnerSamplingMetadata.from_sequence_buffer(rich_table(), 3)
    with pytest.raises(ValueError, match="0 rows for 0 requests"):
        ModelRunnerSamplingMetadata.from_sequence_buffer(make_table(), 0)


def test_storing_as_dict_or_json_loses_nothing() -> None:  # holds B16
    table = rich_table()
    empty = ModelRunnerSamplingMetadata.from_sequence_buffer(make_table(), 1)
    made = ModelRunnerSamplingMetadata.from_sequence_buffer(table, 8)
    odd = made.replace(
        temperature=np.array([[1.5]]),
        top_p=jnp.ones(2, jnp.bfloat16),
        min_tokens={1: {3, 2}, 4: (math.inf, None)},
    )
    for metadata in (empty, made, odd):
        assert_equal(ModelRunnerSamplingMetadata.from_dict(metadata.to_dict()), metadata)
        assert_equal(ModelRunnerSamplingMetadata.from_json(metadata.to_json(indent=1)), metadata)
        json.loads(metadata.to_json(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        '{"temperature": 1}',
        '{"top_q": 1}',
        '{"temperature": {"$array": {}}}',
        '{"top_k": {"$x": 1}}',
    ],
)
def test_text_that_is_no_metadata_is_refused(text: str) -> None:  # holds B16
    with pytest.raises(ValueError, match="Allowed"):
        ModelRunnerSamplingMetadata.from_json(text)


def test_replacing_leaves_the_original_alone() -> None:  # holds B16
    made = ModelRunnerSamplingMetadata.from_sequence_buffer(rich_table(), 4)
    assert made.replace(logprobs=False).logprobs is False
    assert made.logprobs is True
    with pytest.raises(TypeError):
        made.replace(top_q=1)
    with pytest.raises(ValueError, match="type object in sampling metadata"):
        made.replace(min_tokens=object()).to_dict()


def test_metadata_goes_through_jit_as_a_tree() -> None:  # holds B16
    made = ModelRunnerSamplingMetadata.from_sequence_buffer(rich_table(), 4)

    @jax.jit
    def double(metadata: ModelRunnerSamplingMetadata) -> ModelRunnerSamplingMetadata:
        assert metadata.all_greedy is False, "flags are static"
        return metadata.replace(temperature=metadata.temperature * 2)

    assert double(made).temperature.tolist() == [0, -2, 1, 2]
    assert_equal(jax.tree.map(lambda leaf: leaf, made), made)


def test_arrays_are_placed_with_the_tables_sharding() -> None:  # holds B01
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    table = SequenceBuffer(ROWS, LENGTH, 64, VOCAB, PAGE_SIZES, sharding)
    add(table, "a", [1], temperature=0.5, repetition_penalty=2.0, allowed_token_ids=[1])
    made = ModelRunnerSamplingMetadata.from_sequence_buffer(table, 4)
    arrays = [leaf for leaf in jax.tree.leaves(made) if isinstance(leaf, jax.Array)]
    assert len(arrays) == 9
    assert all(array.sharding == sharding for array in arrays)
