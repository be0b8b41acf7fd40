"""Checkpoints are found, checked and loaded; whatever is wrong with one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from enginebay.contracts.model import Model, TokenInfo
from enginebay.errors import CheckpointError, ConfigError
from enginebay.weights import WeightFormat, WeightSpec
from enginebay_models.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    find_folder,
    find_tensors,
    read_token_info,
)
from enginebay_models.gpt2 import family as gpt2
from enginebay_models.llama import family
from enginebay_models.load import has_non_finite, load_weights
from enginebay_models.safetensors_file import read_file
from enginebay_models.source import CheckpointSource
from enginebay_testing.model_harness import place_over
from tests.unit.checkpoints import CONFIG, Tensors, model_of, random_tensors, write

NORM = "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def load(
    folder: Path,
    *,
    dtype: str = "float32",
    verify: bool = False,
    num_shards: int = 1,
    **fields: Any,
) -> Any:
    source = CheckpointSource(str(folder))
    model = family.build(source.config, dtype=dtype, num_shards=num_shards)
    place = place_over(num_shards).weight if num_shards > 1 else default_place
    return source.load_weights(
        model, form=WeightFormat(dtype), place=place, verify=verify, **fields
    )


GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_head": 2, "n_layer": 1}


def load_gpt2(folder: Path, model: Model) -> Any:
    source = CheckpointSource(str(folder))
    return source.load_weights(model, form=WeightFormat("float32"), place=default_place)


def default_place(path: str, spec: WeightSpec) -> None:
    return None


def whole_weights(model: Model, tensors: Tensors) -> Tensors:
    return {
        path: source.build(
            [tensors[name] for name in source.names],
            (slice(None),) * len(model.weight_specs()[path].shape),
        )
        for path, source in model.tensor_sources().items()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", random_tensors(model_of()))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_is_read_into_every_dtype(tmp_path: Path, stored: Any, dtype: str) -> None:
    tensors = {name: tensor.astype(stored) for name, tensor in random_tensors(model_of()).items()}
    loaded = load(write(tmp_path / "model", tensors), dtype=dtype)
    for path, wanted in whole_weights(model_of(), tensors).items():
        assert loaded[path].dtype == dtype
        np.testing.assert_array_equal(
            np.asarray(loaded[path]), wanted.astype(loaded[path].dtype), err_msg=path
        )


@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_hold_their_part_of_the_whole(folder: Path, num_shards: int) -> None:
    model = family.build(CONFIG, dtype="float32", num_shards=num_shards)
    loaded = load(folder, num_shards=num_shards)
    for path, wanted in whole_weights(model, random_tensors(model)).items():
        np.testing.assert_array_equal(np.asarray(loaded[path]), wanted, err_msg=path)
        for shard in loaded[path].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])
    assert (
        loaded["layers.0.attention.qkv"].addressable_shards[0].data.shape[0]
        == max(2, num_shards) // num_shards
    )


def test_weights_read_in_small_pieces_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = load(folder)
    monkeypatch.setattr("enginebay_models.load._PIECE_BYTES", 100)
    for path, weight in load(folder).items():
        np.testing.assert_array_equal(np.asarray(weight), np.asarray(at_once[path]), err_msg=path)


def split(folder: Path) -> dict[str, str]:
    """Turn a folder of one file into one of two files and an index."""
    tensors = random_tensors(model_of())
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (folder / SINGLE_FILE).unlink()
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in files.items() for name in own}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_several_files_are_read_by_their_index_or_without(folder: Path) -> None:
    single = load(folder)
    split(folder)
    for _ in range(2):
        for path, weight in load(folder).items():
            np.testing.assert_array_equal(
                np.asarray(weight), np.asarray(single[path]), err_msg=path
            )
        (folder / INDEX_FILE).unlink(missing_ok=True)


BUFFERS = (
    *("self_attn.rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attn.causal_mask"),
    *("attn.attention.bias", "attn.attention.masked_bias"),
)
"""Those of Llama, GPT-2, CodeGen and GPT-Neo, in older files."""


def test_known_buffers_and_a_tied_head_may_be_left_over(tmp_path: Path) -> None:
    tensors = random_tensors(model_of())
    for buffer in BUFFERS:
        tensors[f"model.layers.0.{buffer}"] = np.zeros(2, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"].astype(np.float32)
    loaded = load(write(tmp_path / "model", tensors, tie_word_embeddings=True))
    assert "lm_head" not in loaded


def test_a_model_stored_without_its_head_has_names_without_the_first_part(tmp_path: Path) -> None:
    tensors = random_tensors(model_of())
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    whole = load(write(tmp_path / "whole", tensors))
    for path, weight in load(write(tmp_path / "short", short)).items():
        np.testing.assert_array_equal(weight, whole[path])


def test_a_left_over_tensor_is_named_as_the_file_names_it(tmp_path: Path) -> None:
    tensors = random_tensors(model_of())
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    short["score.weight"] = np.ones((2, 16), np.float32)
    with pytest.raises(CheckpointError, match=r"has tensor 'score\.weight'"):
        load(write(tmp_path / "short", short))


def test_a_head_is_tied_to_the_embedding_by_whatever_name(tmp_path: Path) -> None:
    model = gpt2.build(GPT2, dtype="float32")
    tensors = random_tensors(model)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    folder = write(tmp_path / "model", tensors, **GPT2)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_gpt2(folder, model)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    assert load_gpt2(write(tmp_path / "tied", tensors, **GPT2), model)


@pytest.mark.parametrize("differs", ["in one value", "in shape"])
def test_a_stored_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(
    differs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "enginebay_models.checkpoint._TIED_ROWS", 8
    )  # the difference is in the last of four pieces
    tensors = random_tensors(model_of())
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1e-3
    tensors["lm_head.weight"] = head if differs == "in one value" else head[:-1]
    message = (
        r"tie_word_embeddings is true.*'lm_head\.weight' in .*'model\.embed_tokens\.weight' in "
        r"model"
    )
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path / "model", tensors, tie_word_embeddings=True))


def test_progress_ends_with_everything(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.nbytes for tensor in random_tensors(model_of()).values())
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)


def drop(tensors: Tensors) -> None:
    del tensors[DOWN]


def reshape(tensors: Tensors) -> None:
    tensors[DOWN] = np.ascontiguousarray(tensors[DOWN].T)


def add(tensors: Tensors) -> None:
    tensors["model.layers.2.input_layernorm.weight"] = np.ones(16, np.float32)


def narrow(tensors: Tensors) -> None:
    tensors[DOWN] = tensors[DOWN].astype(np.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, f"lacks tensor '{DOWN}'"),
        (
            reshape,
            rf"tensor '{DOWN}' in model.safetensors has shape \[24, 16\]. Allowed: \[16, 24\]",
        ),
        (add, r"has tensor 'model\.layers\.2\.input_layernorm\.weight', which a llama"),
        (narrow, f"tensor '{DOWN}' in model.safetensors is I8. Allowed: F32, BF16, F16"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    tensors = random_tensors(model_of())
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path / "model", tensors))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("place", [(3, 5), (-1, -1)], ids=["first head", "last head"])
def test_verify_names_the_tensor_that_is_not_finite(
    tmp_path: Path, value: float, stored: Any, place: tuple[int, int]
) -> None:
    tensors = {name: tensor.astype(stored) for name, tensor in random_tensors(model_of()).items()}
    tensors["model.layers.1.self_attn.k_proj.weight"][place] = value
    folder = write(tmp_path / "model", tensors)
    load(folder)
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'model\.layers\.1\.self_attn\.k_proj\.weight' .* holds NaN or inf",
    ):
        load(folder, verify=True)


def test_verify_names_the_tensor_that_overflows(tmp_path: Path) -> None:
    tensors = random_tensors(model_of())
    tensors[NORM][3] = 1e6
    with pytest.raises(CheckpointError, match=f"tensor '{NORM}' overflows float16"):
        load(write(tmp_path / "model", tensors), dtype="float16", verify=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_largest_and_smallest_numbers_are_finite(dtype: Any) -> None:
    limits = ml_dtypes.finfo(dtype)
    assert not has_non_finite(np.array([limits.max, limits.min, limits.tiny, 0], dtype))
    assert not has_non_finite(np.array([], dtype))


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -400])
def test_truncated_file_is_named(folder: Path, keep: int) -> None:
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[:keep])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors (is|says|has).*Fetch the file again"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("not json", "header that is not a JSON object"),
        ("[1]", "header that is not a JSON object"),
        ('{"a": {"dtype": "F32"}}', "describes tensor 'a'"),
        (
            '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
            "gives tensor 'a' 4 bytes",
        ),
        (
            '{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
            "describes tensor 'a' with shape",
        ),
        (
            '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
            "describes tensor 'a' with shape",
        ),
        (
            '{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
            "truncated: tensor 'a' of type 'F32' ends at byte 36",
        ),
    ],
)
def test_broken_header_is_named(folder: Path, header: str, message: str) -> None:
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(8)
    (folder / SINGLE_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        find_tensors(folder)


def test_missing_file_of_an_index_is_named(folder: Path) -> None:
    split(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"index\.json names 'b\.safetensors' for \d+ tensors"
    ):
        load(folder)


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {"a": 1}}', "{"])
def test_broken_index_is_named(folder: Path, index: str) -> None:
    (folder / INDEX_FILE).write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(folder)


def test_index_cannot_name_files_elsewhere(folder: Path) -> None:
    save_file({"a": np.zeros(1, np.float32)}, folder.parent / "x.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names '\.\./x\.safetensors'"):
        load(folder)


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"only pytorch_model\.bin, which are pickles; pickles are never read"
    ):
        load(folder)


def test_folder_without_weights(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        load(folder)


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no model: it has no config\.json"):
        CheckpointSource(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"architectures": []}',
        "{}",
        '{"architectures": "LlamaForCausalLM"}',
        '{"architectures": [[]]}',
    ],
)
def test_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        CheckpointSource(str(tmp_path))


def test_names_that_are_no_model(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file"):
        find_folder(str(folder / "config.json"))
    for name in ("./nowhere", "a/b/c", "/no/such/folder", "bad name", "--"):
        with pytest.raises(
            CheckpointError, match=r"there is no such folder.*'demo', a model's folder, or the id"
        ):
            find_folder(name)


def test_dtype_that_is_not_read(folder: Path) -> None:
    form = WeightFormat("float8")
    with pytest.raises(ConfigError, match="dtype 'float8'"):
        load_weights(model_of(), find_tensors(folder), form=form, place=default_place)


def test_special_tokens_of_both_files_are_united(folder: Path) -> None:
    config = {"eos_token_id": 2, "bos_token_id": 1}
    assert read_token_info(folder, config) == TokenInfo((2,), 1, None)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [7, 2], "bos_token_id": 0, "pad_token_id": 3}'
    )
    assert read_token_info(folder, config) == TokenInfo((7, 2), 0, 3)
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match="eos_token_id = '</s>'"):
        read_token_info(folder, config)


def test_demo_model_loads() -> None:
    source = CheckpointSource("demo")
    model = family.build(source.config, dtype="bfloat16")
    loaded = source.load_weights(
        model, form=WeightFormat("bfloat16"), place=default_place, verify=True
    )
    assert {path: spec.shape for path, spec in model.weight_specs().items()} == {
        p: a.shape for p, a in loaded.items()
    }
    assert source.token_info.eos_token_ids


def test_a_file_may_end_with_its_header(folder: Path) -> None:
    header = b"{}"
    (folder / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    assert not read_file(folder / SINGLE_FILE)
