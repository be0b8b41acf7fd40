"""Untrusted files: configurations, weights, tokenizers, stored states. 10,000 hostile inputs
in all, see docs/testing.md.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors.numpy import save

from enginebay.compose.composition import find_family
from enginebay.config import EngineConfig, make_config
from enginebay.plugins.registry import Registry, load_registry
from enginebay.toml_file import read_toml
from enginebay_models.safetensors_file import read_file
from enginebay_models.source import CheckpointSource
from enginebay_models.tokenizer import load_tokenizer
from enginebay_vinference import SampleState
from tests.brief import BRIEF
from tests.hostile.inputs import VALUES, changed, few_or_all, hold
from tests.unit.vinference.test_vinference_state import make_state


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the small model, whose files the tests write over."""
    return Path(shutil.copytree(BRIEF, tmp_path_factory.mktemp("hostile") / "model"))


CONFIG = json.loads((Path(BRIEF) / "config.json").read_text(encoding="utf-8"))
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_FIELDS = (
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "original_max_position_embeddings", "attention_factor", "truncate", "mscale",
    "mscale_all_dim", "partial_rotary_factor", "short_factor", "long_factor",
)  # fmt: skip
ROPE = st.builds(
    lambda kind, fields: {"rope_type": kind, **fields},
    st.sampled_from(
        ["default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional", "x"]
    ),
    st.dictionaries(st.sampled_from(ROPE_FIELDS), VALUES, max_size=5),
)
FIELDS = (
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "head_dim", "quantization_config", "partial_rotary_factor",
    "attention_bias", "mlp_bias", "hidden_act", "tie_word_embeddings", "rms_norm_eps",
    "original_max_position_embeddings",
)  # fmt: skip
CONFIGS = st.builds(
    lambda config, name, rope: {**config, **name, **rope},
    changed(CONFIG, FIELDS),
    st.sampled_from([{"architectures": [name]} for name in ARCHITECTURES] + [{}]),
    st.one_of(
        st.just({}),
        st.fixed_dictionaries({"rope_scaling": ROPE}),
        st.fixed_dictionaries({"rope_parameters": ROPE}),
    ),
)


@few_or_all(40, 2500)
def test_configurations_of_checkpoints(folder: Path, registry: Registry, count: int) -> None:
    def build(config: dict[str, Any]) -> None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        source = CheckpointSource(str(folder))
        if isinstance(layers := config.get("num_hidden_layers"), int) and 20 < layers <= 1000:
            return  # a size that is served, and takes a second to make
        model = find_family(registry, source.architecture).build(source.config, dtype="float32")
        model.weight_specs()

    assert hold(CONFIGS, build, count) > count // 4


WEIGHTS = save(
    {
        "a": np.ones((4, 3), np.float32),
        "b": np.zeros(8, np.float16),
        "c": np.zeros((0, 2), np.float32),
    }
)
HEADER_BYTES = 8 + int.from_bytes(WEIGHTS[:8], "little")
HEADER = json.loads(WEIGHTS[8:HEADER_BYTES])


