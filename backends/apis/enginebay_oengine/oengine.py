"""oEngine: prefill, insert and decode over one paged cache, and continuous batching by the plans of
a scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from enginebay.compose.composition import make_parts
from enginebay.compose.override import overridden_plan
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.model import Weights
from enginebay.contracts.text import Tokenizer
from enginebay.errors import ConfigError, InputError
from enginebay.types import MAX_STOP_TOKENS, key_of
from enginebay.weights import merge_weights
from enginebay_oengine.abstract_engine import AbstractInferenceEngine
from enginebay_oengine.active_batch import ActiveSequenceBatch, StateSizes
from enginebay_oengine.continuous_forward import ModelOutputBatch, StepLauncher
from enginebay_oengine.engine_limits import make_limits
from enginebay_oengine.generation_state import GenerationState
from enginebay_oengine.inference_scheduler import InferenceScheduler
from enginebay_oengine.iteration import NextIterationPlan
from enginebay_oengine.model_io import ModelIOProcessor
from enginebay_oengine.opened_model import OpenedModel, open_model
from enginebay_oengine.page_manager import HBMPageManager
from enginebay_oengine.paged_cache import (
    PagedAttentionCache,
    PagedAttentionCacheMetaData,
    make_quantizer,
)
from enginebay_oengine.prompts import read_keys, read_prompts
from enginebay_oengine.result_tokens import ResultTokens
from enginebay_oengine.slots import Slots
from enginebay_shared.opening import ModelLike, Rules, eos_token_ids


def _make_key(seed: int) -> jax.Array:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed = {seed!r}", "an integer from 0 to 2**63 - 1", "Pass seed=0.")
    return jnp.asarray(key_of(seed), jnp.uint32)


class oEngine(AbstractInferenceEngine):  # noqa: N801  # the name its users know
    """Slots that decode together, over a cache whose pages sequences share.

    `model` is an OpenedModel, or an argument of open_model. `processor` is a tokenizer or a
    processor with one; None takes the model's own. `storage` and `manager` must have the same
    metadata; the engine takes over the storage, whose arrays are donated to every step. Prompts
    longer than a step allows (the largest of prefill_lengths up to max_prefill_length) are
    processed in chunks. Defaults: max_concurrent_decodes and max_concurrent_prefill are the number
    of devices, prefill_lengths 2**9 to 2**23, max_prefill_length 4096, max_length 8192. The
    metadata and the model may limit sequences further. `batch_size`: rows of a decode step, at
    least max_concurrent_decodes. Equal seeds give equal prng_keys. ConfigError (a ValueError) for
    wrong values. `quantizer` does to keys and values what the cache does.

    Threads may call all methods; steps are launched one at a time.
    """

    def __init__(
        self,
        model: OpenedModel | ModelLike,
        processor: Any,
        storage: PagedAttentionCache,
        manager: HBMPageManager,
        max_concurrent_decodes: int | None = None,
        max_concurrent_prefill: int | None = None,
        prefill_lengths: Sequence[int] | None = None,
        max_prefill_length: int | None = None,
        max_length: int | None = None,
        batch_size: int | None = None,
        seed: int = 894,
    ) -> None:
        self._limits = make_limits(
            max_concurrent_decodes,
            max_concurrent_prefill,
            prefill_lengths,
            max_prefill_length,
            max_length,
            batch_size,
        )
        self._prng_key = _make_key(seed)
        self._prng_lock = threading.Lock()
        self.model = model if isinstance(model, OpenedModel) else open_model(model)
        self.quantizer = make_quantizer(self.model.plan)
        self.processor = (
            self.model.plan.checkpoint.load_tokenizer() if processor is None else processor
        )
        self.manager = manager
        self.metadata: PagedAttentionCacheMetaData = manager.metadata
        self.scheduler = InferenceScheduler(manager=manager, seed=seed)
        self.graphdef, self.graphstate, self.graphothers = self.model.split_module()
        geometry = self._limits.geometry(self.model, self.metadata)
        slots = self._limits.max_concurrent_decodes
        rows = max(geometry.sizes.decode_rows[-1], self._limits.max_concurrent_prefill)
        ends = tuple(self.eos_token_ids)
        longest = min(geometry.capacity, self.metadata.longest_sequence)
        self._sizes = StateSizes(slots, rows, longest, ends, geometry)
        self._steps = StepLauncher(self.model, storage, manager, slots, self.pad_token_id or 0)
        self._slots = Slots(self._steps, self._sizes)
        self._state: ActiveSequenceBatch | None = None
        self._states: weakref.WeakSet[ActiveSequenceBatch] = weakref.WeakSet()

    @property
    def _tokenizer(self) -> Any:
        """The processor's transformers tokenizer."""
        inner = getattr(self.processor, "tokenizer", self.processor)
        return inner.inner if isinstance(inner, Tokenizer) else inner

    @property
    def storage(self) -> PagedAttentionCache:
        """The current cache. The next step takes it over."""
        return self._steps.storage

    @property
    def continuous_forward(self) -> Any:
        """The compiled steps: execute_forward under cjit."""
        return self._steps.forward

    @property
    def compilations(self) -> Compilations:
        """The number of compiled programs, and whether compiling is forbidden."""
        return self._steps.compilations

    @property
    def graphstate_sharding(self) -> Any:
        """The shardings of `graphstate`, by the weights' paths."""
        return jax.tree.map(lambda array: array.sharding, self.graphstate)

    @property
    def graphother_sharding(self) -> Any:
        """The shardings of `graphothers`."""
        return jax.tree.map(lambda array: array.sharding, self.graphothers)

    @property
    def storage_sharding(self) -> Any:
        """The shardings of `storage`, as a tree of the same structure."""
        return jax.tree.map(lambda array: array.sharding, self.storage)

    @property
    def max_concurrent_prefill(self) -> int:
        """Max prompts of one prefill."""
        return self._limits.max_concurrent_prefill

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        return self._limits.max_concurrent_decodes

    @property
    def prefill_lengths(self) -> list[int]:
        """Numbers of tokens to which prefills are padded. Lengths above the max tokens of a step
        are unused.
        """
        return list(self._limits.prefill_lengths)

    @property
    def batch_size(self) -> int | None:
        """Rows of a decode step; None when not configured."""
        return self._limits.batch_size

    @property
    def max_prefill_length(self) -> int:
        """Max prompt tokens of one step; longer prompts are processed in chunks."""
        return self._limits.max_prefill_length

    @property
    def max_length(self) -> int:
        """Max tokens of a sequence. The metadata's max_length and the pages may limit it
        further.
        """
        return self._limits.max_length

    @property
    def samples_per_slot(self) -> int:
        """Always 1."""
        return 1

    @cached_property
    def pad_token_id(self) -> int | None:
        """The tokenizer's pad id, else the model's; None without both."""
        own: int | None = getattr(self._tokenizer, "pad_token_id", None)
        return self.model.plan.checkpoint.token_info.pad_token_id if own is None else own

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """The end-of-sequence ids of the tokenizer and of the model's generation configuration,
        each once.
        """
        found = eos_token_ids(self._tokenizer, self.model.generation_config.eos_token_id)
        if len(found) > MAX_STOP_TOKENS:
            raise ConfigError(
                f"{len(found)} end-of-sequence tokens",
                f"at most {MAX_STOP_TOKENS}",
                "Remove eos_token_id entries from the model's generation_config.json.",
            )
        return found

    @property
    def prng_key(self) -> jax.Array:
        """A new key, split from the engine's key; equal seeds give equal keys in the same order."""
        with self._prng_lock:
            self._prng_key, new = jax.random.split(self._prng_key)
        return new

    @property
    def colocated_cpus(self) -> list[jax.Device] | None:
        """The CPU devices of this process; None when JAX has no CPU backend."""
        try:
            return jax.local_devices(backend="cpu")
        except RuntimeError:
            return None

    def get_state_shardings(self, is_decode: bool = False) -> Rules:  # noqa: FBT001, FBT002  # the documented signature
        """Return rules (pattern, spec) for the leaves of a state by path; the first rule whose
        pattern occurs in the path applies.

        A decode state is replicated on every device. A prefix's keys and values are split over KV
        heads.
        """
        everything = (".*", PartitionSpec())
        if is_decode:
            return (everything,)
        sharding = self.get_prefix_destination_sharding()
        rules = [
            (f"views/{group}/[0-9]+/{name}$", where.spec)
            for group, layers in sharding.views.items()
            for name, where in layers[0].items()
        ]
        return (*rules, everything)

    def get_prefix_destination_sharding(self) -> GenerationState:
        """Return NamedShardings for the leaves of a prefix, as a GenerationState:
        jax.device_put(prefix, shardings) moves a prefix to this engine.
        """
        return self._steps.prefix_sharding()

    def init_decode_state(self, *args: Any, **kwargs: Any) -> ActiveSequenceBatch:
        """Return a state with all slots free. free_resource() applies to the latest state. The
        arguments are for other engines of this interface, and change nothing here.
        """
        self._state = ActiveSequenceBatch(self.manager, self._sizes)
        self._states.add(self._state)
        return self._state

    def free_resource(self, slot: int) -> bool:
        """Free a slot of the latest state, and its pages. Returns False when the slot is free.
        InputError for a number that is not a slot.
        """
        if isinstance(slot, bool) or not 0 <= slot < self._sizes.num_slots:
            allowed = f"0 to {self._sizes.num_slots - 1}"
            raise InputError(f"slot {slot}", allowed, "Pass the number of a slot.")
        return self._state is not None and self._state.vacate(int(slot))

    @contextlib.contextmanager
    def override(self, *, check: bool = True, **implementations: Any) -> Iterator[Self]:
        """Run steps with other implementations of ops within the block, as in LLM.override.

        RequestError while sequences hold pages, in slots or as prefixes: free and release them
        first. The end of the block frees all slots, and releases prefixes made within the block.
        The former programs return without compiling.
        """
        before = self.model
        plan = overridden_plan(before.plan, implementations, check=check)
        parts = make_parts(plan)
        with self._steps.override(parts, self._free_slots):
            self.model, self.graphdef = dataclasses.replace(before, plan=plan, parts=parts), parts
            try:
                yield self
            finally:
                self.model, self.graphdef = before, before.parts

    def _free_slots(self) -> None:
        for state in self._states:
            state.vacate_all()

    def prefill(
        self,
        graphstate: Any,
        graphothers: Any,
        tokens: Any,
        valids: Any,
        true_length: Any,
        temperature: Any = 0.0,
        top_p: Any = 1.0,
        top_k: Any = 0,
        rngs: Any = None,
    ) -> tuple[GenerationState, ResultTokens]:
        """Process one prompt, tokens int [L], or several, [n, L], and sample each one's first
        token.

        `valids` marks the tokens that count, anywhere in a row; None marks the first true_length
        tokens. true_length, temperature, top_p and top_k are numbers or arrays [n]; None for the
        last three is their default. rngs: a key, keys [n], or None for a new key. The slots of the
        result are the prompts. InputError (a ValueError) for wrong arguments, OutOfPagesError when
        the cache is full.
        """
        prompts = read_prompts(
            tokens,
            valids,
            true_length,
            sampling=(temperature, top_p, top_k),
            rngs=self.prng_key if rngs is None else rngs,
            metadata=self.metadata,
            sizes=self._sizes,
            max_prompts=self.max_concurrent_prefill,
        )
        with self._steps.lock:
            prefix, data = self._slots.prefill(self._weights(graphstate, graphothers), prompts)
        return prefix, ResultTokens(data)

    def decode(
        self, graphstate: Any, graphothers: Any, state: ActiveSequenceBatch, rngs: Any = None
    ) -> tuple[ActiveSequenceBatch, ResultTokens]:
        """Sample one token for every occupied slot with the slot's own temperature, top_p and
        top_k. Changes the state in place.

        rngs: a key that is folded into the slots' keys for this step; None: a slot samples like a
        request with the key of its prefill. A slot gets no token (`valid` is False) if it has
        ended, or waits for pages. When pages run out, the youngest slots wait; if waiting is not
        enough, they are preempted and processed again later. OutOfPagesError when that is not
        enough either.
        """
        words = None if rngs is None else read_keys(rngs, 1)[0]
        with self._steps.lock:
            data = self._slots.decode(self._weights(graphstate, graphothers), state, words)
        if data is None:
            nothing = np.zeros((self._sizes.num_slots, 3), np.int32)
            nothing[:, 0] = self.pad_token_id or 0
            return state, ResultTokens(nothing)
        return state, ResultTokens(data)

    def insert(
        self, prefix: GenerationState, decode_state: ActiveSequenceBatch, slot: int
    ) -> ActiveSequenceBatch:
        """Put a prefix of one prompt into a free slot, in place. The slot shares the prefix's full
        pages and copies its last page.

        The prefix can be inserted again, as another completion with random keys of its own.
        InputError (a ValueError) for an occupied slot, or a number out of range; then nothing
        changes.
        """
        return self.bulk_insert(prefix, decode_state, [slot])

    def bulk_insert(
        self, prefix: GenerationState, decode_state: ActiveSequenceBatch, slots: list[int]
    ) -> ActiveSequenceBatch:
        """insert() n prompts into n slots, or a single prompt into all slots (parallel samples)."""
        with self._steps.lock:
            self._slots.insert(prefix, decode_state, list(slots))
        return decode_state

    def forward(
        self,
        graphstate: Any,
        graphothers: Any,
        state: ActiveSequenceBatch,
        iteration_plan: NextIterationPlan,
    ) -> ModelOutputBatch:
        """Launch a plan's step (a chunk of a prompt, and one token for each decoding slot), and
        return at once.

        Pass the output to ModelIOProcessor.prepare_model_output before making the next plan.
        """
        with self._steps.lock:
            inputs = ModelIOProcessor.build_input(
                iteration_plan=iteration_plan, metadata=self.metadata, decodes_state=state
            )
            weights = self._weights(graphstate, graphothers)
            output, state.rows = self._steps.run(weights, inputs, state.rows)
        return output

    def _weights(self, graphstate: Any, graphothers: Any) -> Weights:
        """The model's weights, updated with the given ones."""
        if graphstate is self.graphstate and not graphothers:
            return self.model.weights
        return merge_weights(self.model.weights, graphstate, graphothers)
