"""AbstractInferenceEngine: the interface between an orchestrator of prefills and decodes and its
engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import jax


class AbstractInferenceEngine(ABC):
    """Prompts are processed into prefixes, prefixes are inserted into slots, and all slots decode
    together.

    Prefixes and decode states are opaque to the caller, who only passes them on. `graphstate` and
    `graphothers` are the model's weights, which may change between calls.
    """

    @property
    @abstractmethod
    def pad_token_id(self) -> int | None:
        """The token id of padding; None when it is unknown."""

    @property
    @abstractmethod
    def eos_token_ids(self) -> list[int]:
        """The token ids that end a sequence."""

    @property
    @abstractmethod
    def samples_per_slot(self) -> int:
        """Number of sequences per slot."""

    @property
    @abstractmethod
    def prng_key(self) -> jax.Array:
        """A new random key at each access."""

    @property
    @abstractmethod
    def prefill_lengths(self) -> list[int]:
        """Numbers of tokens to which prefills are padded."""

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """Rows of a decode step; None when not configured."""

    @property
    @abstractmethod
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""

    @property
    @abstractmethod
    def max_prefill_length(self) -> int:
        """Max prompt tokens of one step."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Max tokens of a sequence, including the prompt."""

    @property
    @abstractmethod
    def colocated_cpus(self) -> list[jax.Device] | None:
        """The CPU devices of this process; None when JAX has no CPU backend."""

    @abstractmethod
    def get_prefix_destination_sharding(self) -> Any:
        """Return the shardings that a prefix needs here: a pytree for jax.device_put(prefix,
        shardings).
        """

    @abstractmethod
    def init_decode_state(self, *args: Any, **kwargs: Any) -> Any:
        """Return a decode state whose slots are all free. An engine may take arguments of its
        own.
        """

    @abstractmethod
    def free_resource(self, slot: int) -> bool:
        """Free a slot and its resources. Returns False when the slot is free already."""

    @abstractmethod
    def prefill(
        self,
        graphstate: Any,
        graphothers: Any,
        tokens: Any,
        valids: Any,
        true_length: Any,
        temperature: Any,
        top_p: Any,
        top_k: Any,
        rngs: Any,
    ) -> tuple[Any, Any]:
        """Process prompts and sample each one's first token. Returns (prefix, result tokens)."""

    @abstractmethod
    def decode(self, graphstate: Any, graphothers: Any, state: Any, rngs: Any) -> tuple[Any, Any]:
        """Sample one more token for every occupied slot. Returns (state, result tokens)."""

    @abstractmethod
    def insert(self, prefix: Any, decode_state: Any, slot: int) -> Any:
        """Return the decode state with a prefix in a free slot."""

    @abstractmethod
    def bulk_insert(self, prefix: Any, decode_state: Any, slots: list[int]) -> Any:
        """Return the decode state with prefixes in several free slots."""
