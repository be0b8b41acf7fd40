"""A latent cache: what the family DeepSeek-V2 reads, what is counted, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import EngineConfig
from enginebay.compose.composition import make_engine, make_plan
from enginebay.compose.plan import Plan
from enginebay.compose.quick_cases import CheckSetting
from enginebay.compose.quick_check import quick_check
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.placement import make_placement
from enginebay.errors import (
    CheckpointError,
    ConfigError,
    IncorrectError,
    UnknownNameError,
    UnsupportedError,
)
from enginebay.ops.attention import ATTENTION
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay_models.deepseek_v2 import family
from enginebay_models.experts import ExpertsConfig
from enginebay_pallas.layout import TpuRpaLayout
from enginebay_triton.layout import NhdLayout
from enginebay_xla.attention import XlaAttention, xla_attention
from enginebay_xla.layout import HndLayout
from tests.parity import tiny

VARIANT = "deepseek_v2-grouped"
LATENT = AttnSpec(4, 1, 32, v_head_dim=24, v_is_k_prefix=True)
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "engine": {"name": "oengine", "num_pages": 5, "page_size": 16},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("latent")
    return str(tiny.write_checkpoint(path, VARIANT))


def plan_of(folder: str, **choices: Any) -> Plan:
    return make_plan(EngineConfig(model=folder, **(SIZES | choices)))


def test_the_plan_counts_a_vector_a_token_and_no_values(folder: str) -> None:
    token = (24 + 8) * 4  # the compressed vector and the rotary part, f32
    cache_bytes = make_engine(plan_of(folder)).memory.cache_bytes
    assert cache_bytes == 3 * 5 * 16 * token
    split = make_engine(plan_of(folder, mesh={"tensor": 2})).memory
    assert split.cache_bytes == cache_bytes, "each device has it whole"
    narrow = make_engine(plan_of(folder, kv_cache_dtype={"latent": "bfloat16"})).memory
    assert narrow.cache_bytes * 2 == cache_bytes
    with pytest.raises(UnknownNameError, match=r"kv_cache_dtype 'full'. Allowed: latent"):
        plan_of(folder, kv_cache_dtype={"full": "bfloat16"})


def test_kernels_and_layouts_that_do_not_know_it_are_refused_with_a_reason(folder: str) -> None:
    split = "tests.zoo.right.split_attention:attention"
    with pytest.raises(UnsupportedError, match=r"split_attention.*does not support features mla"):
        plan_of(folder, kernels={"attention": split})
    layout = LATENT.make_layout(PlainLayout, 3, 8)
    bucket = Bucket(1, 1, 1, 1, 8, "decode")
    reason = xla_attention.caps.why_not(Env("cpu"), LATENT, bucket, layout)
    assert reason == "does not support layout hnd for values that are a prefix of keys"


@pytest.mark.parametrize("layout_type", [HndLayout, NhdLayout, TpuRpaLayout])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_built_in_layout_has_a_form_for_it(layout_type: type[KVLayout], dtype: str) -> None:
    spec = dataclasses.replace(LATENT, head_dim=576, v_head_dim=512, kv_dtype=dtype)
    layout = spec.make_layout(layout_type, 3, 8)
    (shape,) = layout.shapes().values()
    lanes = {"float32": 640, "bfloat16": 768}[dtype]
    assert shape.size == 24 * (lanes if layout_type is TpuRpaLayout else 576)


def test_a_latent_layout_reads_values_as_columns_of_the_keys() -> None:
    layout = LATENT.make_layout(HndLayout, 3, 8)
    assert set(layout.shapes()) == {"k"}
    k = np.random.default_rng(0).normal(size=(5, 1, 32)).astype(np.float32)
    slots = np.array([3, 9, 23, 0, 12], np.int32)
    cache = layout.write(layout.init(), jnp.asarray(slots), k, jnp.full((5, 1, 24), jnp.nan))
    for read in (layout.read_tokens, layout.read_exact):
        keys, values = read(cache, jnp.asarray(slots))
        np.testing.assert_array_equal(keys, k)
        np.testing.assert_array_equal(values, k[..., :24])
    placed = make_placement(jax.devices(), {"tensor": 2}, {"kv_heads": "tensor"}).cache(layout)
    assert placed["k"].is_fully_replicated
    assert LATENT.per_shard(2) == dataclasses.replace(LATENT, num_q_heads=2)
    assert layout.per_shard(2) == layout


class PlainLayout(HndLayout):
    """A layout that has no form for values that are a prefix of keys."""

    serves_v_prefix = False


@dataclasses.dataclass(frozen=True)
class OtherColumns(XlaAttention):
    """Attention that takes other columns of the keys for values."""

    def __call__(self, *arrays: Any, **fields: Any) -> Any:
        out, cache, lse = super().__call__(*arrays, **fields)
        return jnp.roll(out, 1, axis=-1), cache, lse


@pytest.mark.long
def test_a_kernel_by_hand_is_checked_with_values_that_are_a_prefix() -> None:
    setting = CheckSetting(Env("cpu"), [LATENT], HndLayout, "float32", ("mixed",), page_size=16)
    assert quick_check(ATTENTION, xla_attention, setting, "mine", "x") == 1
    with pytest.raises(IncorrectError, match="mixed, layout hnd: token 0 of row 0"):
        quick_check(ATTENTION, OtherColumns(), setting, "mine", "x")


def test_experts_are_chosen_from_the_groups_with_the_best_ones() -> None:
    experts = ExpertsConfig(6, 2, 1, False, frozenset(), 3, 1, scale=2.0)
    scores = jnp.log(jnp.array([[0.3, 0.05, 0.2, 0.25, 0.1, 0.1]]))
    weights, ids = experts.route(scores)
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.6, 0.1]], rtol=1e-5)
    free = dataclasses.replace(experts, num_chosen_groups=3)
    assert free.route(scores)[1].tolist() == [[0, 3]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 7}, "head_dim"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        family.build(tiny.CONFIGS[VARIANT] | changes, dtype="float32")


def test_heads_that_devices_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 shards for 4 query heads"):
        family.build(tiny.CONFIGS[VARIANT], dtype="float32", num_shards=3)
