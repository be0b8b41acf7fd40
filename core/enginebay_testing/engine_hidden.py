"""Compares hidden states, and prompts with embeddings, with a single forward pass of the model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from enginebay.errors import RequestError
from enginebay.serving import LLM
from enginebay.serving.abilities import Abilities
from enginebay.serving.segments import Segments
from enginebay_testing.subject import EngineSubject, greedy, random_prompts

TOLERANCE = 1e-4
"""Max difference between a value of a pooled hidden state and the reference, in f32."""

LENGTHS = (3, 41)


def hidden_states_are_the_models(subject: EngineSubject) -> None:
    """`embed` returns the mean or the last of the model's final hidden states. A prompt with
    embeddings gives the same tokens whether or not the cache has a prefix of it.

    An engine that does not declare hidden_states, or prompt_embeds, refuses such requests.
    """
    prompts, reference = random_prompts(subject.vocab_size, LENGTHS, seed=17), subject.reference()
    with subject.shared() as llm:
        capabilities = Abilities.of(llm.plan).capabilities
        segments = _segments(llm)
        if "hidden_states" not in capabilities:
            _check_refused(lambda: llm.embed(prompts))
        else:
            for pooling in ("mean", "last"):
                for prompt, found in zip(prompts, llm.embed(prompts, pooling=pooling), strict=True):
                    states = reference.hidden(prompt)
                    expected = states.mean(axis=0) if pooling == "mean" else states[-1]
                    off = float(np.abs(found - expected).max())
                    case = f"a prompt of {len(prompt)} tokens, {pooling}"
                    assert off <= TOLERANCE, f"{case}: off by {off} from the reference"
        if "prompt_embeds" not in capabilities:
            _check_refused(lambda: llm.generate(segments, greedy(2)))
            return
        first, second = (llm.generate(segments, greedy(6))[0].outputs[0] for _ in range(2))
        assert first.token_ids == second.token_ids, "the same embeddings gave different tokens"


def _segments(llm: LLM) -> Segments:
    width = llm.plan.model.info.hidden_size
    embeds = np.random.default_rng(3).normal(size=(37, width)).astype(np.float32)
    return Segments([1, 2], embeds, [3])


def _check_refused(call: Callable[[], object]) -> None:
    try:
        call()
    except RequestError:
        return
    raise AssertionError("the engine accepted a request of a kind that it does not declare")
