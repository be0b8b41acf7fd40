"""The sampler contract: logits to tokens, as one pure function inside the compiled step."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
from jax import tree_util

from enginebay.row_value import Stage
from enginebay.types import ROW_VALUES, RowParams

if TYPE_CHECKING:

    class DeviceParams(RowParams[jax.Array, jax.Array]):
        """The declared sampling parameters of S rows: an array [S] for each."""

else:
    DeviceParams = tree_util.register_dataclass(
        dataclasses.make_dataclass(
            "DeviceParams", [(name, jax.Array) for name in ROW_VALUES], frozen=True
        ),
        data_fields=list(ROW_VALUES),
        meta_fields=[],
    )

SAMPLE_STREAM = 0
"""The stream of a position's key that token sampling uses; other consumers of randomness take other
numbers.
"""


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["keys", "positions", "params", "token_ids", "prompt_lengths"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """What sampling one token for each of S rows depends on, besides the logits.

    keys uint32 [S, 2]: each request's own key, folded with its completion index. positions int32
    [S]: absolute position of the token to be chosen. params: each sampling parameter of the rows
    [S], by the name and with the dtype and neutral value that enginebay.types.RowParams declares,
    such as `params.temperature` f32 [S]. token_ids int32 [S, L]: each row's tokens by absolute
    position; from the row's position on they mean nothing. prompt_lengths int32 [S]: how many of
    them are the prompt's.
    """

    keys: jax.Array
    positions: jax.Array
    params: DeviceParams
    token_ids: jax.Array
    prompt_lengths: jax.Array

    def without(self, stage: Stage) -> SamplingState:
        """The same rows with neutral values of a stage, so that a program leaves its cost out."""
        neutral = {
            name: jnp.full_like(getattr(self.params, name), one.neutral)
            for name, one in ROW_VALUES.items()
            if one.stage == stage
        }
        kept = {n: getattr(self.params, n) for n in ROW_VALUES if n not in neutral}
        return dataclasses.replace(self, params=DeviceParams(**kept, **neutral))


class Sampler(Protocol):
    """What a plugin registers as kind "sampler".

    Invariants (held by the conformance suite): a row's token depends on its own logits, parameters,
    tokens, key and position only, never on its row or its neighbours; penalties are applied to the
    logits first, whatever the temperature; temperature 0 and top_k 1 give the first best token of
    what they leave; temperature is applied before the filters, which follow in the order of their
    declarations in enginebay.types.RowParams, each on the renormalised rest; a token that equals
    the k-th best is kept.

    Penalties, in this order: a logit of a token in prompt or output is divided by the repetition
    penalty when it is positive, and multiplied when it is not; the frequency penalty is subtracted
    as often as the token is in the output; the presence penalty is subtracted when it is in the
    output at all. A sampler that declares `greedy_only` need not know penalties: requests with one
    are refused.
    """

    def __call__(self, logits: jax.Array, state: SamplingState) -> jax.Array:
        """logits f32 [S, vocab] -> token ids int32 [S]. Traced inside the step."""


def request_key(seed: int) -> jax.Array:
    """uint32 [2], the key of a request with this seed (threefry, 64 bits of seed)."""
    return jnp.asarray([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], jnp.uint32)


def position_keys(state: SamplingState, stream: int = SAMPLE_STREAM) -> jax.Array:
    """Typed keys [S] for the rows' positions: fold_in(fold_in(request key, position), stream)."""
    keys = jax.random.wrap_key_data(state.keys, impl="threefry2x32")

    def fold(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, position), stream)

    return jax.vmap(fold)(keys, state.positions)
