"""Logits processors of a plugin: one that leaves a single token, and one whose fields change with
each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from pydantic import BaseModel, ConfigDict

from enginebay.contracts.processor import LogitsProcessor, ProcessorState, RowFacts, RowField, Sizes
from enginebay.contracts.sampler import SamplingState
from enginebay.errors import RequestError
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry, load_registry


class OnlyOptions(BaseModel):
    """The token that is left."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    token_id: int


class Only(LogitsProcessor):
    """No other token is possible."""

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        return {"token_id": RowField("int32")}

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        if options.token_id >= facts.sizes.vocab_size:
            raise RequestError(f"only: token id {options.token_id}")
        return {"token_id": options.token_id}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        ids = jnp.arange(logits.shape[1])
        return jnp.where(ids == processor_state["token_id"][:, None], logits, -jnp.inf)


class CountingOptions(BaseModel):
    """The first token."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    first: int


class Counting(LogitsProcessor):
    """Each token is the one after the token before it."""

    evolves = True

    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        return {"next": RowField("int32"), "seen": RowField("int32", (2,))}

    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        return {"next": options.first, "seen": [0, 0]}

    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        ids = jnp.arange(logits.shape[1])
        return jnp.where(ids == processor_state["next"][:, None], 0.0, -jnp.inf)

    def after(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        processor_state: ProcessorState,
        state: SamplingState,
    ) -> ProcessorState:
        return {"next": tokens + 1, "seen": processor_state["seen"].at[:, 0].add(1)}


def registry() -> Registry:
    """The built-in parts and these two, which nothing takes by default."""
    here = __name__
    declared = [
        Declaration("processor", "only", f"{here}:Only", options=f"{here}:OnlyOptions"),
        Declaration("processor", "counting", f"{here}:Counting", options=f"{here}:CountingOptions"),
    ]
    added = [Entry(d.kind, d.name, "external", "1", "external", declaration=d) for d in declared]
    return Registry([*load_registry().entries, *added])
