"""The checks of the op sample pass the reference, and find implementations that miss a border or
the noise.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.compose.composition import make_sampler
from enginebay.config import EngineConfig
from enginebay.config_sections import Choice
from enginebay.errors import UnknownNameError
from enginebay.ops.caps import Env
from enginebay.ops.sampling import gumbel_noise
from enginebay.plugins.registry import load_registry
from enginebay_testing.sampler_runs import choose_plain
from enginebay_testing.sampling_oracle import OracleParams, kept_tokens
from enginebay_xla import sample as xla
from enginebay_xla.kit import sample as sample_op
from tests.unit.test_samplers import greedy_state

sample = xla.sample


def no_noise(z: jax.Array, seeds: jax.Array, **borders: Any) -> jax.Array:
    return jnp.argmax(z, axis=-1).astype(jnp.int32)


def one_less(z: jax.Array, seeds: jax.Array, *, top_k: jax.Array, **borders: Any) -> jax.Array:
    return sample(z, seeds, top_k=jnp.maximum(top_k - 1, 1), **borders)


def no_top_p(z: jax.Array, seeds: jax.Array, *, top_p: jax.Array, **borders: Any) -> jax.Array:
    return sample(z, seeds, top_p=jnp.ones_like(top_p), **borders)


def no_min_p(z: jax.Array, seeds: jax.Array, *, min_p: jax.Array, **borders: Any) -> jax.Array:
    return sample(z, seeds, min_p=jnp.zeros_like(min_p), **borders)


def sees_its_place(z: jax.Array, seeds: jax.Array, **borders: Any) -> jax.Array:
    return sample(z, seeds + jnp.arange(z.shape[0], dtype=jnp.uint32)[:, None], **borders)


def every_equal_at_the_border(
    z: jax.Array, seeds: jax.Array, *, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    order = -jnp.sort(-z, axis=-1)
    kth = jnp.take_along_axis(order, top_k[:, None] - 1, axis=-1)
    mass = jnp.where(order >= kth, jnp.exp(order), 0.0)
    before = jnp.cumsum(mass, axis=-1) - mass
    last = jnp.where(
        (mass > 0) & (before < top_p[:, None] * mass.sum(-1, keepdims=True)), order, jnp.inf
    )
    kept = (z >= last.min(axis=-1, keepdims=True)) & (z >= jnp.log(min_p)[:, None])
    noise = gumbel_noise(seeds, jnp.arange(z.shape[1])[None])
    drawn = jnp.argmax(jnp.where(kept, z + noise, -jnp.inf), axis=-1)
    return jnp.where(top_k == 1, jnp.argmax(z, axis=-1), drawn).astype(jnp.int32)


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (no_noise, "everything-40"),
        (one_less, "top_k-40"),
        (no_top_p, "top_p-40"),
        (no_min_p, "everything-40"),
        (no_min_p, "together-40"),
        (every_equal_at_the_border, "equals-40"),
        (sees_its_place, "rows_are_independent"),
    ],
)
def test_suite_finds_a_wrong_implementation(wrong: Any, case: str) -> None:
    check = dict(sample_op.sample_checks(wrong))[f"sample[{case}]"]
    with pytest.raises(AssertionError, match=r"row"):
        check()


def test_keeping_every_equal_is_all_that_is_wrong_with_it() -> None:
    """So the check above fails for the equals, and for nothing else."""
    checks = dict(sample_op.sample_checks(every_equal_at_the_border))
    checks["sample[top_p-40]"]()
    checks["sample[together-40]"]()


def one_kept_of_equals(drop: str) -> Any:
    """The op on the host, by the oracle, for rows of one OracleParams: without the last token
    that is kept, without equals of the best, or right.
    """

    def draw(z: jax.Array, seeds: jax.Array, **borders: jax.Array) -> np.ndarray:
        tokens = []
        columns = zip(*map(np.asarray, borders.values()), strict=True)
        noise = sample_op.gumbel_noise(np.asarray(seeds), np.arange(z.shape[1]))
        for row, values, scores in zip(np.asarray(z), columns, noise, strict=True):
            params = OracleParams(**dict(zip(borders, map(float, values), strict=True)))
            kept = kept_tokens(row, dataclasses.replace(params, top_k=int(params.top_k)))
            order = np.argsort(-row, kind="stable")
            order = order[kept[order]]
            dropped = {"last": order[-1:], "equals": order[1:], "none": order[:0]}[drop]
            kept[dropped] = False
            tokens.append(np.argmax(np.where(kept, row + scores, -np.inf)))
        return np.asarray(tokens, np.int32)

    return draw


@pytest.mark.parametrize(
    ("drop", "params"), [("last", OracleParams(top_p=0.53)), ("equals", OracleParams(min_p=1.0))]
)
def test_one_token_less_among_hundreds_of_equals_is_found(drop: str, params: OracleParams) -> None:
    rows = np.where(np.arange(600) < 590, np.float32(0.0), np.float32(-9.0))
    case = sample_op.SampleCase("equals", np.stack([rows] * 4), (params,) * 4)
    sample_op.check_sample(one_kept_of_equals("none"), case)
    with pytest.raises(AssertionError, match=r"scores .* less than"):
        sample_op.check_sample(one_kept_of_equals(drop), case)


def test_noise_of_the_oracle_is_that_of_the_op() -> None:
    seeds = np.random.default_rng(0).integers(0, 2**32, (4, 2), dtype=np.uint32)
    ids = np.arange(50_000)
    wanted = sample_op.gumbel_noise(seeds, ids)
    got = np.asarray(jax.jit(gumbel_noise)(seeds, ids[None]))
    assert np.abs(got - wanted).max() < 2e-6 * np.abs(wanted).max()


def test_a_row_of_top_k_1_sends_nobody_over_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when all its tokens are equal, as those of a padding row may be: the best few
    settle it.
    """
    widths: list[int] = []

    def recorded(seeds: jax.Array, ids: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: widths.append(ids.shape[-1]))
        return gumbel_noise(seeds, ids)

    monkeypatch.setattr(xla, "gumbel_noise", recorded)
    vocab = 600
    draw = jax.jit(functools.partial(sample))
    borders = {"top_p": np.ones(2, np.float32), "min_p": np.zeros(2, np.float32)}
    for top_k in (1, 2):
        widths.clear()
        top_ks = np.full(2, top_k, np.int32)
        draw(np.zeros((2, vocab), np.float32), np.zeros((2, 2), np.uint32), top_k=top_ks, **borders)
        jax.effects_barrier()
        assert (vocab in widths) == (top_k > 1)


