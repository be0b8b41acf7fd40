"""Making a vInference: what it is given, what it finds out by itself, and what it refuses."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import pytest

from enginebay import EngineConfig, SamplingParams
from enginebay.contracts.text import Tokenizer
from enginebay.text.tokenizer import TextTokenizer
from enginebay_vinference import vInference, vInferenceConfig, vInferencePreCompileConfig
from enginebay_vinference.loaded_model import LoadedModel, complete_config, longest_sequence
from tests.unit.vinference.numpy_inference import make_hostside
from tests.unit.vinference.small import CONFIG, MODEL, TEXTS, encode, last, like, new_tokens

CHAT = [{"role": "user", "content": "Hello!"}]

pytestmark = [pytest.mark.xdist_group("vinference"), pytest.mark.usefixtures("pooled_module")]

PreCompile = vInferencePreCompileConfig


class Bare:
    """A tokenizer without special tokens of its own."""

    chat_template = None
    eos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode = tokenizer.inner.encode
        self.decode = tokenizer.inner.decode


# holds V30


def test_missing_ids_come_from_the_model_then_the_tokenizer(on_host: vInference) -> None:
    config = on_host.generation_config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_ids) == (3, 0, (0, 2))
    own = vInference(MODEL, None, CONFIG.replace(pad_token_id=1, eos_token_id=5))
    assert (own.generation_config.pad_token_id, own.generation_config.eos_token_id) == (1, 5)


def test_a_missing_end_of_sequence_id_is_an_assertion_that_helps(on_host: vInference) -> None:
    nobody = type("Plan", (), {"checkpoint": type("C", (), {"token_info": subject_token_info()})})()
    tokenizer = TextTokenizer(Bare(on_host.tokenizer))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"vInferenceConfig\(pad_token_id=...\)"):
        complete_config(vInferenceConfig(), nobody, tokenizer)
    with pytest.raises(AssertionError, match="eos_token_id"):
        complete_config(vInferenceConfig(pad_token_id=1), nobody, tokenizer)


def subject_token_info() -> Any:
    from enginebay.contracts.model import TokenInfo

    return TokenInfo()


@pytest.mark.slow
def test_equal_seeds_give_equal_samples_and_instances_share_nothing(inference: vInference) -> None:
    hot = SamplingParams(max_tokens=8, temperature=1.5, ignore_eos=True)
    ids, mask = encode(inference, TEXTS[0])
    runs = []
    for seed in (7, 7, 8):
        made = like(inference, seed=seed)
        made.precompile(PreCompile(1, 16))
        runs.append(
            [new_tokens(last(made.generate(ids, mask, sampling_params=hot))) for _ in range(2)]
        )
        assert set(made.precompiled) != set(inference.precompiled)
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1], "each request draws a seed of its own"


def test_without_a_seed_instances_and_requests_differ_and_with_equal_ones_agree() -> None:
    hot = SamplingParams(max_tokens=8, temperature=1.5, ignore_eos=True)

    def two_requests(seed: int | None) -> list[list[int]]:
        made, _ = make_hostside(seed=seed)
        ids, mask = encode(made, TEXTS[0])
        return [
            new_tokens(last(made.generate(ids, mask, sampling_params=hot)))[0] for _ in range(2)
        ]

    unseeded = two_requests(None) + two_requests(None)
    assert len({tuple(row) for row in unseeded}) == 4
    assert two_requests(7) == two_requests(7)


# holds V31


def test_properties(on_host: vInference) -> None:
    assert on_host.SEQUENCE_DIM_MAPPING == {
        "input_ids": 1,
        "attention_mask": 1,
        "position_ids": 1,
        "past_key_values": 2,
        "token_type_ids": 1,
        "inputs_embeds": 1,
    }
    assert on_host.inference_name == f"llama-0.00B-{dt.datetime.now(dt.UTC):%Y%m%d}"
    assert on_host.metrics is None
    assert on_host.model.info.family == "llama"
    assert on_host.tokenizer.decode(on_host.tokenizer.encode("Hello")) == "Hello"
    assert on_host.model_prefill_length == 160 - 20


def test_the_default_name_has_the_type_and_the_billions_of_parameters() -> None:  # holds V31
    shapes = (SimpleNamespace(shape=(3_000, 400_000)), SimpleNamespace(shape=(50_000_000,)))
    model = SimpleNamespace(
        weight_specs=lambda: dict(enumerate(shapes)), info=SimpleNamespace(family="llama")
    )
    for config, kind in (({"model_type": "qwen3"}, "qwen3"), ({}, "llama")):
        plan = SimpleNamespace(model=model, checkpoint=SimpleNamespace(config=config))
        today = f"{dt.datetime.now(dt.UTC):%Y%m%d}"
        assert LoadedModel(plan, None).default_name() == f"{kind}-1.25B-{today}"  # type: ignore[arg-type]


def test_tokenizer_is_the_one_that_was_passed(on_host: vInference) -> None:
    own = on_host.tokenizer
    assert isinstance(own, TextTokenizer), "None: the model's own"
    inner = own.inner
    processor = type("Processor", (), {"tokenizer": inner})()
    for given, expected in ((inner, inner), (processor, inner), (own, own)):
        made = vInference(MODEL, given, CONFIG, inference_name="mine")
        assert made.tokenizer is expected
        assert made.count_tokens(CHAT) == on_host.count_tokens(CHAT)
        assert made.inference_name == "mine"
    with pytest.raises(ValueError, match="a processor of type int"):
        vInference(MODEL, 3, CONFIG)


@pytest.mark.long
def test_a_tokenizer_of_transformers_keeps_its_methods(
    on_host: vInference,
) -> None:
    from enginebay_models.tokenizer import as_transformers

    given: Any = as_transformers(on_host.tokenizer)
    made = vInference(MODEL, given, CONFIG)
    assert made.tokenizer is given
    ids = made.tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True)
    ids = ids if isinstance(ids, list) else ids["input_ids"]
    assert len(ids) == made.count_tokens(CHAT)
    text = made.tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert "Hello!" in text


def test_the_longest_prompt_needs_a_limit_and_room() -> None:
    for name in ("max_position_embeddings", "max_position_embedding", "max_sequence_length"):
        assert longest_sequence({name: 77}) == 77
    with pytest.raises(ValueError, match="max_position_embeddings"):
        longest_sequence({"hidden_size": 3})
    crowded = vInference(MODEL, None, vInferenceConfig(max_new_tokens=160))
    with pytest.raises(ValueError, match="at most 159"):
        _ = crowded.model_prefill_length


@pytest.mark.parametrize("seed", [-1, "a", 1.5, True])
def test_a_seed_is_a_count(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed = "):
        vInference(MODEL, None, CONFIG, seed=seed)


def test_settings_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="generation_config of type dict"):
        vInference(MODEL, None, {"max_new_tokens": 4})  # type: ignore[arg-type]


def test_constructor_length_holds_without_a_configuration() -> None:
    assert vInference(MODEL, None, max_new_tokens=11).generation_config.max_new_tokens == 11
    with pytest.raises(ValueError, match="engine"):
        vInference(EngineConfig(**{**MODEL, "engine": "oengine"}), None)
