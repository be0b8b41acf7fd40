"""LoRA on the host: reading adapters, and which of them are in slots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.adapters import (
    AdapterCountError,
    AdapterLoadedError,
    AdapterNotFoundError,
    AdapterRankError,
    SlotCounts,
)
from enginebay.contracts.prefix_key import PrefixKey
from enginebay.errors import CheckpointError, ConfigError, EnginebayError, PluginError
from enginebay_lora import planning
from enginebay_lora.layers import AdaptedLayer, adapted_layers, by_module
from enginebay_lora.model import LoraModel
from enginebay_lora.ops import part_slices
from enginebay_lora.peft import read_adapter
from enginebay_lora.store import LoraStore, SlotLimits
from enginebay_paged.prefix import key_digest
from enginebay_runtime.device import DeviceRows
from tests.adapters import base_tensors, change_config, change_tensors, write_adapter
from tests.brief import TINY

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def lora_model() -> LoraModel:
    """The plan's model of TINY, with two slots of rank 8."""
    plan = make_plan(EngineConfig(model=TINY, dtype="float32", max_loras=2, max_lora_rank=8))
    assert isinstance(plan.model, LoraModel)
    return plan.model


Layers = Mapping[str, AdaptedLayer]


@pytest.fixture(scope="module")
def layers(lora_model: LoraModel) -> Layers:
    return lora_model.layers


def read(folder: Path, layers: Layers) -> dict[str, np.ndarray]:
    return read_adapter(folder, layers, 8, np.dtype(np.float32))


