"""The sampler contract: a sampler is a pure function from logits to tokens in a compiled step."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Protocol

import jax
from jax import tree_util

from enginebay.types import ROW_VALUES, RowParams

if TYPE_CHECKING:

    class DeviceParams(RowParams[jax.Array, jax.Array]):
        """The sampling parameters of S rows that RowParams declares: one array [S] for each."""

else:
    DeviceParams = tree_util.register_dataclass(
        dataclasses.make_dataclass(
            "DeviceParams",
            [(name, jax.Array) for name in ROW_VALUES],
            frozen=True,
            # Python 3.11 has no argument `module`; without it, records cannot be pickled.
            namespace={"__module__": __name__},
        ),
        data_fields=list(ROW_VALUES),
        meta_fields=[],
    )

SAMPLE_STREAM = 0
"""The stream number that token sampling passes to `position_keys`. Other uses of random numbers
pass other stream numbers.
"""


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["keys", "positions", "params", "token_ids", "prompt_lengths"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """The inputs of a sampler besides the logits, for one token of each of S rows.

    keys uint32 [S, 2]: the request's random key, with the index of the completion folded in.
    positions int32 [S]: absolute position of the token to choose. params: one array [S] for each
    sampling parameter, such as `params.temperature` f32 [S]; enginebay.types.RowParams declares
    names, dtypes and neutral values. token_ids int32 [S, L]: the row's tokens by absolute position;
    values at and after `positions` are undefined. prompt_lengths int32 [S]: number of prompt tokens
    of the row.
    """

    keys: jax.Array
    positions: jax.Array
    params: DeviceParams
    token_ids: jax.Array
    prompt_lengths: jax.Array


class Sampler(Protocol):
    """What a plugin registers as kind "sampler".

    Invariants (tested by the conformance suite):

    - A row's token depends only on the row's own logits, parameters, tokens, key and position, not
      on the index of the row or on other rows.
    - Penalties are applied to the logits first, at every temperature.
    - With temperature 0 or top_k 1 the sampler returns the first token with the highest logit after
      penalties.
    - Temperature is applied before the filters. Filters are applied in the order in which
      enginebay.types.RowParams declares them, each to the renormalised probabilities that the
      filter before it left.
    - top_k keeps every token whose logit equals the k-th highest one.

    Penalties are applied in this order. The logit of a token in prompt or output is divided by the
    repetition penalty when it is positive, and multiplied otherwise. The frequency penalty is
    subtracted once per occurrence of the token in the output. The presence penalty is subtracted
    when the token is in the output. A sampler that declares `greedy_only` may ignore penalties:
    requests with penalties are refused.
    """

    def __call__(self, logits: jax.Array, state: SamplingState) -> jax.Array:
        """Return token ids int32 [S] for logits f32 [S, vocab]. Traced inside the step."""
