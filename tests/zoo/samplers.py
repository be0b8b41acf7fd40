"""Faulty samplers: they cut, scale, count or draw in another way than was asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from enginebay.contracts.sampler import SamplingState
from enginebay.ops.sampling import without_stage
from enginebay_samplers import greedy, standard
from enginebay_samplers.penalties import penalize
from enginebay_testing.samplers import sampler_checks
from enginebay_testing.verdicts import Check
from enginebay_xla import sample as draw

Sample = Callable[[jax.Array, SamplingState], jax.Array]

sample = functools.partial(standard.sample, draw=draw.sample)


def wrong_temperature(logits: jax.Array, state: SamplingState) -> jax.Array:
    return sample(logits * 1.1, state)


def row_dependent(logits: jax.Array, state: SamplingState) -> jax.Array:
    return sample(logits, dataclasses.replace(state, positions=jnp.arange(logits.shape[0])))


def last_best(logits: jax.Array, state: SamplingState) -> jax.Array:
    return logits.shape[-1] - 1 - greedy.sample(logits[:, ::-1], state)


def without_penalties(logits: jax.Array, state: SamplingState) -> jax.Array:
    return sample(logits, without_stage(state, "penalty"))


def prompt_is_counted(logits: jax.Array, state: SamplingState) -> jax.Array:
    return sample(
        logits, dataclasses.replace(state, prompt_lengths=jnp.zeros_like(state.prompt_lengths))
    )


def prompt_is_never_repeated(logits: jax.Array, state: SamplingState) -> jax.Array:
    vocab, position = logits.shape[1], jnp.arange(state.token_ids.shape[1])
    token_ids = jnp.where(position < state.prompt_lengths[:, None], vocab, state.token_ids)
    return sample(logits, dataclasses.replace(state, token_ids=token_ids))


def stale_tokens_are_counted(logits: jax.Array, state: SamplingState) -> jax.Array:
    everything = dataclasses.replace(state, positions=state.positions + 100)
    return without_penalties(penalize(logits, everything), state)


def penalties_come_after_temperature(logits: jax.Array, state: SamplingState) -> jax.Array:
    warm = jnp.where(state.params.temperature > 0.0, state.params.temperature, 1.0)[:, None]
    return without_penalties(penalize(logits / warm, state) * warm, state)


def negative_logits_are_divided(logits: jax.Array, state: SamplingState) -> jax.Array:
    return sample(
        jnp.where(logits > 0.0, logits, logits / state.params.repetition_penalty[:, None] ** 2),
        state,
    )


def tokens_of_float32(logits: jax.Array, state: SamplingState) -> jax.Array:
    return sample(logits, state).astype(jnp.float32)


def one_noise_for_two_positions(logits: jax.Array, state: SamplingState) -> jax.Array:
    return sample(logits, dataclasses.replace(state, positions=state.positions // 2))


def keys_are_ignored(logits: jax.Array, state: SamplingState) -> jax.Array:
    return sample(logits, dataclasses.replace(state, keys=jnp.zeros_like(state.keys)))


def with_params(**changes: Callable[[jax.Array], jax.Array]) -> Sample:
    """A sampler that changes the parameters of its rows."""

    def changed(logits: jax.Array, state: SamplingState) -> jax.Array:
        params = {name: change(getattr(state.params, name)) for name, change in changes.items()}
        return sample(
            logits, dataclasses.replace(state, params=dataclasses.replace(state.params, **params))
        )

    return changed


def top_p_before_top_k(logits: jax.Array, state: SamplingState) -> jax.Array:
    """top_p takes its share of all tokens, not of those that top_k keeps."""
    warm = jnp.where(state.params.temperature > 0.0, state.params.temperature, 1.0)[:, None]
    ranked = -jnp.sort(-logits / warm, axis=-1)
    mass = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    count = (before < state.params.top_p[:, None]).sum(axis=-1)
    kept = jnp.where(state.params.top_k > 0, jnp.minimum(count, state.params.top_k), count)
    params = dataclasses.replace(
        state.params,
        top_k=jnp.maximum(kept, 1).astype(jnp.int32),
        top_p=jnp.ones_like(state.params.top_p),
    )
    return sample(logits, dataclasses.replace(state, params=params))


FAULTS: dict[str, Sample] = {
    **{
        one.__name__.replace("_", " "): one
        for one in (
            *(wrong_temperature, row_dependent, last_best, without_penalties, prompt_is_counted),
            *(prompt_is_never_repeated, stale_tokens_are_counted, negative_logits_are_divided),
            *(penalties_come_after_temperature, tokens_of_float32, one_noise_for_two_positions),
            *(keys_are_ignored, top_p_before_top_k),
        )
    },
    "top_k keeps one more": with_params(top_k=lambda k: jnp.where(k > 1, k + 1, k)),
    "top_p is a little larger": with_params(top_p=lambda p: jnp.minimum(p * 1.1, 1.0)),
    "min_p is ignored": with_params(min_p=jnp.zeros_like),
    "temperature 0 is drawn": with_params(temperature=lambda t: jnp.maximum(t, 0.3)),
}

RIGHT: dict[str, Sample] = {"standard": sample}


def checks(part: Sample) -> list[Check]:
    """The kit's suite."""
    return sampler_checks(part)
