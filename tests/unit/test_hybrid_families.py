"""Families with Mamba-2: what is refused by name, and what their constants and states are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.errors import CheckpointError
from enginebay.ops.batches import derive_batch
from enginebay.ops.spec import Bucket
from enginebay_xla.ssd_scan import CHUNK, SCAN, ssd_scan
from tests.parity import tiny

KINDS = ("weight", "bias")


def build(family: str, **fields: Any) -> Any:
    config = tiny.CONFIGS[f"{family}-one"] | fields
    return tiny.family_of(family).build(config, dtype="bfloat16")


@pytest.mark.parametrize(
    ("family", "fields", "told"),
    [
        ("granitemoehybrid", {"layer_types": None}, "layer_types = null. Allowed: 3 of attention"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "at least one of them attention"),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba", "attention"]},
            "num_hidden_layers = 3. Allowed: 2, as many as layer_types has",
        ),
        (
            "granitemoehybrid",
            {"position_embedding_type": "alibi"},
            "position_embedding_type = 'alibi'. Allowed: rope, nope or null",
        ),
        ("granitemoehybrid", {"num_local_experts": -1}, "num_local_experts = -1. Allowed: a whole"),
        ("granitemoehybrid", {"shared_intermediate_size": 0}, "shared_intermediate_size = 0"),
        ("granitemoehybrid", {"mamba_n_heads": 6}, "mamba_n_heads = 6. Allowed: a divisor of"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "mamba_n_groups = 3. Allowed: a divisor of"),
        ("granitemoehybrid", {"mamba_d_head": 12}, "mamba_d_head = 12. Allowed: 16, that is"),
        ("granitemoehybrid", {"mamba_d_conv": 1}, "mamba_d_conv = 1. Allowed: 2 to 64"),
        ("falcon_h1", {"time_step_limit": [1.0, 0.5]}, "Allowed: two numbers from 0, the smaller"),
        ("falcon_h1", {"time_step_limit": None}, "time_step_limit = null. Allowed: two numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers = [1.0]. Allowed: 2 numbers"),
        ("falcon_h1", {"ssm_multipliers": "1"}, "ssm_multipliers = '1'. Allowed: 5 numbers"),
        ("falcon_h1", {"key_multiplier": 0}, "key_multiplier = 0. Allowed: a positive number"),
        ("nemotron_h", {"layers_block_type": ["mlp"]}, "at least one of them full_attention"),
        ("nemotron_h", {"layers_block_type": ["full_attention", 3]}, "Allowed: a list of linear_"),
        ("nemotron_h", {"layers_block_type": ["full_attention", []]}, "Allowed: a list of linear_"),
        ("nemotron_h", {"time_step_limit": [0.0, 10**400]}, "Allowed: two numbers from 0"),
        ("nemotron_h", {"layers_block_type": None}, "layers_block_type = null. Allowed: a list of"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M*X"},
            "hybrid_override_pattern = 'M*X'. Allowed: letters M, *, - and E, at least one",
        ),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M*" * 501},
            "hybrid_override_pattern = '1002 layers'. Allowed: at most 1000",
        ),
        ("nemotron_h", {"attention_bias": True}, "attention_bias = True. Allowed: false, or abs"),
        ("nemotron_h", {"mlp_hidden_act": "step"}, "mlp_hidden_act = 'step'. Allowed: gelu"),
        ("nemotron_h", {"mamba_n_groups": 4}, "mamba_n_groups = 4. Allowed: n_groups, which is 2"),
        ("nemotron_h", {"n_groups": 3}, "n_groups = 3. Allowed: a divisor of mamba_num_heads = 8"),
        ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size = 0. Allowed: a positive whole"),
    ],
)
def test_a_field_that_is_not_served_is_named(
    family: str, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        build(family, **fields)
    assert told in str(caught.value)


@pytest.mark.parametrize("family", ["falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_the_state_of_the_scan_is_float32_and_its_constants_are_told_apart(family: str) -> None:
    model = build(family)
    (states,) = model.info.states
    assert {one.name: one.dtype for one in states.arrays} == {
        "inputs": "bfloat16",
        "scan": "float32",
    }
    assert build(family).info == model.info
    assert build(family, time_step_limit=[0.0, 1.0]).info != model.info


def test_a_model_without_mamba_has_no_states() -> None:
    model = build("granitemoehybrid", layer_types=["attention"] * 3, num_local_experts=0)
    assert not model.info.states
    assert not any("experts" in path or "router" in path for path in model.weight_specs())


def test_infinity_is_read_as_transformers_writes_it() -> None:
    written = build("falcon_h1", time_step_limit=[0.0, {"__float__": "Infinity"}])
    assert written.info == build("falcon_h1", time_step_limit=[0.0, float("inf")]).info


def test_letters_stand_for_the_kinds_of_layers_of_one_block() -> None:
    model = build("nemotron_h")
    letters = {"layers_block_type": None, "hybrid_override_pattern": "MEM*-E"}
    assert build("nemotron_h", **letters).info == model.info
    assert [group.num_layers for group in model.info.groups] == [1]
    assert [states.num_layers for states in model.info.states] == [2]
    names = {name for one in model.tensor_sources().values() for name in one.names}
    assert "backbone.layers.3.mixer.q_proj.weight" in names
    assert {name for name in names if ".layers.4." in name} == {
        *(f"backbone.layers.4.mixer.{way}_proj.{kind}" for way in ("up", "down") for kind in KINDS),
        "backbone.layers.4.norm.weight",
    }


@pytest.mark.long
def test_a_prompt_in_pieces_leaves_the_state_of_the_whole() -> None:
    rng, tokens = np.random.default_rng(0), 2 * CHUNK + 9
    x, b, c = (rng.normal(size=(tokens, n, 8)).astype(np.float32) for n in (4, 2, 2))
    dt = rng.uniform(0.01, 1, (tokens, 4)).astype(np.float32)
    decay, skip = -np.exp(rng.normal(size=4)).astype(np.float32), np.ones(4, np.float32)

    def after(pieces: list[int]) -> tuple[np.ndarray, np.ndarray]:
        state, done, found = {SCAN: jnp.full((3, 4, 8, 8), jnp.nan)}, 0, []
        for count in pieces:
            part, bucket = slice(done, done + count), Bucket(count, 1, 1, count, 256)
            lengths = jnp.array([count]), jnp.array([done + count])
            batch = derive_batch(*lengths, jnp.array([[1]]), 256, bucket)
            own = (jnp.asarray(array[part]) for array in (x, dt, b, c))
            own_x, own_dt, own_b, own_c = own
            out, state = jax.jit(ssd_scan)(
                *(own_x, own_dt, jnp.asarray(decay), own_b, own_c, jnp.asarray(skip)), state, batch
            )
            found.append(out)
            done += count
        return np.concatenate(found), np.asarray(state[SCAN][1])

    whole_out, whole = after([tokens])
    for pieces in ([1, tokens - 1], [CHUNK, 1, 1, tokens - CHUNK - 2], [tokens - 1, 1]):
        out, state = after(pieces)
        np.testing.assert_allclose(out, whole_out, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(state, whole, rtol=1e-5, atol=1e-5)
