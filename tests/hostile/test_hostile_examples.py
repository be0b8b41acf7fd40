"""Hostile inputs that were written by hand: each ends with one of the errors that it may be refused
by.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from enginebay import LLM, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.config import make_config
from enginebay.errors import CheckpointError, ConfigError, InputError
from enginebay.toml_file import read_toml
from enginebay_models.checkpoint import find_tensors
from enginebay_models.safetensors_file import read_file
from enginebay_models.source import CheckpointSource
from enginebay_models.tokenizer import load_tokenizer
from enginebay_oengine import ModelRunnerSamplingMetadata
from enginebay_vinference import SampleState, vInferenceConfig, vInferencePreCompileConfig
from tests.brief import BRIEF
from tests.hostile.inputs import is_refused, nested
from tests.unit.serving import SIZES

DEEP = 5000
DEEPER = 200_000
"""Levels beyond json's own limit on recursion."""
DEEP_JSON = [
    "[" * DEEPER,
    "[" * DEEP,
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    json.dumps(nested(110)),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the small model to write over."""
    return Path(shutil.copytree(BRIEF, tmp_path / "model"))


def write_config(folder: Path, **changes: Any) -> None:
    config = json.loads((Path(BRIEF) / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text", [*DEEP_JSON, '{"vocab_size": ' + "9" * 5000 + "}", "\ud800"], ids=range(7)
)
def test_nested_and_endless_json(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    opened = (
        load_tokenizer if name.startswith("tokenizer") else lambda at: CheckpointSource(str(at))
    )
    with pytest.raises(CheckpointError, match="cannot be read") as refused:
        opened(folder)
    assert str(refused.value).count("Allowed:") == 1


@pytest.mark.parametrize("text", DEEP_JSON, ids=range(5))
def test_nested_json_elsewhere(folder: Path, text: str) -> None:
    for parse in (
        SampleState.from_json,
        vInferenceConfig.from_json,
        vInferencePreCompileConfig.from_json,
        ModelRunnerSamplingMetadata.from_json,
    ):
        with pytest.raises(InputError, match="nest"):
            parse(text)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with pytest.raises(CheckpointError, match="not a JSON object"):
        find_tensors(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_tensors(folder)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * DEEP,
        "a = " + "{b=" * DEEP,
        ".".join("a" * 500) + " = 1",
        f"[{'.'.join('b' * 500)}]",
        f"seed = {'9' * 5000}",
    ],
)
def test_nested_and_endless_toml(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"configuration file .*(nest|digits)"):
        read_toml(tmp_path / "a.toml")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10**400},
        {"rms_norm_eps": 10**400},
        {"rms_norm_eps": float("inf")},
        {"rope_parameters": {"rope_type": "linear", "factor": 10**400}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 1e308,
                "original_max_position_embeddings": 1e308,
            }
        },
        {"hidden_size": 10**400},
        {"vocab_size": 2**31},
        {"max_position_embeddings": 2**63},
        {"num_hidden_layers": 10**9},
    ],
)
def test_numbers_beyond_what_is_computed_with(folder: Path, changes: dict[str, Any]) -> None:
    write_config(folder, **{"rope_parameters": None, "rope_scaling": None} | changes)
    with pytest.raises(CheckpointError, match=next(iter(changes)).split("_")[0]):
        make_plan(make_config({"model": str(folder)}))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_folder_where_a_file_should_be(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    opened = {
        "model.safetensors": find_tensors,
        "config.json": lambda f: CheckpointSource(str(f)),
        "tokenizer.json": load_tokenizer,
    }
    with pytest.raises(CheckpointError):
        opened[name](folder)


def test_a_pipe_where_a_file_should_be(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match="no file"):
        find_tensors(folder)


def test_a_folder_where_a_configuration_should_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    "name", ["~nobody_has_this_name/x", "a\0b", "x" * 5000, "x/" * 3000, "\n", ""]
)
def test_names_of_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        CheckpointSource(name)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("wrong", [2048, -1, 2**40])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_sequence_outside_the_vocabulary(folder: Path, name: str, wrong: int) -> None:
    write_config(folder)
    path = folder / name
    fields = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(fields | {"eos_token_id": [1, wrong]}))
    with pytest.raises(CheckpointError, match=rf"eos_token_id = {wrong}\. Allowed: 0 to 2047"):
        make_plan(make_config({"model": str(folder)}))


def test_a_pad_outside_the_vocabulary_counts_as_none(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_config(folder, pad_token_id=-1, bos_token_id=2048)
    info = CheckpointSource(str(folder)).token_info
    assert (info.pad_token_id, info.bos_token_id) == (None, None)


def file_of(path: Path, header: str, num_bytes: int = 64) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(num_bytes))
    return path


TENSOR = '"{}": {{"dtype": "F32", "shape": [4], "data_offsets": [{}, {}]}}'


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ([("a", 0, 16), ("b", 8, 24)], "puts tensors 'a' and 'b' into the same bytes"),
        ([("a", 0, 16), ("b", 0, 16)], "into the same bytes"),
        ([("a", 0, 16), ("a", 16, 32)], "names 'a' twice"),
    ],
)
def test_overlapping_and_duplicate_tensors(tmp_path: Path, places: list[Any], found: str) -> None:
    header = "{" + ", ".join(TENSOR.format(*place) for place in places) + "}"
    with pytest.raises(CheckpointError, match=found):
        read_file(file_of(tmp_path / "a.safetensors", header))


def test_tensors_side_by_side_and_empty_ones_are_read(tmp_path: Path) -> None:
    header = "{" + ", ".join([TENSOR.format("a", 16, 32), TENSOR.format("b", 0, 16)])
    header += ', "c": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}}'
    assert read_file(file_of(tmp_path / "a.safetensors", header)).keys() == {"a", "b", "c"}


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(save({"a": np.zeros(4, np.float32)}))
    with pytest.raises(
        CheckpointError, match=r"tensor 'a' is in one\.safetensors and in two\.safetensors"
    ):
        find_tensors(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": "a"}},
        {"added_tokens_decoder": {"1": {"content": "a", "special": []}}},
        {"eos_token": 5},
        {"bos_token": {}},
        {"additional_special_tokens": [1]},
        {"tokenizer_class": []},
        {"chat_template": 5},
    ],
)
def test_settings_of_a_tokenizer_of_wrong_types(folder: Path, fields: dict[str, Any]) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json has {next(iter(fields))} = "):
        load_tokenizer(folder)


def test_a_chat_template_that_is_no_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "name",
    [
        "stop",
        "stop_token_ids",
        "stop_words_ids",
        "logit_bias",
        "processors",
        "bad_words",
        "max_tokens",
    ],
)
def test_values_of_parameters_that_are_nested_deeply(name: str) -> None:
    for value in (nested(5000), nested(5000, dict), (nested(5000),)):
        assert (
            is_refused(lambda value=value: SamplingParams(**{name: value})) or name == "processors"
        )


def test_messages_and_prompts_that_are_nested_deeply(faked: None) -> None:
    with LLM(config=make_config({"model": BRIEF, **SIZES})) as llm:
        for value in (nested(5000), nested(5000, dict)):
            assert is_refused(lambda value=value: llm.generate(value))
            is_refused(
                lambda value=value: llm.chat([{"role": "user", "content": "x", "more": value}])
            )


def test_settings_of_an_engine_that_are_nested_deeply() -> None:
    for name in ("engine", "scheduler", "kernels", "mesh", "processors", "shadow"):
        for value in (nested(5000), nested(5000, dict)):
            is_refused(lambda name=name, value=value: make_config({name: value}))
