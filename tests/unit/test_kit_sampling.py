"""The cases of sample and short_conv find kernels that filter in another order, or that are made
for few tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.ops.sampling import gumbel_noise
from enginebay_testing.sampling_oracle import OracleParams
from enginebay_testing.verdicts import judge
from enginebay_xla.kit.sample import SampleCase, check_sample

pytestmark = pytest.mark.long


def draws(z: Any, seeds: Any, kept: Any) -> Any:
    noise = gumbel_noise(seeds, jnp.arange(z.shape[1], dtype=jnp.int32)[None])
    return jnp.argmax(jnp.where(kept, z + noise, -jnp.inf), axis=-1).astype(jnp.int32)


def in_top_p(z: Any, mass: Any, top_p: Any) -> Any:
    order = jnp.argsort(-z, axis=-1, stable=True)
    ranked = jnp.take_along_axis(mass, order, axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    inside = before < top_p[:, None] * mass.sum(axis=-1, keepdims=True)
    return jnp.take_along_axis(inside, jnp.argsort(order, axis=-1), axis=-1)


def in_order(z: Any, seeds: Any, *, top_k: Any, top_p: Any, min_p: Any, min_p_first: bool) -> Any:
    kth = jnp.take_along_axis(jnp.sort(z, axis=-1)[:, ::-1], top_k[:, None] - 1, axis=-1)
    by_min_p = jnp.exp(z) >= min_p[:, None]
    kept = (z >= kth) & (by_min_p | (not min_p_first))
    inside = in_top_p(z, jnp.where(kept, jnp.exp(z), 0.0), top_p)
    return draws(z, seeds, kept & inside & by_min_p)


def case(params: OracleParams) -> SampleCase:
    logits = np.random.default_rng(5).normal(size=(8, 200)).astype(np.float32) * 2
    return SampleCase("few", logits - logits.max(axis=1, keepdims=True), (params,) * 8)


def test_min_p_before_top_p_is_found() -> None:
    wanted = case(OracleParams(top_p=0.8, min_p=0.05))

    def op(min_p_first: bool) -> Any:
        def sample(z: Any, seeds: Any, *, top_k: Any, top_p: Any, min_p: Any) -> Any:
            return in_order(
                z, seeds, top_k=top_k, top_p=top_p, min_p=min_p, min_p_first=min_p_first
            )

        return jax.jit(sample)

    assert judge(lambda: check_sample(op(False), wanted)).verdict == "PASS"
    assert judge(lambda: check_sample(op(True), wanted)).verdict == "INCORRECT"
