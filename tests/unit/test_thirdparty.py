"""Kernels that others wrote run as they are, when they are named and only then."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.config import make_config
from enginebay.errors import UnsupportedError
from enginebay.plugins.registry import load_registry
from enginebay_thirdparty.megablox import grouped_linear
from enginebay_thirdparty.ragged_paged import attention as ragged_paged

NAMES = ("jax_nn", "jax_ragged_paged", "jax_megablox")


def test_auto_takes_every_other_kernel_first() -> None:
    registry = load_registry()
    found = {entry.name: entry for entry in registry.entries if entry.package == "thirdparty"}
    assert set(found) == set(NAMES)
    others = [
        entry.priority
        for entry in registry.entries
        if entry.kind == "kernel" and entry.package != "thirdparty"
    ]
    assert max(entry.priority for entry in found.values()) < min(others)
    plan = make_plan(make_config({"compile_cache": "off", "platform": "cpu"}), registry)
    [reason] = [r for r in plan.reasons if r.setting == "kernels.attention.prefill"]
    assert ("jax_nn", "lower priority (-20)") in reason.refused


def test_a_kernel_that_cannot_be_interpreted_says_so() -> None:
    with pytest.raises(UnsupportedError, match="JAX's interpreter cannot reshape references"):
        ragged_paged.interpreted()


@pytest.mark.long
def test_named_attention_gives_the_same_tokens() -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    prompts = ["Once upon a time", "The snail " * 20]
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "dtype": "float32"}
    found = []
    for kernel in ("xla", "jax_nn"):
        with LLM("demo", **sizes, kernels={"attention": kernel}) as llm:
            assert llm.plan.kernels.names["attention.decode"] == kernel
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert found[0] == found[1]


@pytest.mark.long
def test_the_grouped_product_of_jax_is_right_when_interpreted() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(150, 96)), rng.normal(size=(3, 40, 96))
    sizes = np.array([70, 0, 60], np.int32)
    got = grouped_linear.interpreted()(
        jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), jnp.asarray(sizes)
    )
    wanted = np.zeros((150, 40))
    wanted[:70], wanted[70:130] = x[:70] @ weight[0].T, x[70:130] @ weight[2].T
    np.testing.assert_allclose(jax.device_get(got), wanted, atol=1e-4)
