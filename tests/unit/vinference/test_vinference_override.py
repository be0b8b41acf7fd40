"""vInference.override: functions made of other implementations for a while, and nothing half made
by one and half by another.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import IncorrectError, RequestError, StoppedError
from enginebay_vinference import vInference
from tests.unit.unregistered import garbage_attention, plain_attention
from tests.unit.vinference.numpy_inference import Compiler
from tests.unit.vinference.small import CONFIG, MODEL, SIXTEEN, encode, last, like, new_tokens

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("vinference")]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(engine="vinference", **MODEL) as made:
        yield made


@pytest.fixture(scope="module")
def swapped(llm: LLM, inference: vInference) -> vInference:
    """Over an LLM whose weights it shares, compiled for one shape."""
    made = like(inference, most=1, model=llm, seed=5)
    assert made.precompile(SIXTEEN)
    return made


def tokens(made: vInference) -> list[int]:
    ids, mask = encode(made, TEXT)
    return new_tokens(last(made.generate(ids, mask, sampling_params=PARAMS)))[0]


@pytest.mark.long
def test_the_block_has_functions_of_its_own_and_the_former_come_back(
    swapped: vInference, tmp_path: Path
) -> None:
    expected, compiled = tokens(swapped), swapped.num_compilations
    with swapped.override(attention=plain_attention, check=False) as same:
        assert same is swapped
        assert tokens(swapped) == expected
        within = swapped.num_compilations
        assert within > compiled
        with swapped.override(attention={"decode": garbage_attention}, check=False):
            wrong = tokens(swapped)
            text = swapped.process_prompt(TEXT, PARAMS)
        assert (wrong[0], wrong != expected) == (expected[0], True), (
            "the first token comes from the prefill"
        )
        assert text.text == swapped.tokenizer.decode(wrong)
        with pytest.raises(RequestError, match="saving within a block"):
            swapped.save_inference(tmp_path)
    compiled = swapped.num_compilations
    assert tokens(swapped) == expected
    assert swapped.num_compilations == compiled, "nothing is compiled anew"


def test_a_wrong_one_is_refused(swapped: vInference) -> None:
    expected, compiled = tokens(swapped), swapped.num_compilations
    with pytest.raises(IncorrectError, match="garbage_attention fails its quick check"):
        with swapped.override(attention=garbage_attention):
            pytest.fail("the block was entered")
    assert (tokens(swapped), swapped.num_compilations) == (expected, compiled)


def test_generations_under_way_are_refused_at_the_beginning_and_ended_at_the_end(
    swapped: vInference,
) -> None:
    ids, mask = encode(swapped, TEXT)
    states = swapped.generate(ids, mask, sampling_params=PARAMS)
    next(states)
    with (
        pytest.raises(RequestError, match="while generations run"),
        swapped.override(linear="xla"),
    ):
        pytest.fail("the block was entered")
    states.close()
    with swapped.override(attention=plain_attention, check=False):
        left = swapped.generate(ids, mask, sampling_params=PARAMS)
        state = next(left)
        assert int(np.asarray(state.current_length)) > 0
        text = swapped.process_prompt(TEXT, PARAMS, stream=True)
        next(text)
    for begun in (left, text):
        with pytest.raises(StoppedError, match="a block of override"):
            list(begun)


def test_what_is_swapped_in_an_llm_stays_there(llm: LLM, swapped: vInference) -> None:
    expected = tokens(swapped)
    fresh = vInference(llm, None, CONFIG, seed=5)
    with llm.override(attention=garbage_attention, check=False):
        assert tokens(swapped) == expected
        assert fresh.precompile(SIXTEEN)
        assert tokens(fresh) == expected, "a shape that is compiled within the block"


def test_what_is_compiled_in_the_block_is_gone_and_said_to_be(llm: LLM, compiler: Compiler) -> None:
    fresh = vInference(llm, None, CONFIG, seed=5)
    with fresh.override(attention=plain_attention, check=False):
        assert fresh.precompile(SIXTEEN)
        assert len(fresh.precompiled) == 1
    assert not fresh.precompiled
    assert not fresh.programs.shapes