def with_header(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + WEIGHTS[HEADER_BYTES:]


def with_bytes(content: bytes, places: list[tuple[int, int]], length: int) -> bytes:
    """`content` with bytes changed, and cut to a length."""
    made = bytearray(content)
    for place, value in places:
        made[place % len(made)] = value
    return bytes(made[:length])


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    places = st.lists(
        st.tuples(st.integers(0, len(content)), st.integers(0, 255)), min_size=1, max_size=5
    )
    return st.builds(
        with_bytes, st.just(content), places, st.integers(0, len(content)) | st.just(len(content))
    )


TENSORS = st.one_of(
    changed(HEADER, ("d", "__metadata__")).map(with_header),
    st.dictionaries(
        st.sampled_from(["a", "b", "c", "x" * 3000]),
        changed({"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}),
        min_size=1,
    ).map(with_header),
    st.tuples(st.integers(0, 80), st.integers(0, 80)).map(
        lambda at: with_header(
            {
                n: {"dtype": "U8", "shape": [8], "data_offsets": [b, b + 8]}
                for n, b in zip("ab", at, strict=True)
            }
        )
    ),
    VALUES.map(with_header),
    damaged(WEIGHTS),
    st.binary(max_size=40),
)


@few_or_all(60, 2000)
def test_files_of_weights(tmp_path: Path, count: int) -> None:
    path = tmp_path / "model.safetensors"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        for tensor in read_file(path).values():
            tensor.view()

    assert hold(TENSORS, read, count) > count // 3


TOKENIZER_CONFIG = json.loads((Path(BRIEF) / "tokenizer_config.json").read_text(encoding="utf-8"))
TOKENIZER = (Path(BRIEF) / "tokenizer.json").read_bytes()
TOKENIZER_FIELDS = (
    "chat_template", "tokenizer_class", "added_tokens_decoder", "eos_token", "bos_token",
    "pad_token", "additional_special_tokens", "extra_special_tokens", "add_bos_token",
    "model_max_length", "x_token",
)  # fmt: skip


@few_or_all(15, 700)
def test_settings_of_tokenizers(folder: Path, count: int) -> None:
    def load(settings: Any) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        load_tokenizer(folder).encode("Once")

    try:
        assert hold(changed(TOKENIZER_CONFIG, TOKENIZER_FIELDS) | VALUES, load, count) > count // 4
    finally:
        (folder / "tokenizer_config.json").write_text(
            json.dumps(TOKENIZER_CONFIG), encoding="utf-8"
        )


@few_or_all(6, 300)
def test_damaged_tokenizers(folder: Path, count: int) -> None:
    def load(content: bytes) -> None:
        (folder / "tokenizer.json").write_bytes(content)
        load_tokenizer(folder).encode("Once upon")

    try:
        hold(damaged(TOKENIZER), load, count)
    finally:
        (folder / "tokenizer.json").write_bytes(TOKENIZER)


STATE = make_state(
    model_kwargs={
        "attention_mask": np.ones((2, 3), np.int32),
        "views": [{"key": np.zeros((2, 4))}],
    },
    padded_length=2,
)
PLAIN = STATE.to_dict()
TAGGED = st.builds(
    lambda tag, value: {tag: value},
    st.sampled_from(["$array", "$key", "$float", "$tuple", "$dict", "$precompile", "$x"]),
    VALUES | changed(PLAIN["sequences"]["$array"]),
)


@few_or_all(60, 1300)
def test_stored_states_as_json(count: int) -> None:
    def load(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
        state = SampleState.from_json(json.dumps({**pair[0], **pair[1]}))
        state.check(2048)

    tagged = st.dictionaries(st.sampled_from(list(PLAIN)), TAGGED, max_size=2)
    assert hold(st.tuples(changed(PLAIN), tagged), load, count) > count // 2


@few_or_all(40, 700)
def test_stored_states_as_files(tmp_path: Path, count: int) -> None:
    STATE.save(tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()

    def load(changed_content: bytes) -> None:
        (tmp_path / "state").write_bytes(changed_content)
        SampleState.load(tmp_path / "state")
        assert changed_content == content, "damage was not seen"

    assert hold(damaged(content), load, count) > count // 2


SETTINGS = st.dictionaries(
    st.sampled_from([*EngineConfig.model_fields, "x" * 500, "gpu"]), VALUES, min_size=1, max_size=4
)


@few_or_all(60, 1200)
def test_engine_configurations(count: int) -> None:
    assert hold(SETTINGS, make_config, count) > count // 2


TOML = st.one_of(
    st.text(max_size=40),
    st.lists(st.text("[]{}=.,\"'\n#a1_-:", max_size=30), max_size=4).map("\n".join),
    SETTINGS.map(
        lambda values: "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
    ),
    st.sampled_from(
        [
            "[" * 5000,
            "a = " + "[" * 5000 + "]" * 5000,
            ".".join("a" * 5000) + " = 1",
            f"seed = {'9' * 5000}",
        ]
    ),
)


@few_or_all(40, 600)
def test_configuration_files(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.toml"

    def read(text: str) -> None:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        make_config(read_toml(path))

    assert hold(TOML, read, count) > count // 3
