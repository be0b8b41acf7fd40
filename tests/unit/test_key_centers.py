"""The centres of keys, which quantised caches subtract: what they are, what they bring, and that
rows keep their meaning.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.compose.key_centers import CenteredModel, with_measured_centers
from enginebay.compose.plan import Plan
from enginebay.errors import InputError
from enginebay.ops.key_centers import center_path, has_center
from enginebay.ops.spec import AttnSpec
from enginebay.weights import merge_weights
from enginebay_esurge import eSurge
from enginebay_oengine.paged_cache import make_quantizer
from enginebay_testing.engine_moves import put_and_compare
from enginebay_testing.reference import ReferenceModel
from tests.brief import LEAST
from tests.parity import tiny
from tests.unit.test_head_rotation import SIZES, row_of

PATH = center_path("full")
IDS = np.random.default_rng(3).integers(5, 90, 60).tolist()


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose heads have one large bias in all keys, as those of trained models have."""
    folder = tmp_path_factory.mktemp("biased")
    tiny.write_checkpoint(folder, "qwen2-tied")
    tensors = load_file(folder / "model.safetensors")
    for bias in (tensor for name, tensor in tensors.items() if name.endswith("k_proj.bias")):
        heads = bias.reshape(2, -1)
        heads[:, heads.shape[1] // 2 - 1] += 40  # of the pair that turns slowest with the position
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_a_group_has_no_centre_where_a_shift_of_its_scores_would_count() -> None:
    spec = AttnSpec(4, 2, 64).stored_as("uint4")
    assert has_center(spec)
    assert has_center(spec.stored_as("int8"))
    assert has_center(dataclasses.replace(spec, window=8, inputs=("slopes",)))
    for without in (
        spec.stored_as("fp8"),
        spec.stored_as("float32"),
        dataclasses.replace(spec, softcap=30.0),
        dataclasses.replace(spec, inputs=("sinks",)),
        dataclasses.replace(spec, inputs=("from_a_stranger",)),
        dataclasses.replace(spec, return_lse=True),
        dataclasses.replace(spec, kv_shared=True),
        dataclasses.replace(spec, num_kv_heads=1, v_head_dim=48, v_is_k_prefix=True),
    ):
        assert not has_center(without), without


def _plan(model: str, storage: str = "int8") -> Plan:
    return make_plan(EngineConfig(**SIZES | {"model": model, "kv_cache_dtype": storage}))


def _mean_keys(weights: Mapping[str, Any], config: Mapping[str, Any], num_ids: int) -> np.ndarray:
    """Return the mean keys of the first layer, f64, computed from the weights."""
    ids = np.random.default_rng(0).integers(0, num_ids, 64, np.int32)
    x = np.asarray(weights["embed"], np.float64)[ids]
    x /= np.sqrt((x**2).mean(axis=1, keepdims=True) + config["rms_norm_eps"])
    x *= np.asarray(weights["layers.0.attention_norm.scale"], np.float64)
    qkv = np.asarray(weights["layers.0.attention.qkv"], np.float64)
    keys = np.einsum("ti,hdi->thd", x, qkv[:, -2])
    half = keys.shape[-1] // 2
    positions = np.arange(64) * min(32, config["max_position_embeddings"] // 64)
    angles = positions[:, None, None] * config["rope_theta"] ** (-np.arange(half) / half)
    a, b = keys[..., :half], keys[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    found: np.ndarray = turned.mean(axis=0)
    return found


def test_a_centre_is_the_mean_key_of_random_tokens_the_same_in_each_load() -> None:
    plan = _plan(LEAST)
    weights = plan.load_weights()
    wanted = _mean_keys(weights, plan.checkpoint.config, plan.model.info.num_token_ids)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(np.asarray(weights[PATH])[0], wanted, atol=1e-4)
    np.testing.assert_array_equal(plan.load_weights()[PATH], weights[PATH])
    broken = {
        **weights,
        PATH: jnp.zeros_like(weights[PATH]),
        "layers.0.attention_norm.scale": weights["layers.0.attention_norm.scale"] * np.nan,
    }
    again = with_measured_centers(plan.model, plan.kernels, plan.placement, broken)
    assert not np.asarray(again[PATH]).any()  # the weights are not finite, and so are no means


@pytest.mark.long
@pytest.mark.parametrize("storage", ["int8", "uint4"])
def test_what_all_keys_have_in_common_costs_little(biased: str, storage: str) -> None:
    wanted = ReferenceModel(_plan(biased, "float32")).logits(IDS)
    plan, errors = _plan(biased, storage), []
    weights = plan.load_weights()
    for given in (weights, {**weights, PATH: jnp.zeros_like(weights[PATH])}):
        off = ReferenceModel(plan, given).logits(IDS) - wanted
        errors.append(np.sqrt((off[:, :90] ** 2).mean()))
    assert errors[0] < 0.5 * errors[1], errors


@pytest.mark.long
def test_a_row_has_the_keys_of_the_model_and_keeps_its_bytes(
    biased: str,
) -> None:
    found = []
    for dtype in ("float32", "int8"):
        given = SIZES | {"model": biased, "kv_cache_dtype": dtype}
        with LLM(given.pop("model"), **given) as llm:
            found.append(llm.run_on_engine(functools.partial(row_of, llm.engine, IDS[:21])))
            if dtype == "int8":
                llm.run_on_engine(functools.partial(put_and_compare, llm.engine, IDS[:21]))
    wanted, taken = (row.groups["full"].arrays for row in found)
    for name, array in wanted.items():
        off = np.abs(taken[name] - array).max(axis=-1) / np.abs(array).max(axis=-1)
        assert off.max() < 0.02, name


def test_an_inner_model_keeps_its_specs_and_zeros_have_the_shape_of_any_part() -> None:
    model = _plan(LEAST).model
    assert isinstance(model, CenteredModel)
    kept = model.inner.weight_specs()
    model.inner.weight_specs = lambda: kept  # type: ignore[method-assign]
    assert model.weight_specs().keys() - kept.keys() == {PATH}
    whole = model.tensor_sources()[PATH].build((), (slice(None), slice(1, 2), slice(None)))
    layers, _, width = model.weight_specs()[PATH].shape
    assert whole.shape == (layers, 1, width)


def test_weights_of_a_quantised_cache_can_be_set_in_an_engine_without_one() -> None:
    base, center = {"a": jnp.zeros(2)}, {PATH: jnp.ones((1, 2, 32))}
    merged = merge_weights(base, {"a": np.ones(2, np.float32)} | center)
    assert merged.keys() == base.keys()
    with pytest.raises(InputError, match="weight 'other'"):
        merge_weights(base, {"other": np.ones(2, np.float32)})


def _changed(engine: eSurge, change: Mapping[str, Any]) -> tuple[np.ndarray, list[int]]:
    """Return the centres of an engine and its tokens after a prompt, with other weights."""
    engine.update_model_weights(graphstate=change)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    [output] = engine.generate([IDS], params)
    return np.asarray(engine.engine.executor.weights()[PATH]), output.outputs[0].token_ids


@pytest.mark.long
def test_centres_are_measured_again_when_weights_are_replaced_by_path(biased: str) -> None:
    choices = SIZES | {"kv_cache_dtype": "int8", "max_model_len": 96}
    del choices["model"], choices["engine"]
    with eSurge(biased, **choices) as engine:
        first = dict(engine.engine.executor.weights())
        shifted = {p: w for p, w in first.items() if "bias" in p and "attention" in p}
        assert shifted
        others = {p: -w for p, w in shifted.items()}
        whole = {p: w for p, w in (first | others).items() if p != PATH}
        centers, new = _changed(engine, whole)
        plan = engine.plan
        wanted = with_measured_centers(plan.model, plan.kernels, plan.placement, first | others)
        np.testing.assert_array_equal(centers, wanted[PATH])
        assert np.abs(centers - first[PATH]).max() > 10
        assert ReferenceModel(plan, wanted).first_wrong_token(IDS, new, 1e-3) is None
        again, old = _changed(engine, shifted)
        np.testing.assert_array_equal(again, first[PATH])
        assert ReferenceModel(plan, first).first_wrong_token(IDS, old, 1e-3) is None
        zeros = jnp.zeros_like(first[PATH])
        given, _ = _changed(engine, {**others, PATH: zeros})
        np.testing.assert_array_equal(given, zeros)
        engine.update_model_weights(biased, graphstate=others)
        of_both = engine.engine.executor.weights()[PATH]
        np.testing.assert_array_equal(np.asarray(of_both), wanted[PATH])


@pytest.mark.long
def test_oengines_quantizer_with_a_centre_is_that_of_the_cache(biased: str) -> None:
    plan = _plan(biased)
    centers = np.asarray(plan.load_weights()[PATH])[0]
    keys = centers + np.random.default_rng(0).normal(size=(50, *centers.shape)).astype(np.float32)
    quantizer = make_quantizer(plan)
    errors = [np.abs(np.asarray(quantizer(keys, c)) - keys).max() for c in (None, centers)]
    assert errors[1] < 0.5 * errors[0]
    less = jnp.asarray(keys - centers)
    np.testing.assert_allclose(quantizer(keys, centers), quantizer(less) + centers, atol=1e-5)
