"""Layouts and ops of enginebay_xla at sizes and in dtypes that tests/conformance does not have, by
the same suites.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.ops.rotary import RopeSpec, rope_frequencies
from enginebay_testing import kernels, oracle
from enginebay_testing.layouts import check_layout
from enginebay_xla.kv_write import kv_write
from enginebay_xla.layout import HndLayout
from enginebay_xla.linear import linear
from enginebay_xla.rope import rope
from tests.layouts import BUILTIN_LAYOUTS

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", sorted(BUILTIN_LAYOUTS))
def test_layout(layout: str, dtype: str) -> None:
    check_layout(BUILTIN_LAYOUTS[layout](5, 4, 3, 8, dtype))


# tests/conformance has each rule in float32, and the first in every dtype.
@pytest.mark.parametrize(
    ("name", "dtype"),
    list(zip(sorted(kernels.ROPE_SPECS), ["bfloat16", "float16"] * 4, strict=True)),
)
def test_rope(name: str, dtype: str) -> None:
    kernels.check_rope(rope, kernels.ROPE_SPECS[name], dtype)


# Rules that reach kernels as any other frequencies do, so that the cases of the op rope do without
# them.
MORE_SPECS = {
    "longrope": RopeSpec(
        10000.0, 8, "longrope", attention_factor=1.2, frequency_divisors=(1.0, 1.5, 3.0, 8.0)
    ),
    "proportional": RopeSpec(10000.0, 64, "proportional", 2.0, proportion=0.3),
}


@pytest.mark.parametrize("name", sorted([*kernels.ROPE_SPECS, *MORE_SPECS]))
def test_rope_frequencies_follow_the_published_rules(name: str) -> None:
    spec = (kernels.ROPE_SPECS | MORE_SPECS)[name]
    frequencies, factor = rope_frequencies(spec)
    expected, expected_factor = oracle.rope_frequencies(spec)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-7)
    assert factor == pytest.approx(expected_factor, rel=1e-7)


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", [n for n in sorted(kernels.ROPE_SPECS) if n not in ("default", "partial")]
)
def test_rope_frequencies_are_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    spec = kernels.ROPE_SPECS[name]
    fields = {
        "rope_type": spec.scaling,
        "rope_theta": spec.theta,
        "factor": spec.factor,
        "original_max_position_embeddings": spec.original_max_position_embeddings or 4096,
        "low_freq_factor": spec.low_freq_factor,
        "high_freq_factor": spec.high_freq_factor,
        "beta_fast": spec.beta_fast,
        "beta_slow": spec.beta_slow,
        "truncate": spec.truncate,
        "attention_factor": spec.attention_factor,
        "mscale": spec.mscale,
        "mscale_all_dim": spec.mscale_all_dim,
    }
    wanted = {
        "linear": ("factor",),
        "llama3": (
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
        ),
        "yarn": tuple(n for n in fields if not n.startswith(("low", "high"))),
    }[spec.scaling]
    kept = {
        n: v
        for n, v in fields.items()
        if n in ("rope_type", "rope_theta", *wanted) and v is not None
    }
    config = LlamaConfig(
        hidden_size=4 * 64,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=spec.original_max_position_embeddings * int(spec.factor) or 4096,
        rope_parameters=kept,
    )
    theirs, their_factor = ROPE_INIT_FUNCTIONS[spec.scaling](config, "cpu")
    ours, our_factor = rope_frequencies(spec)
    # Theirs is computed in f32 throughout.
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)
    assert our_factor == pytest.approx(their_factor, rel=1e-6)


# tests/conformance has one row and three.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 2, 17])
def test_linear(dtype: str, rows: int) -> None:
    kernels.check_linear(linear, dtype, rows=rows, in_dims=(24,), out_dims=(2, 5, 8), bias=True)
    kernels.check_linear(
        linear, dtype, rows=rows, in_dims=(3, 8), out_dims=(12,), out_dtype="float32"
    )


def test_kv_write_of_one_token_changes_its_slot_alone() -> None:
    layout = HndLayout(3, 4, 2, 8, "float32")
    ones = np.ones((1, 2, 8), np.float32)

    @jax.jit
    def write_and_read(slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
        return layout.read(kv_write(layout.init(), slots, k, v, layout=layout), jnp.arange(3))

    read = write_and_read(np.array([6]), ones, 2 * ones)
    k, v = (np.asarray(x).reshape(12, 2, 8) for x in read)
    assert (k[6] == 1).all()
    assert (v[6] == 2).all()
    assert not np.delete(k, 6, axis=0).any()
