"""Models pad their vocabulary: the ids above those of the tokenizer are neither sampled, nor
reported, nor accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from enginebay import LLM, SamplingParams
from enginebay.contracts.model import TokenInfo, with_padding
from enginebay.errors import RequestError
from enginebay.ops.sampling import without_padding
from enginebay_models.gguf import vocabulary
from enginebay_models.source import CheckpointSource
from enginebay_models.token_count import count_token_ids
from enginebay_testing.tiny import write_word_tokenizer
from tests.brief import TINY
from tests.unit.checkpoints import model_of

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "full_vocab_logprobs": True,
}
KNOWN = 40
"""Ids of the tokenizer. The embedding of TINY has more rows."""
FAVOURED = 77
"""An id of the padding, whose logit is the largest of every step."""
LONG: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}


def with_words(folder: Path, number: int) -> Path:
    """A copy of TINY with a tokenizer of `number` words, whose head favours an id."""
    folder.mkdir()
    config = json.loads(Path(TINY, "config.json").read_text())
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(Path(TINY, "model.safetensors"))
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).copy()
    # The same direction, much longer, and its opposite: one of the two has the largest logit.
    head[FAVOURED], head[FAVOURED + 1] = 50 * head[5], -50 * head[5]
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_word_tokenizer(folder, number)
    return folder


@pytest.fixture(
    scope="module", params=["oengine", pytest.param("vinference", marks=pytest.mark.long)]
)
def padded(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    few_sizes_module: None,
) -> Iterator[LLM]:
    folder = with_words(tmp_path_factory.mktemp("padded") / "model", KNOWN)
    with LLM(folder, engine=request.param, **SIZES) as llm:
        yield llm


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        pytest.param({"temperature": 1.0, "seed": 3}, marks=pytest.mark.long),
        pytest.param(
            {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5, "logprobs": 5},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"temperature": 0, "logprobs": -1, "prompt_logprobs": 5}, marks=pytest.mark.long
        ),
    ],
    ids=["greedy", "sampled", "processed", "logprobs"],
)
def test_padding_is_neither_sampled_nor_reported(padded: LLM, params: dict[str, Any]) -> None:
    [output] = padded.generate([[3, 5, 9]], SamplingParams(**LONG, **params))
    [completion] = output.outputs
    assert len(completion.token_ids) == 8
    assert max(completion.token_ids) < KNOWN
    for one in [*(completion.logprobs or ()), *(output.prompt_logprobs or [None])[1:]]:
        assert one is not None
        assert max(one) < KNOWN
        assert all(np.isfinite(value) for value in one.values())
    if params.get("logprobs") == -1:
        for one in completion.logprobs or ():
            assert len(one) == KNOWN
            assert sum(np.exp(value) for value in one.values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.long
def test_drafts_of_padding_are_not_accepted(tmp_path: Path) -> None:
    with LLM(with_words(tmp_path / "model", KNOWN), proposer="ngram", **SIZES) as llm:
        [output] = llm.generate([[3, 5, 9, 3, 5, 9, 3, 5]], SamplingParams(temperature=0, **LONG))
        assert max(output.outputs[0].token_ids) < KNOWN


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [3, KNOWN]},
        {"logit_bias": {KNOWN: 5.0}},
        {"stop_token_ids": [KNOWN]},
        {"stop_words_ids": [[3, KNOWN]]},
        {"processors": {"allowed_token_ids": {"token_ids": [KNOWN]}}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_id_above_the_tokenizers_is_refused(padded: LLM, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=rf"{KNOWN}.*0 to {KNOWN - 1}"):
        padded.generate([[3, 5, 9]], SamplingParams(**fields))


@pytest.mark.long
def test_a_prompt_with_an_id_above_the_tokenizers_is_refused(padded: LLM) -> None:
    with pytest.raises(RequestError, match=f"token id {KNOWN}.*the tokenizer's vocabulary"):
        padded.generate([[3, KNOWN]])
    assert padded.generate([[3, KNOWN - 1]], SamplingParams(max_tokens=1))


@pytest.mark.long
def test_added_tokens_above_the_base_vocabulary_count(tmp_path: Path) -> None:
    folder = with_words(tmp_path / "model", KNOWN)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [{"id": KNOWN, "content": "<end>", "special": True, **added}]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert count_token_ids(folder) == KNOWN + 1
    with LLM(folder, **SIZES) as llm:
        assert llm.plan.model.info.padding_from == KNOWN + 1
        params = SamplingParams(logit_bias={KNOWN: 100.0}, skip_special_tokens=False, **LONG)
        assert llm.generate("w3 <end> w5", params)[0].outputs[0].text.split() == ["<end>"] * 8
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {"61": {"content": "<pad>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert count_token_ids(folder) == 62


def test_a_gguf_files_padding_does_not_count() -> None:
    unused, normal = (int(vocabulary.UNUSED), int(vocabulary.NORMAL))
    special = vocabulary.SpecialIds(None, None, None, None, adds_bos=False, adds_eos=False)
    metadata: Any = {}
    for tokens, types, number in (
        (["a", "[PAD1]", "[PAD2]"], [normal, unused, unused], 1),
        (["a", "[PAD1]", "<unused0>"], [normal, unused, unused], 3),
        (["a", "b", "[PAD2]"], [normal, normal, normal], 3),
    ):
        made = vocabulary.GgufVocabulary(
            metadata, vocabulary.BYTE_PAIRS, tokens, np.array(types), special
        )
        assert made.num_token_ids == number


def test_ids_that_end_a_sequence_are_no_padding() -> None:
    info = model_of().info
    assert with_padding(info, 20, TokenInfo((23,))).padding_from == 24
    assert with_padding(info, 20, TokenInfo((info.vocab_size - 1,))).padding_from is None
    assert with_padding(info, None, TokenInfo()).padding_from is None
    assert with_padding(info, info.vocab_size + 5, TokenInfo()).padding_from is None


def test_a_model_without_padding_computes_nothing_for_it() -> None:
    assert CheckpointSource(TINY).num_token_ids == CheckpointSource(TINY).config["vocab_size"]
    logits = jnp.ones((2, 8))
    assert without_padding(logits, None) is logits


@pytest.mark.parametrize(
    ("tokenizer", "number"),
    [
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}, 2),
        ({"model": {"vocab": {}}}, 0),
        ({"model": {"vocab": {"a": "x"}}}, None),
        ({"model": None}, None),
        ({}, None),
    ],
)
def test_a_tokenizer_that_cannot_be_counted_has_an_unknown_number(
    tmp_path: Path, tokenizer: dict[str, Any], number: int | None
) -> None:
    assert count_token_ids(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert count_token_ids(tmp_path) == number
