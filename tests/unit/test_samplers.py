"""The samplers' conformance suite catches wrong samplers, and the built-in ones cost what they promise."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.sampler import SamplingState
from enginebay.testing.samplers import sampler_checks
from enginebay_samplers import greedy, standard


def wrong_temperature(logits: jax.Array, state: SamplingState) -> jax.Array:
    return standard.sample(logits * 1.1, state)


def row_dependent(logits: jax.Array, state: SamplingState) -> jax.Array:
    moved = SamplingState(
        state.keys, jnp.arange(logits.shape[0]), state.temperature, state.top_k, state.top_p, state.min_p
    )
    return standard.sample(logits, moved)


def last_best(logits: jax.Array, state: SamplingState) -> jax.Array:
    return logits.shape[-1] - 1 - greedy.sample(logits[:, ::-1], state)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (wrong_temperature, "support_and_frequencies[temperature]"),
        (row_dependent, "row_does_not_depend_on_the_batch"),
        (last_best, "temperature_0_is_first_best"),
    ],
)
def test_suite_finds_a_wrong_sampler(
    wrong: Callable[[jax.Array, SamplingState], jax.Array], name: str
) -> None:
    check = dict(sampler_checks(wrong))[name]
    with pytest.raises(AssertionError, match=r"row|temperature"):
        check()


def test_noise_is_gumbel_distributed_to_the_far_tail() -> None:
    seeds = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (6, 2), dtype=np.uint32))
    noise = np.sort(
        np.asarray(standard.token_noise(seeds, jnp.arange(100_000)[None])).ravel().astype(np.float64)
    )
    assert np.isfinite(noise).all()
    steps = np.arange(1, noise.size + 1) / noise.size
    assert np.abs(np.exp(-np.exp(-noise)) - steps).max() < 1.7 / np.sqrt(noise.size)
    assert 10.0 < noise[-1] < 22.9


@pytest.mark.parametrize("num_candidates", [1, 8, 64])
def test_token_is_the_same_however_the_kept_tokens_are_found(
    num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer candidates send more rows over the whole vocabulary; the tokens stay."""
    chance = np.random.default_rng(num_candidates)
    rows = 512
    state = SamplingState(
        keys=jnp.asarray(chance.integers(0, 2**32, (rows, 2), dtype=np.uint32)),
        positions=jnp.asarray(chance.integers(0, 1000, rows), jnp.int32),
        temperature=jnp.asarray(chance.choice([0.3, 1.0, 3.0], rows), jnp.float32),
        top_k=jnp.asarray(chance.choice([0, 2, 30, 200], rows), jnp.int32),
        top_p=jnp.asarray(chance.choice([1.0, 0.9, 0.4], rows), jnp.float32),
        min_p=jnp.asarray(chance.choice([0.0, 0.02, 0.3], rows), jnp.float32),
    )
    # Rounded, as logits of a bf16 model are: many equal ones.
    logits = jnp.asarray(np.round(chance.normal(size=(rows, 320)) * 16) / 8, jnp.float32)
    wanted = np.asarray(jax.jit(standard.sample)(logits, state))
    monkeypatch.setattr(standard, "NUM_CANDIDATES", num_candidates)
    got = np.asarray(jax.jit(functools.partial(standard.sample))(logits, state))
    # Sums in another order may move a top_p border: by less than one row in a hundred.
    assert (got != wanted).sum() <= 2


def test_greedy_rows_pay_for_two_reductions_only() -> None:
    state = SamplingState(
        jnp.zeros((2, 2), jnp.uint32),
        jnp.zeros(2, jnp.int32),
        jnp.zeros(2),
        jnp.zeros(2, jnp.int32),
        jnp.ones(2),
        jnp.zeros(2),
    )
    always = {eqn.primitive.name for eqn in jax.make_jaxpr(standard.sample)(jnp.zeros((2, 64)), state).eqns}
    assert {"cond", "reduce_max", "reduce_min"} <= always
    assert not always & {"top_k", "sort", "exp", "log", "cumsum", "argmax", "threefry2x32"}
