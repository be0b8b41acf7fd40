"""The tokenizer of a folder is transformers' own, or one that cannot be told from it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from enginebay.contracts.text import Tokenizer
from enginebay.errors import CheckpointError
from enginebay_models.checkpoint import find_folder
from enginebay_models.tokenizer import PlainTokenizer, load_tokenizer

TEXTS = [
    "Once upon a time",
    " leading and trailing ",
    "",
    "tabs\tand\nlines\r\n",
    "Größe, 日本語, 🙂👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "can't . won't , isn't !",
]


@pytest.fixture(scope="module")
def demo() -> Path:
    return find_folder("demo")


@pytest.fixture(scope="module")
def theirs(demo: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(demo)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_plain_tokenizer_equals_transformers(
    demo: Path, theirs: Any, text: str, special: bool
) -> None:
    ours = load_tokenizer(demo)
    assert isinstance(ours.inner, PlainTokenizer)
    token_ids = ours.encode(text, add_special_tokens=special)
    assert token_ids == theirs.encode(text, add_special_tokens=special)
    decoded = theirs.decode(
        token_ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
    )
    assert ours.decode(token_ids, skip_special_tokens=special) == decoded


def test_chat_template_is_rendered_by_transformers(demo: Path, theirs: Any) -> None:
    messages = [
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "!"},
    ]
    wanted = theirs.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    assert load_tokenizer(demo).apply_chat_template(messages) == wanted


def test_a_text_needs_no_transformers(demo: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from enginebay_models.tokenizer import "
        "load_tokenizer as load;t = load(Path(sys.argv[1])); t.decode(t.encode('hi')); "
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(demo)], check=True)


def changed(demo: Path, folder: Path, **fields: Any) -> Tokenizer:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(demo / name, folder / name)
    config = json.loads((demo / "tokenizer_config.json").read_text()) | fields
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"add_bos_token": True},
        {"bos_token": "<new>"},
        {"additional_special_tokens": ["<other>"]},
        {"added_tokens_decoder": {"2048": {"content": "<more>", "special": False}}},
        {"chat_template": [{"name": "default", "template": "{{ messages }}"}]},
    ],
)
def test_whatever_changes_tokenizer_json_is_left_to_transformers(
    demo: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    ours = changed(demo, tmp_path, **fields)
    assert not isinstance(ours.inner, PlainTokenizer)
    whole = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.encode("<new><other><more> a") == whole.encode("<new><other><more> a")


def test_template_file_comes_before_the_one_in_the_configuration(
    demo: Path, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    ours = changed(demo, tmp_path)
    assert ours.apply_chat_template([{"role": "user", "content": "Once"}]) == ours.encode("Once")


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer.*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_model_alone_names_the_packages_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(CheckpointError, match=r"SentencePiece model only.*sentencepiece") as info:
        load_tokenizer(tmp_path)
    assert "enginebay[sentencepiece]" in str(info.value)
    assert "tiktoken" not in str(info.value)


def test_broken_tokenizer_is_named(demo: Path, tmp_path: Path) -> None:
    shutil.copy(demo / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_tokenizer_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
