"""A model's configuration may ask for a quantised cache: every engine and API does as it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay.compose.composition import make_plan
from enginebay.compose.model_cache import model_cache
from enginebay.compose.plan import Plan
from enginebay.config import make_config
from enginebay.errors import ConfigError, UnsupportedError
from enginebay.ops.head_rotation import rotate_on_host
from enginebay.ops.kv_storage import QUANTIZE, TOLERANCES
from enginebay.plugins.registry import load_registry
from enginebay_oengine import HBMPageManager, PagedAttentionCache, oEngine, open_model
from enginebay_oengine.cache_quantizer import make_quantizer
from enginebay_testing.tiny import write_tiny_checkpoint

METHOD, BLOCK_SIZE = "kv_cache_quantization_method", "kv_cache_quantization_blocksize"
MEANT = {
    "8bit": "int8",
    "A8BIT": "int8",
    "a8q": "int8",
    "int8": "int8",
    "4bit": "uint4",
    "a4q": "uint4",
    "uint4": "uint4",
    "int4": "uint4",
    "fp8": "fp8",
    "float8": "fp8",
}
NONE = [None, "none", "None", ""]

Make = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Make:
    """Writes a tiny checkpoint whose configuration has some fields more."""
    made = write_tiny_checkpoint(tmp_path / "tiny", load_registry())
    usual = json.loads((made / "config.json").read_text())

    def write(**fields: Any) -> Path:
        (made / "config.json").write_text(json.dumps(usual | fields))
        return made

    return write


def planned(folder: Path, **fields: Any) -> Plan:
    return make_plan(make_config({"model": str(folder)}, fields))


@pytest.mark.parametrize(("method", "storage"), MEANT.items())
def test_each_method_has_a_storage(method: str, storage: str) -> None:
    found = model_cache({METHOD: method})
    assert found is not None
    assert found.dtype == storage


@pytest.mark.parametrize("engine", ["oengine", "esurge", "vinference"])
def test_the_models_method_is_the_dtype_of_the_cache(folder: Make, engine: str) -> None:
    plan = planned(folder(**{METHOD: "8bit"}), engine=engine)
    assert plan.config.kv_cache_dtype == "int8"
    assert {spec.kv_storage for spec in plan.model.info.attention.values()} == {"int8"}
    [reason] = [one for one in plan.reasons if one.setting == "kv_cache_dtype"]
    assert reason.chosen == "int8"
    assert reason.why == f"{METHOD} = '8bit' in the model's configuration"
    assert plan.config == planned(folder(), engine=engine, kv_cache_dtype="int8").config


@pytest.mark.parametrize("method", NONE)
def test_no_method_is_the_usual_cache(method: str | None) -> None:
    assert model_cache({METHOD: method}) is model_cache({}) is None


def test_a_value_of_the_caller_wins(folder: Make) -> None:
    for method, dtype in (("8bit", "float32"), ("nf4", "uint4")):
        plan = planned(folder(**{METHOD: method}), kv_cache_dtype=dtype)
        assert plan.config.kv_cache_dtype == dtype


@pytest.mark.parametrize("method", ["nf4", "8 bits", 8, ["8bit"]])
def test_another_method_is_refused_with_what_is_allowed(method: Any) -> None:
    with pytest.raises(UnsupportedError, match=METHOD) as refusal:
        model_cache({METHOD: method})
    message = str(refusal.value)
    assert repr(method) in message
    assert "8bit (int8), 4bit (uint4), fp8" in message
    assert "--cache-dtype" in message


def made(model: Any) -> oEngine:
    opened = open_model(model)
    metadata = PagedAttentionCache.create_metadata(opened, page_size=16, num_pages=3)
    storage, manager = PagedAttentionCache.init_cache(metadata), HBMPageManager(metadata)
    return oEngine(opened, None, storage, manager)


# holds O01
@pytest.mark.parametrize(("method", "storage"), [("8bit", "int8"), ("4bit", "uint4")])
def test_oengines_quantizer_is_that_of_its_cache(folder: Make, method: str, storage: str) -> None:
    engine = made(folder(**{METHOD: method, BLOCK_SIZE: 32}))
    quantizer = engine.quantizer
    assert (quantizer.quantization_method, quantizer.block_size) == (storage, 32)
    assert quantizer.quantization_platform == engine.model.plan.platform.env().platform
    stored = [array.dtype for array in jax.tree.leaves(engine.storage)]
    assert np.dtype("int8" if storage == "int8" else "uint8") in stored
    keys = np.random.default_rng(0).normal(size=(3, 2, 16)).astype(np.float32)
    read = np.asarray(quantizer(keys))
    assert read.shape == keys.shape
    # The cache rounds the rotated heads: its tolerance is relative to their largest numbers.
    stored, wanted = (rotate_on_host(x, quantizer.rotated) for x in (read, keys))
    error = np.abs(stored - wanted).max(-1) / np.abs(wanted).max(-1)
    assert 0 < error.max() <= TOLERANCES[storage]


@pytest.mark.parametrize("method", ["8bit", "4bit"])
def test_oengines_quantizer_rotates_heads_as_the_cache_does(folder: Make, method: str) -> None:
    """One large channel costs the others little, which codes of unrotated heads do not give."""
    keys = np.random.default_rng(0).normal(size=(64, 2, 16)).astype(np.float32)
    keys[..., 3] = 40
    engine = made(folder(**{METHOD: method}))
    read = np.asarray(engine.quantizer(keys))
    quantize = QUANTIZE[engine.quantizer.quantization_method]
    plain = np.asarray(jax.jit(lambda x: quantize(x).values())(keys))
    others = np.arange(16) != 3
    assert np.abs(read - keys)[..., others].mean() < 0.6 * np.abs(plain - keys)[..., others].mean()


def test_a_cache_that_is_not_quantised_changes_no_value(folder: Make) -> None:
    quantizer = made(folder()).quantizer
    assert (quantizer.quantization_method, quantizer.block_size) == (None, 64)
    keys = np.ones((2, 4), np.float32) / 3
    assert np.array_equal(np.asarray(quantizer(keys)), keys)


@pytest.mark.parametrize("size", [0, "64", True])
def test_a_wrong_block_size_is_refused(folder: Make, size: Any) -> None:
    plan = planned(folder(**{BLOCK_SIZE: size}))
    with pytest.raises(ConfigError, match=BLOCK_SIZE):
        make_quantizer(plan)
