"""The engines' conformance suite on a model with a window in some layers: the window is shorter
than a chunk, and the context many windows long.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import SamplingParams
from enginebay_bench.scoring import scoring
from enginebay_paged.engine import is_paged
from enginebay_testing.engines import engine_checks
from enginebay_testing.reference import ReferenceModel
from enginebay_testing.subject import EngineSubject
from tests.parity import tiny

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("windows")]
ENGINES: dict[str, Any] = {
    "vinference": "vinference",
    "oengine": {"name": "oengine", "page_size": 32, "num_pages": 16},
}


@pytest.fixture(scope="module", params=ENGINES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tiny.write_checkpoint(tmp_path_factory.mktemp("model"), "gemma3-mixed")
    return EngineSubject(
        request.param, model=str(folder), choices={"engine": ENGINES[request.param]}
    )


@pytest.mark.parametrize("name", [name for name, _ in engine_checks(EngineSubject("oengine"))])
def test_engine_keeps_the_contract(subject: EngineSubject, name: str) -> None:
    check: Callable[[], None] = dict(engine_checks(subject))[name]
    check()


def test_prompts_that_begin_alike_have_the_tokens_of_prompts_alone(subject: EngineSubject) -> None:
    """The first layers with a window keep no page of the beginning; a hit needs the last ones."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [[1 + i % 90 for i in range(150)] + [end] * 9 for end in (3, 5, 7)]
    with subject.shared() as llm:
        alone = []
        for prompt in prompts:
            alone.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
            llm.run_on_engine(lambda: (llm.engine.drop_arrays(), llm.engine.make_arrays()))
        first = llm.generate(prompts[:1], params)[0]
        others = llm.generate(prompts[1:], params)
        assert [first.outputs[0].token_ids, *(o.outputs[0].token_ids for o in others)] == alone
        hits = [other.metrics.num_cached_tokens for other in others]
        assert hits == ([128, 128] if is_paged(llm.engine) else [0, 0])


def test_a_prompt_that_is_cached_whole_has_the_same_tokens(subject: EngineSubject) -> None:
    """Its last page is copied in each group, since its last token is computed again."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompt = [1 + i % 90 for i in range(64)]
    with subject.shared() as llm:
        first, again = (llm.generate([prompt], params)[0] for _ in range(2))
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert again.metrics.num_cached_tokens == (63 if is_paged(llm.engine) else 0)


def test_scored_logits_are_the_models(subject: EngineSubject) -> None:
    """Of a sequence many windows long, and again when a request has left its last pages."""
    tokens = [1 + i % 90 for i in range(150)]
    with subject.shared() as llm, scoring(llm) as scorer:
        for _ in range(2):
            scored = scorer.score(tokens, 3)
            expected = ReferenceModel(llm.plan).logits([*tokens, *scored.new_token_ids[:-1]])
            assert np.abs(scored.logits - expected).max() < 1e-3
            llm.generate([tokens], SamplingParams(max_tokens=8, ignore_eos=True))