def test_arrays_of_a_slot_are_the_product_in_the_models_own_order(
    lora_model: LoraModel, layers: Layers, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", TINY, rank=3)
    arrays, base = read(adapter, layers), base_tensors(TINY)
    products = {  # what the adapter adds to each tensor of the checkpoint
        name: 2.0 * (pair["B"] @ pair["A"])
        for name, pair in (
            (f"{module}.weight", dict(zip("AB", tensors, strict=True)))
            for module, tensors in _pairs(adapter).items()
        )
    }
    sources = lora_model.inner.tensor_sources()
    specs = lora_model.inner.weight_specs()
    for path, layer in lora_model.layers.items():
        source = sources[path]
        given = [products.get(name, np.zeros_like(base[name])) for name in source.names]
        whole = tuple(slice(0, size) for size in specs[path].shape)
        expected = source.build(given, whole)
        a, b = arrays[layer.a], arrays[layer.b]
        found = np.zeros_like(expected)
        for part, where in part_slices(b.shape[1:], layer.axis, layer.ends):
            found[where] = np.tensordot(b[(slice(None), *where)], a[part], axes=(0, 0))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def _pairs(adapter: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    from safetensors.numpy import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = {name.removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name}
    return {
        module.removeprefix("base_model.model."): (
            tensors[f"{module}.lora_A.weight"],
            tensors[f"{module}.lora_B.weight"],
        )
        for module in modules
    }


def test_factor_is_alpha_over_rank_or_over_its_root(layers: Layers, tmp_path: Path) -> None:
    usual = read(write_adapter(tmp_path / "a", TINY, rank=4, lora_alpha=4), layers)
    stable = read(
        write_adapter(tmp_path / "b", TINY, rank=4, lora_alpha=4, use_rslora=True), layers
    )
    for path, array in usual.items():
        factor = 2.0 if path.endswith(".b") else 1.0
        np.testing.assert_allclose(stable[path], factor * array, rtol=1e-6)


def test_a_rank_above_that_of_the_slots_has_its_own_error(layers: Layers, tmp_path: Path) -> None:
    folder = change_config(write_adapter(tmp_path / "a", TINY, targets=["q_proj"]), r=9)
    message = "r = 9. Allowed: at most 8. Pass --max-lora-rank 9."
    with pytest.raises(AdapterRankError, match=re.escape(message)):
        read(folder, layers)
    change_config(folder, r=4, rank_pattern={"layers.0.self_attn.q_proj": 9})
    with pytest.raises(AdapterRankError, match=r"rank 9 of layer 'model\.layers\.0"):
        read(folder, layers)


def test_ranks_and_factors_may_differ_between_layers(layers: Layers, tmp_path: Path) -> None:
    usual = write_adapter(tmp_path / "a", TINY, rank=2, lora_alpha=4)
    one = "model.layers.0.self_attn.q_proj"
    tensors = {
        f"base_model.model.{one}.lora_{kind}.weight": np.ones(shape, np.float32)
        for kind, shape in (("A", (5, 32)), ("B", (64, 5)))
    }
    changed = change_tensors(write_adapter(tmp_path / "b", TINY, rank=2, lora_alpha=4), tensors)
    change_config(changed, rank_pattern={f"^{one}": 5}, alpha_pattern={r"0\.self_attn.q_proj": 20})
    before, after = read(usual, layers), read(changed, layers)
    for layer in layers.values():
        if one not in {part.module for part in layer.parts}:
            np.testing.assert_array_equal(before[layer.a], after[layer.a])
            np.testing.assert_array_equal(before[layer.b], after[layer.b])
            continue
        a, b = after[layer.a], after[layer.b]
        assert a.shape[1] == len(b) == 5
        assert not a[1:, 2:].any(), "k and v have rank 2"
        first = (slice(None),) * layer.axis
        q, rest = (slice(0, layer.ends[0]),), (slice(layer.ends[0], None),)
        np.testing.assert_array_equal(b[(slice(None), *first, *q)], 4.0)
        np.testing.assert_array_equal(
            b[(slice(0, 2), *first, *rest)], before[layer.b][(slice(None), *first, *rest)]
        )


def test_only_so_many_adapters_are_held(layers: Layers, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", TINY, targets=["q_proj"])
    store = LoraStore(layers, SlotLimits(1, 8, loaded=1), np.dtype(np.float32))
    store.load("a", folder)
    with pytest.raises(AdapterCountError, match="Allowed: at most 1 loaded adapters"):
        store.load("b", folder)
    store.unload("a", ())
    store.load("b", folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q}.lora_B.weight": None}, "has no tensor lora_B"),
        ({f"{Q}.lora_A.weight": np.zeros((4, 5), np.float32)}, "has shape [4, 5]"),
        ({f"{Q}.lora_A.weight": np.full((4, 32), np.nan, np.float32)}, "holds NaN or infinity"),
        ({f"{Q}.lora_magnitude_vector": np.ones(4, np.float32)}, "lora_magnitude_vector'"),
        (
            {Q.replace("q_proj", "qkv_proj") + ".lora_A.weight": np.ones((4, 32), np.float32)},
            "self_attn.qkv_proj', which this model does not have or cannot adapt",
        ),
        (
            {f"{Q}.base_layer.weight": np.ones((64, 32), np.float32)},
            "q_proj.base_layer.weight'. Allowed: tensors of adapters",
        ),
        (
            {
                "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": np.ones(
                    (4, 32), np.float32
                )
            },
            "layer 'model.layers.0.mlp.experts.0.up_proj', which this model does not have",
        ),
        (
            {"base_model.model.lm_head.lora_A.weight": np.ones((4, 32), np.float32)},
            "'gate_proj', 'up_proj', 'lm_head'], if the model has this layer of its own",
        ),
    ],
    ids=["one tensor", "shape", "nan", "magnitude", "fused", "base", "experts", "head"],
)
def test_a_tensor_that_fits_no_slot_is_refused_by_name(
    layers: Layers, tmp_path: Path, changes: dict[str, np.ndarray | None], message: str
) -> None:
    folder = change_tensors(write_adapter(tmp_path / "a", TINY, targets=["q_proj"]), changes)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(folder, layers)


def test_files_that_are_cut_short_or_missing_are_one_clear_error(
    layers: Layers, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", TINY)
    tensors = folder / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="is truncated"):
        read(folder, layers)
    tensors.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(folder, layers)
    (folder / "adapter_config.json").write_text("[1")
    with pytest.raises(CheckpointError, match="is not a JSON object"):
        read(folder, layers)
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file"):
        read(tmp_path / "none", layers)


def test_only_the_layers_of_lora_targets_have_slots(tmp_path: Path) -> None:
    plan = make_plan(EngineConfig(model=TINY, max_loras=1, lora_targets=("q_proj", "down_proj")))
    assert isinstance(plan.model, LoraModel)
    leaves = {name.rpartition(".")[2] for name in by_module(plan.model.layers)}
    assert leaves == {"q_proj", "k_proj", "v_proj", "down_proj"}, "q, k and v are one weight"
    with pytest.raises(EnginebayError, match="targets that name linear layers of the model"):
        make_plan(EngineConfig(model=TINY, max_loras=1, lora_targets=("query",)))


def test_embeddings_and_heads_have_slots_where_they_are_named(tmp_path: Path) -> None:
    targets = ("embed_tokens", "lm_head")
    folder = write_adapter(tmp_path / "a", TINY, rank=3, targets=targets)
    plan = make_plan(EngineConfig(model=TINY, max_loras=1, max_lora_rank=8, lora_targets=targets))
    assert isinstance(plan.model, LoraModel)
    assert list(by_module(plan.model.layers)) == ["model.embed_tokens", "lm_head"]
    arrays = read(folder, plan.model.layers)
    assert {array.shape for array in arrays.values()} == {(96, 3), (3, 32), (1, 3, 32), (3, 96)}
    weight = {"base_model.model.lm_head.base_layer.weight": np.ones((96, 32), np.float32)}
    assert read(change_tensors(folder, weight), plan.model.layers).keys() == arrays.keys()
    tensors = {"base_model.model.lm_head.lora_embedding_A": np.ones((3, 96), np.float32)}
    with pytest.raises(CheckpointError, match="tensors of the kind of the layer"):
        read(change_tensors(folder, tensors), plan.model.layers)


def test_without_slots_the_model_is_the_familys_own() -> None:
    plan = make_plan(EngineConfig(model=TINY))
    assert plan.adapters is None
    assert not isinstance(plan.model, LoraModel)
    assert not adapted_layers(plan.model, 1, 1, ())
    rows = jax.eval_shape(lambda: DeviceRows.empty(2, 8))
    assert rows.adapters is None, "steps have no column of adapters"


def test_memory_plan_counts_slots(tmp_path: Path) -> None:
    from enginebay.contracts.executor import weight_bytes

    sizes = []
    for slots in (0, 1, 3):
        plan = make_plan(EngineConfig(model=TINY, dtype="float32", max_loras=slots))
        sizes.append(weight_bytes(plan.model, plan.placement, plan.weight_format))
    assert sizes[2] - sizes[0] == 3 * (sizes[1] - sizes[0]) > 0


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="with max_loras = 0"):
        make_plan(EngineConfig(model=TINY, lora={"a": str(tmp_path)}, max_loras=0))
    with pytest.raises(ConfigError, match="shadow together with adapters"):
        make_plan(EngineConfig(model=TINY, max_loras=1, shadow={"attention": "xla"}))


