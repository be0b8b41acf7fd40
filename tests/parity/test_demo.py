"""The demo model against transformers: stored tokens and logits always, live where torch is
installed.
"""

from __future__ import annotations

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay_testing.near_ties import assert_same_tokens
from enginebay_testing.reference import ReferenceModel
from tests.parity import demo, reference

TOLERANCE = 1e-4


def test_engine_gives_the_stored_tokens_and_logits() -> None:
    greedy = SamplingParams(max_tokens=demo.NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with (
        np.load(demo.STORED) as stored,
        LLM("demo", dtype="float32", generation_config="none", max_num_seqs=4) as llm,
    ):
        model = ReferenceModel(llm.plan, llm.engine.executor.weights())
        outputs = [o.outputs[0].token_ids for o in llm.generate(demo.prompts(), greedy)]
        assert_same_tokens(
            model,
            demo.prompts(),
            [[int(t) for t in row] for row in stored["token_ids"]],
            outputs,
            greedy,
        )
        for prompt, best, logits in zip(
            demo.prompts(), stored["best"], stored["logits"], strict=True
        ):
            assert np.abs(model.logits(prompt)[-1][best] - logits).max() <= TOLERANCE


@pytest.mark.torch
def test_logits_are_those_of_transformers() -> None:
    theirs = reference.load_reference(demo.FOLDER, "float32")
    with LLM("demo", dtype="float32", generation_config="none") as llm:
        ours = ReferenceModel(llm.plan, llm.engine.executor.weights())
        for prompt in demo.prompts():
            assert (
                np.abs(ours.logits(prompt) - reference.logits_of(theirs, prompt)).max() <= TOLERANCE
            )
