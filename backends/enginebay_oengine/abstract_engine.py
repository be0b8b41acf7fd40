"""AbstractInferenceEngine: what an orchestrator of prefills and decodes asks of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import jax


class AbstractInferenceEngine(ABC):
    """Prompts are processed into prefixes, prefixes are inserted into slots, and all slots decode
    together.

    What a prefix and a decode state are is the engine's business: who calls it hands them on.
    `graphstate` and `graphothers` are the model's weights, so that they can change from call to
    call.
    """

    @property
    @abstractmethod
    def pad_token_id(self) -> int | None:
        """The token id that stands where there is no token; None when nobody names one."""

    @property
    @abstractmethod
    def eos_token_ids(self) -> list[int]:
        """The token ids that end a sequence."""

    @property
    @abstractmethod
    def samples_per_slot(self) -> int:
        """Sequences in a slot."""

    @property
    @abstractmethod
    def prng_key(self) -> jax.Array:
        """A random key that was not given out before."""

    @property
    @abstractmethod
    def prefill_lengths(self) -> list[int]:
        """Numbers of tokens that prefills are padded to."""

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """Rows of a decode step, as configured."""

    @property
    @abstractmethod
    def max_concurrent_decodes(self) -> int:
        """Slots."""

    @property
    @abstractmethod
    def max_prefill_length(self) -> int:
        """Most tokens of prompts that are processed in one step."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Most tokens of a sequence, prompt included."""

    @property
    @abstractmethod
    def colocated_cpus(self) -> list[jax.Device] | None:
        """The CPU devices of this process; None when JAX has none."""

    @abstractmethod
    def get_prefix_destination_sharding(self) -> Any:
        """Where a prefix has to lie to be inserted here: a pytree for jax.device_put(prefix,
        it).
        """

    @abstractmethod
    def init_decode_state(self) -> Any:
        """A decode state whose slots are all free."""

    @abstractmethod
    def free_resource(self, slot: int) -> bool:
        """Free a slot and all that it holds; False when it is free already."""

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
        """Process prompts and sample each one's first token: (prefix, result tokens)."""

    @abstractmethod
    def decode(self, graphstate: Any, graphothers: Any, state: Any, rngs: Any) -> tuple[Any, Any]:
        """One more token for every occupied slot: (state, result tokens)."""

    @abstractmethod
    def insert(self, prefix: Any, decode_state: Any, slot: int) -> Any:
        """The decode state with a prefix in a free slot."""

    @abstractmethod
    def bulk_insert(self, prefix: Any, decode_state: Any, slots: list[int]) -> Any:
        """The decode state with prefixes in several free slots."""
