"""A prompt that is only scored or embedded may fill the whole context: nothing is generated, so
nothing needs room.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError
from enginebay_testing.reference import ReferenceModel
from tests.brief import TINY
from tests.unit.serving import assert_idle

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "generation_config": "none",
    "full_vocab_logprobs": True,
}
FULL, SHORT = (np.random.default_rng(n).integers(0, 96, n).tolist() for n in (64, 20))
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=1)


@pytest.fixture(
    scope="module", params=["oengine", pytest.param("vinference", marks=pytest.mark.long)]
)
def llm(request: pytest.FixtureRequest, few_sizes_module: None) -> Iterator[LLM]:
    with LLM(TINY, engine=request.param, **SIZES) as llm:
        yield llm


@pytest.mark.long
def test_a_full_context_is_scored(llm: LLM) -> None:
    for prompt in (FULL, SHORT, [5]):
        [output] = llm.generate([prompt], SCORE)
        assert (output.outputs[0].token_ids, output.outputs[0].text) == ([], "")
        assert output.outputs[0].finish_reason == "length"
        told = output.prompt_logprobs or [None]
        assert len(told) == len(prompt)
        if len(prompt) < 64 and len(prompt) > 1:
            usual = SCORE.model_copy(update={"max_tokens": 1})
            [other] = llm.generate([prompt], usual)
            assert other.prompt_logprobs is not None
            for one, two in zip(told[1:], other.prompt_logprobs[1:], strict=True):
                assert one == pytest.approx(two, abs=1e-5)
    chunks = list(llm.stream(FULL, SCORE))
    assert [chunk.delta_text for chunk in chunks] == [""]
    assert len(chunks[0].prompt_logprobs or ()) == 64
    assert_idle(llm)


@pytest.mark.long
def test_scored_and_generating_requests_run_together(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    [alone] = llm.generate([SHORT], plain)
    found = llm.generate([FULL, SHORT, FULL, SHORT], [SCORE, plain, SCORE, plain])
    assert [len(one.outputs[0].token_ids) for one in found] == [0, 6, 0, 6]
    assert found[1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert_idle(llm)


@pytest.mark.long
def test_a_full_context_is_embedded(llm: LLM) -> None:
    expected = ReferenceModel(llm.plan).hidden(FULL).astype(np.float64)
    [found] = llm.embed([FULL], pooling="mean", normalize=False)
    np.testing.assert_allclose(found, expected.mean(axis=0), atol=1e-5)
    assert_idle(llm)


def test_what_does_not_fit_is_refused(llm: LLM) -> None:
    for params in (SCORE, SamplingParams(max_tokens=1)):
        most = 64 if params is SCORE else 63
        with pytest.raises(RequestError, match=f"a prompt of {most + 1} tokens.*at most {most},"):
            llm.generate([[1] * (most + 1)], params)
    with pytest.raises(RequestError, match="max_tokens = 0 without prompt_logprobs"):
        llm.generate(SHORT, SamplingParams(max_tokens=0))
