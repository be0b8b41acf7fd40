"""Each family against transformers, run here instead of stored: logits and greedy tokens, and how
far off bfloat16 is.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams, Segments
from enginebay_testing.model_harness import greedy_mismatch, teacher_forced
from tests.parity import reference, tiny
from tests.parity.test_goldens import TOLERANCE, loaded

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("variant", tiny.CONFIGS)
def test_logits_and_greedy_tokens_in_f32(variant: str, tmp_path: Path) -> None:
    harness = loaded(tmp_path, variant)
    model = reference.load_reference(tmp_path, "float32")
    prompts = tiny.prompts()[2:]
    tokens = [reference.greedy(model, prompt, 24) for prompt in prompts]
    for prompt, new, ours in zip(
        prompts, tokens, teacher_forced(harness, prompts, tokens), strict=True
    ):
        theirs = reference.logits_of(model, [*prompt, *new])
        assert np.abs(ours - theirs).max() <= TOLERANCE
        assert greedy_mismatch(ours[len(prompt) - 1 : -1], new, TOLERANCE) is None


@pytest.mark.parametrize("variant", ["llama-tied", "mistral-window", "qwen2-tied", "qwen3-tied"])
def test_bf16_is_at_most_twice_as_far_off_as_transformers(variant: str, tmp_path: Path) -> None:
    harness = loaded(tmp_path, variant, dtype="bfloat16")
    exact, rounded = (
        reference.load_reference(tmp_path, dtype) for dtype in ("float32", "bfloat16")
    )
    prompts = tiny.prompts()[2:5]
    for prompt, ours in zip(
        prompts, teacher_forced(harness, prompts, [[]] * len(prompts)), strict=True
    ):
        truth = reference.logits_of(exact, prompt)
        theirs = reference.logits_of(rounded, prompt)
        error, allowed = (float(np.sqrt(np.mean((x - truth) ** 2))) for x in (ours, theirs))
        assert error <= 2 * allowed, (
            f"prompt of {len(prompt)}: {error:.4f}, transformers {allowed:.4f}"
        )


@pytest.mark.parametrize(
    ("variant", "engine"), [("llama-tied", "vinference"), ("qwen3-tied", "oengine")]
)
def test_logprobs_are_transformers_log_softmax(variant: str, engine: str, tmp_path: Path) -> None:
    import torch

    folder = tiny.write_checkpoint(tmp_path, variant)
    model = reference.load_reference(folder, "float32")
    prompts = tiny.prompts()[2:]
    params = [
        SamplingParams(
            max_tokens=12, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=num_best
        )
        for i, num_best in zip(range(len(prompts)), itertools.cycle((5, 0, 20)), strict=False)
    ]
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "decode_steps": 4}
    with LLM(str(folder), engine=engine, dtype="float32", generation_config="none", **sizes) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        completion = output.outputs[0]
        logits = torch.from_numpy(reference.logits_of(model, [*prompt, *completion.token_ids]))
        theirs = torch.log_softmax(logits, dim=-1).numpy()[len(prompt) - 1 : -1]
        assert completion.logprobs is not None
        for expected, told in zip(theirs, completion.logprobs, strict=True):
            assert list(told.values()) == pytest.approx(
                [float(expected[t]) for t in told], abs=1e-4
            )
            best = np.sort(expected)[::-1][: own.logprobs]
            assert list(told.values())[: own.logprobs] == pytest.approx(best.tolist(), abs=1e-4)
        chosen = theirs[range(12), completion.token_ids].sum()
        assert completion.cumulative_logprob == pytest.approx(float(chosen), abs=1e-3)


@pytest.mark.parametrize(
    ("variant", "engine"), [("llama-tied", "vinference"), ("qwen3-tied", "oengine")]
)
def test_prompt_and_whole_logprobs_are_transformers_log_softmax(
    variant: str, engine: str, tmp_path: Path
) -> None:
    import torch

    folder = tiny.write_checkpoint(tmp_path, variant)
    model = reference.load_reference(folder, "float32")
    prompt = max(tiny.prompts(), key=len)
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=-1, prompt_logprobs=4)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "decode_steps": 4}
    with LLM(str(folder), engine=engine, dtype="float32", generation_config="none", **sizes) as llm:
        outputs = [
            llm.generate([prompt], params)[0] for _ in range(2)
        ]  # the cache may have the prompt by then
    for output in outputs:
        completion = output.outputs[0]
        logits = torch.from_numpy(reference.logits_of(model, [*prompt, *completion.token_ids]))
        theirs = torch.log_softmax(logits, dim=-1).numpy()
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        told = [*output.prompt_logprobs, *completion.logprobs]
        assert (told[0], len(told)) == (None, len(prompt) + 3)
        for expected, one in zip(theirs[:-1], told[1:], strict=True):
            assert one is not None
            assert list(one.values()) == pytest.approx([float(expected[t]) for t in one], abs=1e-4)
            best = np.sort(expected)[::-1][:4]
            assert list(one.values())[:4] == pytest.approx(best.tolist(), abs=1e-4)
        assert {len(one) for one in completion.logprobs} == {theirs.shape[1]}


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    "variant",
    [
        "llama-tied",
        "gemma3-mixed",
        "lfm2-mixed",
        "deepseek_v2-grouped",
        "mpt-clipped",
        "gpt2-plain",
    ],
)
def test_embeddings_are_transformers_hidden_states(
    variant: str, num_devices: int, tmp_path: Path
) -> None:
    """A prompt of embeddings gives the tokens that its ids give, too."""
    folder = tiny.write_checkpoint(tmp_path, variant)
    model = reference.load_reference(folder, "float32")
    prompts = tiny.prompts()[2:]
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
    sizes["mesh"] = {} if num_devices == 1 else {"tensor": num_devices}
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM(str(folder), engine="oengine", dtype="float32", **sizes) as llm:
        means, lasts = llm.embed(prompts), llm.embed(prompts, pooling="last")
        ids, embeds = prompts[1], reference.embeds_of(model, prompts[1][9:])
        by_ids, by_embeds = llm.generate([ids, Segments(ids[:9], embeds)], greedy)
        assert by_embeds.outputs[0].token_ids == by_ids.outputs[0].token_ids
    for prompt, mean, last in zip(prompts, means, lasts, strict=True):
        theirs = reference.hidden_of(model, prompt)
        bound = 1e-5 * max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(mean, theirs.mean(axis=0), rtol=0, atol=bound)
        np.testing.assert_allclose(last, theirs[-1], rtol=0, atol=bound)