def test_the_sampler_draws_with_what_was_chosen_and_only_for_rows_that_draw() -> None:
    """Rows of temperature 0 are asked for with top_k 1, which costs an implementation least."""
    state = greedy_state(3)
    params = dataclasses.replace(
        state.params,
        temperature=np.asarray([0.0, 0.5, 2.0], np.float32),
        top_k=np.asarray([7, 0, 9], np.int32),
    )
    state = dataclasses.replace(state, params=params)
    logits = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    seen: dict[str, Any] = {}

    def draw(z: jax.Array, seeds: jax.Array, **borders: jax.Array) -> jax.Array:
        jax.debug.callback(
            lambda **arrays: seen.update(jax.tree.map(np.asarray, arrays)),
            z=z,
            seeds=seeds,
            **borders,
        )
        return jnp.asarray([11, 12, 13], jnp.int32)

    sampler = make_sampler(
        load_registry(), EngineConfig(sampler=Choice(name="standard")), {"sample": draw}
    )
    tokens = jax.jit(sampler)(logits, state)
    jax.effects_barrier()
    assert np.asarray(tokens).tolist() == [int(logits[0].argmax()), 12, 13]
    assert seen["top_k"].tolist() == [1, 64, 9]
    assert (seen["z"].max(axis=1) == 0.0).all()
    assert np.allclose(seen["z"][1], (logits[1] - logits[1].max()) / 0.5)


def test_the_chosen_implementation_is_a_name_with_its_reason() -> None:
    config = EngineConfig(kernels={"sample": "xla"})
    found, why = choose_plain(load_registry(), config, Env("cpu"), "sample")
    assert found.impl is sample
    assert (why.setting, why.chosen, why.why) == ("kernels.sample", "xla", "chosen by name")
    with pytest.raises(UnknownNameError, match="sample"):
        choose_plain(
            load_registry(), EngineConfig(kernels={"sample": "nobody"}), Env("cpu"), "sample"
        )
