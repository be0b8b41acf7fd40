"""vInference.override: functions made of other implementations for a while, and nothing half made by one and half by another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import IncorrectError, RequestError, StoppedError
from enginebay_vinference import vInference, vInferencePreCompileConfig
from tests.brief import BRIEF
from tests.unit.unregistered import garbage_attention, plain_attention
from tests.unit.vinference.small import CONFIG, MODEL, encode, last, new_tokens

pytestmark = pytest.mark.xdist_group("vinference")
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
TEXT = "Once upon a time"
SIXTEEN = vInferencePreCompileConfig(batch_size=1, prefill_length=16)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(engine="vinference", **(MODEL | {"model": BRIEF})) as made:
        yield made


@pytest.fixture(scope="module")
def inference(llm: LLM) -> vInference:
    """Over an LLM whose weights it shares, compiled for one shape."""
    made = vInference(llm, None, CONFIG, seed=5)
    assert made.precompile(SIXTEEN)
    return made


def tokens(inference: vInference) -> list[int]:
    ids, mask = encode(inference, TEXT)
    return new_tokens(last(inference.generate(ids, mask, sampling_params=PARAMS)))[0]


def test_the_block_has_functions_of_its_own_and_the_former_come_back(
    inference: vInference, tmp_path: Path
) -> None:
    expected, compiled = tokens(inference), inference.num_compilations
    with inference.override(attention=plain_attention) as same:
        assert same is inference
        assert tokens(inference) == expected
        within = inference.num_compilations
        assert within > compiled
        with inference.override(attention={"decode": garbage_attention}, check=False):
            wrong = tokens(inference)
            text = inference.process_prompt(TEXT, PARAMS)
        assert (wrong[0], wrong != expected) == (expected[0], True), "the first token comes from the prefill"
        assert text.text == inference.tokenizer.decode(wrong)
        with pytest.raises(RequestError, match="swapped in, to be saved"):
            inference.save_inference(tmp_path)
    compiled = inference.num_compilations
    assert tokens(inference) == expected
    assert inference.num_compilations == compiled, "nothing is compiled anew"


def test_a_wrong_one_is_refused(inference: vInference) -> None:
    with pytest.raises(IncorrectError, match="garbage_attention fails its quick check"):
        with inference.override(attention=garbage_attention):
            pytest.fail("the block was entered")
    assert inference._subject.plan.kernels.names["attention.decode"] != "garbage_attention"


def test_generations_under_way_are_refused_at_the_beginning_and_ended_at_the_end(
    inference: vInference,
) -> None:
    ids, mask = encode(inference, TEXT)
    states = inference.generate(ids, mask, sampling_params=PARAMS)
    next(states)
    with pytest.raises(RequestError, match="generations are under way"), inference.override(linear="xla"):
        pytest.fail("the block was entered")
    states.close()
    with inference.override(linear="xla", check=False):
        left = inference.generate(ids, mask, sampling_params=PARAMS)
        state = next(left)
        assert int(np.asarray(state.current_length)) > 0
        text = inference.process_prompt(TEXT, PARAMS, stream=True)
        next(text)
    for begun in (left, text):
        with pytest.raises(StoppedError, match="a block of override"):
            list(begun)


def test_what_is_swapped_in_an_llm_stays_there(llm: LLM, inference: vInference) -> None:
    expected = tokens(inference)
    fresh = vInference(llm, None, CONFIG, seed=5)
    with llm.override(attention=garbage_attention, check=False):
        assert tokens(inference) == expected
        assert fresh.precompile(SIXTEEN)
        assert tokens(fresh) == expected, "a shape that is compiled within the block"


def test_what_is_compiled_in_the_block_is_gone_and_said_to_be(llm: LLM) -> None:
    fresh = vInference(llm, None, CONFIG, seed=5)
    with fresh.override(attention=plain_attention, check=False):
        assert fresh.precompile(SIXTEEN)
        assert len(fresh.precompiled) == 1
    assert not fresh.precompiled
    assert not fresh._programs.shapes
