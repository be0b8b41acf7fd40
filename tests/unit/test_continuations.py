"""The output after a prompt is decoded as its continuation; an answer in a chat as a text of its
own. A tokenizer like SentencePiece's drops the first space of a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from enginebay import LLM, SamplingParams
from enginebay.contracts.text import ChatPrompt
from enginebay.text.detokenizer import IncrementalDetokenizer
from tests.pool import few_sizes
from tests.unit.test_text import byte_fallback, byte_level

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if not loop.last or add_generation_prompt %} then "
    "{% endif %}{% endfor %}"
)


def sentencepiece_like() -> FastTokenizer:
    """The tokenizer of Llama 2, with few tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    vocab = {t: i for i, t in enumerate([*pieces, *"abcdefghijklmnopqrstuvwxyzH", "▁w", "▁wo"])}
    merges = [("▁", "w"), ("▁w", "o")]
    made = FastTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return made


def save_model(folder: Path, tokenizer: FastTokenizer) -> None:
    """A Llama of one layer with random weights, for a tokenizer with <s> and </s>."""
    hidden = 32
    rng, size = np.random.default_rng(0), tokenizer.get_vocab_size()

    def random(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * 0.2).astype(np.float32)

    layer = "model.layers.0."
    norms = ("model.norm", layer + "input_layernorm", layer + "post_attention_layernorm")
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
    weights: dict[str, Any] = {
        "model.embed_tokens.weight": random(size, hidden),
        "lm_head.weight": random(size, hidden),
        **{f"{norm}.weight": np.ones(hidden, np.float32) for norm in norms},
        **{f"{layer}{p}_proj.weight": random(hidden, hidden) for p in (*parts, "mlp.down")},
    }
    save_file(weights, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "vocab_size": size,
        "eos_token_id": tokenizer.token_to_id("</s>"),
        "bos_token_id": tokenizer.token_to_id("<s>"),
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("sentencepiece")
    save_model(folder, sentencepiece_like())
    with few_sizes(), LLM(str(folder), max_model_len=64, max_num_seqs=1) as made:
        yield made


def only(llm: LLM, token: str, **others: Any) -> SamplingParams:
    """Parameters that let the model write one token, twice."""
    token_id = sentencepiece_like().token_to_id(token)
    return SamplingParams(allowed_token_ids=[token_id], max_tokens=2, **others)


@pytest.mark.long
@pytest.mark.parametrize("prompt", ["Hello", [2, 278, 2], [278]])
def test_a_continuation_keeps_its_first_space(llm: LLM, prompt: Any) -> None:
    params = only(llm, "▁wo")
    assert llm.generate(prompt, params)[0].outputs[0].text == " wo wo"
    assert "".join(chunk.delta_text for chunk in llm.stream(prompt, params)) == " wo wo"
    stopped = only(llm, "▁wo", stop=[" w"])
    assert llm.generate(prompt, stopped)[0].outputs[0].text == ""


@pytest.mark.long
def test_an_answer_in_a_chat_has_no_first_space(llm: LLM) -> None:
    params, chat = only(llm, "▁wo"), [{"role": "user", "content": "Hello"}]
    assert llm.chat(chat, params).outputs[0].text == "wo wo"
    assert "".join(chunk.delta_text for chunk in llm.chat_stream(chat, params)) == "wo wo"
    begun = [*chat, {"role": "assistant", "content": "well"}]
    assert (
        llm.chat(begun, params, continue_final_message=True, add_generation_prompt=False)
        .outputs[0]
        .text
        == " wo wo"
    )
    assert llm.generate([1], params)[0].outputs[0].text == "wo wo", "nothing comes before it"


@pytest.mark.long
@pytest.mark.parametrize("engine", ["oengine", "vinference"])
def test_a_chosen_continuation_keeps_its_first_space(llm: LLM, engine: str) -> None:
    params = SamplingParams(choice=(" wow",), max_tokens=8)
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 1, "engine": engine}
    with few_sizes(), LLM(llm.config.model, **sizes) as made:
        assert made.generate("Hello", params)[0].outputs[0].text == " wow"
        assert "".join(chunk.delta_text for chunk in made.stream("Hello", params)) == " wow"
        chat = [{"role": "user", "content": "Hello"}]
        assert made.chat(chat, only(llm, "▁wo")).outputs[0].text == "wo wo"


@pytest.mark.long
def test_other_apis_decode_alike(llm: LLM) -> None:
    from enginebay_esurge import eSurge

    params, chat = only(llm, "▁wo"), [{"role": "user", "content": "Hello"}]
    ids = llm.tokenizer.apply_chat_template(chat)
    assert isinstance(ids, ChatPrompt)
    assert not isinstance(llm.tokenizer.encode("Hello"), ChatPrompt)
    with few_sizes(), eSurge(llm.config.model, max_model_len=64, max_num_seqs=1) as surge:
        assert surge.generate("Hello", params)[0].outputs[0].text == " wo wo"
        assert surge.chat(chat, sampling_params=params).outputs[0].text == "wo wo"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", ["a word and more", "naïve 日本語 👍🏽 end", "  two  spaces"])
def test_a_text_may_be_cut_anywhere(make: Any, text: str) -> None:
    tokenizer = make()
    token_ids = tokenizer.encode(text)
    whole = tokenizer.decode(token_ids)
    for cut in range(len(token_ids)):
        before = tokenizer.decode(token_ids[:cut])
        if before.endswith("\ufffd"):
            continue
        stream = IncrementalDetokenizer(tokenizer, after=token_ids[:cut])
        parts = [stream.push([token_id]) for token_id in token_ids[cut:]]
        assert before + "".join(parts) + stream.flush() == whole


def test_a_prompt_that_ends_within_a_character_is_continued_without_it() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a日")
    stream = IncrementalDetokenizer(tokenizer, after=ids[:-1])
    assert stream.push(ids[-1:]) + stream.push(tokenizer.encode("b")) + stream.flush() != ""
