"""Serialised models: conversion, reading, damaged files, and what they generate."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from enginebay.compose.composition import find_family, open_checkpoint
from enginebay.compose.weight_format import choose_weight_format
from enginebay.config import make_config
from enginebay.errors import CheckpointError
from enginebay.plugins.registry import load_registry
from enginebay.weights import WeightFormat
from enginebay_dashinfer import stored_model
from enginebay_dashinfer.allspark import AsStatus, DashInferModel, Engine, HuggingFaceModel
from enginebay_dashinfer.stored_model import StoredModel
from tests.brief import BRIEF, LATE
from tests.unit.dashinfer.conftest import Settings


def copy(serialised: Path, folder: Path) -> tuple[Path, Path]:
    """The files of the serialised model, in another folder."""
    shutil.copytree(serialised, folder, dirs_exist_ok=True)
    return folder / "brief.asgraph", folder / "brief.asparam"


# holds D02
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_weights_are_the_converted_ones_bit_by_bit(tmp_path: Path, quantization: str) -> None:
    loader = HuggingFaceModel(BRIEF, "a/b", user_set_data_type="bfloat16").load_model()
    quantised = quantization != "none"
    loader.serialize_to_path(None, tmp_path, quantised, quantised)
    assert {one.name for one in tmp_path.iterdir()} >= {"a_b.asgraph", "a_b.asparam"}
    registry = load_registry()
    config = make_config({"model": BRIEF, "dtype": "bfloat16", "quantization": quantization})
    original = open_checkpoint(registry, config, BRIEF)
    model = find_family(registry, original.architecture).build(original.config, dtype="bfloat16")
    form, _ = choose_weight_format(registry, config, original, model, "bfloat16")
    stored = StoredModel(*loader.files())
    own, _ = choose_weight_format(
        registry, make_config({"model": BRIEF, "dtype": "bfloat16"}), stored, model, "bfloat16"
    )
    assert (own.name, own.quantized) == (form.name, form.quantized)
    place = functools.partial(lambda *_: None)
    expected = original.load_weights(model, form=form, place=place)
    found = stored.load_weights(model, form=own, place=place)
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    tokenizer = stored.load_tokenizer()
    assert tokenizer.encode("Once upon") == original.load_tokenizer().encode("Once upon")


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 5), (4, 8), (1,)])
def test_values_of_every_width_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0 if dtype == "uint4" else -8, 8, shape)
    array = jnp.asarray(values, jnp.int8).astype(dtype)
    raw = np.concatenate(list(stored_model.pieces(array)))
    assert raw.nbytes == stored_model.packed_bytes(array)
    np.testing.assert_array_equal(stored_model.unpacked(raw, dtype, shape), np.asarray(array))


# holds D02
def test_files_are_replaced_under_a_model_that_uses_them(tmp_path: Path) -> None:
    loader = HuggingFaceModel(BRIEF, "x", user_set_data_type="float32").load_model()
    stored = StoredModel(*loader.serialize_to_path(None, tmp_path).files())
    model = find_family(load_registry(), stored.architecture).build(stored.config, dtype="float32")
    form = WeightFormat("float32")
    weights = stored.load_weights(model, form=form, place=lambda *_: None)
    assert stored.mapped_bytes == sum(one.nbytes for one in jax.tree.leaves(weights))
    before = {path: np.array(one) for path, one in weights.items()}
    other = HuggingFaceModel(LATE, "x", user_set_data_type="float32").load_model()
    other.serialize_to_path(None, tmp_path)
    assert {one.suffix for one in tmp_path.iterdir()} == {".asgraph", ".asparam", ".tokenizer"}
    for path, one in weights.items():
        np.testing.assert_array_equal(np.asarray(one), before[path])


# holds D02
def test_temporary_files_go_with_their_loader() -> None:
    def folders() -> set[Path]:
        return set(Path(tempfile.gettempdir()).glob("enginebay-model-*"))

    before = folders()
    loader = HuggingFaceModel(BRIEF, "x", in_memory_serialize=True)
    assert loader.load_model().read_model_config().serialize(None).free_model() is loader
    assert len(folders() - before) == 1
    assert all(file.is_file() for file in loader.files())
    loader.free_memory_serialize_file()
    assert folders() == before
    loader.load_model().serialize_to_memory(None)
    assert folders() != before
    del loader
    assert folders() == before


# holds D02
def test_loaders_read_tokenizer_and_length(loader: DashInferModel) -> None:
    assert loader.get_tokenizer() is None
    tokenizer = loader.init_tokenizer().get_tokenizer()
    assert tokenizer is loader.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerBase), "as transformers has it"
    assert tokenizer.decode(tokenizer.encode("Once upon")) == "Once upon"
    assert loader.get_model_context_length() == loader.get_model_config()["max_position_embeddings"]
    assert loader.serialize_to_memory(None).serialize_to_path(None).free_model() is loader


# holds D02
def test_the_dtype_is_that_of_the_caller_or_of_the_checkpoint(tmp_path: Path) -> None:
    loader = HuggingFaceModel(BRIEF, "x", user_set_data_type="float16").load_model()
    loader.serialize_to_path(None, tmp_path)
    assert StoredModel(*loader.files()).description.dtype == loader.data_type == "float16"
    assert loader.load_model(override_data_type="float32").data_type == "float32"
    own = HuggingFaceModel(BRIEF, "x").load_model()
    assert own.data_type == own.get_model_config()["dtype"]
    with pytest.raises(ValueError, match="loaded"):
        own.free_model().checkpoint  # noqa: B018


# holds D02
def test_a_serialised_model_is_used_again(tmp_path: Path) -> None:
    loader = HuggingFaceModel(BRIEF, "x", user_set_data_type="float32").load_model()
    loader.serialize_to_path(None, tmp_path)
    param = tmp_path / "x.asparam"
    written = param.stat().st_mtime_ns
    again = HuggingFaceModel(BRIEF, "x").load_model()
    again.serialize_to_path(None, tmp_path, skip_if_exists=True)
    assert param.stat().st_mtime_ns == written
    assert again.files() == loader.files()
    param.write_bytes(param.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes"):
        again.serialize_to_path(None, tmp_path, skip_if_exists=True)


def test_wrong_arguments_of_loaders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        HuggingFaceModel(BRIEF, "x", trust_remote_code=True)
    with pytest.raises(ValueError, match="float32"):
        HuggingFaceModel(BRIEF, "x", user_set_data_type="int3")
    loader = HuggingFaceModel(BRIEF, "x")
    with pytest.raises(ValueError, match="serialize_to"):
        loader.files()
    with pytest.raises(ValueError, match="load_model"):
        loader.serialize_to_path(None, tmp_path)
    loader.load_model()
    with pytest.raises(ValueError, match="a folder"):
        loader.serialize(None)
    with pytest.raises(CheckpointError):
        HuggingFaceModel(tmp_path / "nothing", "x").load_model()
    with pytest.raises(CheckpointError, match="model_dir"):
        DashInferModel(tmp_path, "x").load_model()


def test_damaged_files_are_refused(
    serialised: Path, tmp_path: Path, engine: Engine, settings: Settings
) -> None:
    graph, param = copy(serialised, tmp_path)
    whole, text = param.read_bytes(), graph.read_text()

    def refused() -> None:
        wrong = settings()
        wrong.model_path, wrong.weights_path = str(graph), str(param)
        assert engine.install_model(wrong) is AsStatus.ALLSPARK_IO_ERROR
        assert "Allowed" in engine.last_error

    param.write_bytes(whole[:-100])
    refused()
    param.write_bytes(whole)
    for changed in ("{}", "[", json.dumps({"format": "x"}), text.replace("float32", "int7", 1)):
        graph.write_text(changed)
        refused()
    other = json.loads(text) | {"format_version": 99}
    graph.write_text(json.dumps(other))
    refused()
    graph.unlink()
    refused()


def test_a_checksum_finds_a_changed_weight(serialised: Path, tmp_path: Path) -> None:
    graph, param = copy(serialised, tmp_path)
    changed = bytearray(param.read_bytes())
    changed[-1] ^= 1
    param.write_bytes(changed)
    stored = StoredModel(graph, param)
    family = find_family(load_registry(), stored.architecture)
    model = family.build(stored.config, dtype="float32")
    with pytest.raises(CheckpointError, match="checksum"):
        stored.load_weights(model, form=WeightFormat("float32"), place=lambda *_: None, verify=True)
    with pytest.raises(CheckpointError, match="dtype"):
        stored.load_weights(
            family.build(stored.config, dtype="bfloat16"),
            form=WeightFormat("bfloat16"),
            place=lambda *_: None,
        )