# Slots.


@pytest.fixture
def store(layers: Layers, tmp_path: Path) -> LoraStore:
    """Two slots, and the adapters a, b and c."""
    made = LoraStore(layers, SlotLimits(2, 8), np.dtype(np.float32))
    for seed, name in enumerate("abc"):
        made.load(name, write_adapter(tmp_path / name, TINY, seed=seed, targets=["q_proj"]))
    return made


def test_the_least_recently_used_idle_adapter_gives_up_its_slot(store: LoraStore) -> None:
    written: list[int] = []

    def place(name: str) -> int | None:
        return store.place(store.key_of(name))

    store.write = lambda slot, _: written.append(slot)
    assert [place("a"), place("b"), place("a")] == [1, 2, 1]
    assert place("c") is None, "rows use the adapters of both slots"
    store.release(store.key_of("a"))
    assert place("c") is None, "another row still uses a"
    store.release(store.key_of("a"))
    store.release(store.key_of("b"))
    assert place("c") == 2, "b was used before a, although a was released first"
    assert place("a") == 1
    assert written == [0, 1, 1], "an adapter in a slot is not written again"
    assert store.counts() == SlotCounts(slots=2, written=3, evicted=1)


def test_a_failed_write_leaves_the_slot_empty(store: LoraStore) -> None:
    errors = [RuntimeError("no room")]

    def fail_once(slot: int, arrays: Any) -> None:
        if errors:
            raise errors.pop()

    key = store.key_of("a")
    store.write = fail_once
    with pytest.raises(RuntimeError, match="no room"):
        store.place(key)
    assert store.place(key) == 1


def test_a_new_engine_has_empty_slots(store: LoraStore) -> None:
    first: list[int] = []
    second: list[int] = []
    key = store.key_of("a")
    store.write = lambda slot, _: first.append(slot)
    assert store.place(key) == 1
    store.write = lambda slot, _: second.append(slot)
    assert store.place(key) == 1
    assert (first, second) == ([0], [0]), "the adapter is written to the new engine too"


def test_an_adapter_that_is_loaded_again_has_another_key(store: LoraStore, tmp_path: Path) -> None:
    key = store.key_of("a")
    with pytest.raises(AdapterLoadedError, match="adapter 'a', which is loaded"):
        store.load("a", tmp_path / "b")
    store.unload("a", ())
    assert key not in store.loaded().values()
    with pytest.raises(AdapterNotFoundError, match="Allowed: the loaded adapters: 'b', 'c'"):
        store.key_of("a")
    store.load("a", tmp_path / "b")
    assert store.key_of("a") != key


def test_prefixes_are_not_shared_across_adapters() -> None:
    keys = [PrefixKey("w", "", (), adapter) for adapter in ("", "a#1", "a#2", "b#1")]
    assert len({key_digest(key) for key in keys}) == 4


def test_an_error_of_the_function_that_adds_adapters_names_the_op(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(plan: Any) -> Any:
        raise ZeroDivisionError("no ranks")

    monkeypatch.setattr(planning, "with_adapters", fail)
    with pytest.raises(PluginError, match="the adapters of op 'lora': ZeroDivisionError: no ranks"):
        make_plan(EngineConfig(model=TINY, max_loras=1))
