"""The processor mirostat: cuts unlikely tokens so that the mean surprise of the text stays near a
target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.processor import LogitsProcessor, ProcessorState, RowFacts, RowField, Sizes
from enginebay.contracts.sampler import SamplingState
from enginebay_samplers.distribution import Distribution, distribution, keep

BIT = float(np.log(2.0))
"""A bit in nats."""


class MirostatOptions(BaseModel):
    """The target of the surprise, and how fast it is approached."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"tau": 1.5}, {"tau": 3.0, "eta": 0.5}]},
    )

    tau: float = Field(
        default=5.0, ge=0.0, le=100.0, description="target of the mean surprise, in bits per token"
    )
    eta: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="learning rate: mu decreases by eta times (surprise of the token - tau)",
    )


class Mirostat(LogitsProcessor):
    """Keeps the most likely token and all tokens of at most mu bits of surprise; mu adapts to the
    chosen tokens.

    Version 2 of Basu, Ramachandran, Keskar and Varshney, "Mirostat: a neural text decoding
    algorithm that directly controls perplexity", 2021, as its authors published it: mu starts at 2
    tau. After each token, mu decreases by eta times the difference between the token's surprise
    (among the kept tokens) and tau. At temperature 0, logits and mu do not change.
    """

    keeps_argmax = True
    evolves = True

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return the fields: the options, and mu in bits."""
        return {name: RowField("float32") for name in ("tau", "eta", "mu")}

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return the values of the fields; all options are supported."""
        return {"tau": options.tau, "eta": options.eta, "mu": 2.0 * options.tau}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """Return f32 [S, vocab]."""
        given = distribution(logits, state)
        return keep(logits, _kept(given, processor_state), given)

    def after(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        processor_state: ProcessorState,
        state: SamplingState,
    ) -> ProcessorState:
        """Return the new mu f32 [S]; a token that was impossible changes nothing."""
        given = distribution(logits, state)
        mass = jnp.where(_kept(given, processor_state), jnp.exp(given.log_p), 0.0).sum(axis=-1)
        chosen = jnp.take_along_axis(given.log_p, tokens[:, None], axis=-1)[:, 0]
        surprise = (jnp.log(mass) - chosen) / BIT
        known = given.is_drawn[:, 0] & jnp.isfinite(surprise)
        return {
            "mu": jnp.where(
                known,
                processor_state["mu"]
                - processor_state["eta"] * (surprise - processor_state["tau"]),
                processor_state["mu"],
            )
        }


def _kept(given: Distribution, processor_state: ProcessorState) -> jax.Array:
    return (given.log_p >= -processor_state["mu"][:, None] * BIT) | given.best
