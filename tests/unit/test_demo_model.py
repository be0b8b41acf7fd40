"""The embedded demo model: its files, its tokenizer, and the generator of the corpus it was trained
on.
"""

import importlib
import json
import re
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "backends" / "models" / "enginebay_models" / "demo"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
MAX_BYTES = 6_000_000
TEXTS = (
    "Once upon a time, there was a fox.",
    "  two  spaces\n\ttabs\r\n",
    "Grüße, naïve café — 日本語 и кириллица",
    "emoji 🦊🏳️‍🌈 and \u0000 and \U0010ffff",
    "1234567890 + 17 = ?",
    "",
)


def read_json(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def read_header() -> dict[str, Any]:
    """The table of tensors in front of a safetensors file: eight bytes of length, then JSON."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of the modules beside the training script."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo_model"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
    template = jinja2.Environment(autoescape=False).from_string(
        read_json("tokenizer_config.json")["chat_template"]
    )
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def test_the_folder_holds_these_files_and_is_small():
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES


def test_the_model_card_reports_the_heldout_perplexity_and_the_licence():
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    [figure] = re.findall(
        r"^\| held-out text .*\n\|[- |]+\n\| [^|]+ \| ([0-9.]+) \|$", card, re.MULTILINE
    )
    assert 1 < float(figure) < 10
    assert "Once upon a time" in card


def test_the_configuration_describes_the_tensors(tool):
    config, header, llama = read_json("config.json"), read_header(), tool("demo_llama")
    shape = llama.Shape(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
    )
    assert {
        name: tuple(entry["shape"]) for name, entry in header.items()
    } == llama.parameter_shapes(shape)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_special_tokens_have_the_ids_that_the_configuration_names(tokenizer):
    config, generation = read_json("config.json"), read_json("generation_config.json")
    text_end, turn_end = (tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>"))
    assert generation["eos_token_id"] == [text_end, turn_end]
    assert config["eos_token_id"] == config["bos_token_id"] == text_end
    assert config["pad_token_id"] == generation["pad_token_id"] == tokenizer.token_to_id("<|pad|>")
    assert tokenizer.get_vocab_size() == config["vocab_size"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_code_point_survives_the_tokenizer(tokenizer):
    for start in range(0, 0x11000, 0x400):
        text = "".join(
            chr(code) for code in range(start, start + 0x400) if not 0xD800 <= code < 0xE000
        )
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_chat_template_renders_turns_and_the_header_of_the_answer():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello "}]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    assert render(messages, add_generation_prompt=False) == turns
    assert render(messages, add_generation_prompt=True) == turns + "<|im_start|>assistant\n"


def test_the_chat_template_takes_content_in_parts():
    parts = [{"type": "text", "text": "Hello"}]
    assert render([{"role": "user", "content": parts}], add_generation_prompt=False) == (
        "<|im_start|>user\nHello<|im_end|>\n"
    )


def test_training_sees_chats_as_the_template_renders_them(tool, tokenizer):
    chats, demo_tokenizer = tool("chats"), tool("demo_tokenizer")
    random = importlib.import_module("random").Random(3)
    for _ in range(50):
        messages = chats.make_chat(random)
        ids, weights = demo_tokenizer.encode_chat(tokenizer, messages, 0.0)
        assert len(ids) == len(weights)
        rendered = render(messages, add_generation_prompt=False) + "<|endoftext|>"
        assert ids == tokenizer.encode(rendered).ids


def test_the_corpus_follows_from_its_seed(tool):
    corpus = tool("corpus")
    first, again, other = (list(corpus.make_corpus(seed, 200, 200)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_nothing_heldout_occurs_in_the_training_part(tool):
    records = list(tool("corpus").make_corpus(0, 3000, 3000))
    contents = {split: set() for split in ("train", "heldout")}
    for record in records:
        turns = [turn["content"] for turn in record.get("messages", ()) if turn["role"] == "user"]
        contents[record["split"]].add(record.get("text") or "\n".join(turns))
    assert len(contents["heldout"]) > 20
    assert not contents["train"] & contents["heldout"]


def test_stories_leave_no_slot_open_and_use_articles_well(tool):
    stories = [record["text"] for record in tool("corpus").story_records(1, 2000)]
    for story in stories:
        assert not set("{}[]|/") & set(story)
        for wrong in (" a apple", " a old", " a owl", "  ", "..", " ,"):
            assert wrong not in story


def test_packing_keeps_every_document_whole(tool):
    packing, demo_tokenizer = tool("packing"), tool("demo_tokenizer")
    documents = [
        ([number] * size, [1.0] * size) for number, size in enumerate((3, 5, 2, 7, 1), start=10)
    ]
    rows = packing.pack(documents, 7, separate=True)
    for ids, _ in documents:
        assert (rows.tokens == ids[0]).sum() == len(ids)
    assert (rows.weights[rows.tokens == demo_tokenizer.PAD_ID] == 0).all()
