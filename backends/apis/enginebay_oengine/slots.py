"""Slots: processes prompts to prefixes, inserts prefixes into slots, and provides pages before
slots decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import Lease
from enginebay.contracts.engine import RowPlan
from enginebay.contracts.model import Weights
from enginebay.errors import InputError
from enginebay.types import FrozenSampling, Request
from enginebay_oengine.active_batch import ActiveRequest, ActiveSequenceBatch, StateSizes, make_rows
from enginebay_oengine.continuous_forward import ModelInputBatch, StepLauncher
from enginebay_oengine.generation_state import GenerationState, LeaseHandles
from enginebay_oengine.page_manager import HBMPageManager, OutOfPagesError
from enginebay_paged.page_steps import POOL, PromptChunk, decode_part, prefill_part

UNSAMPLED = Request("", np.zeros(0, np.int32), FrozenSampling(0), (0, 0), arrival_s=0.0)
"""The request of a row whose tokens are processed again, without sampling."""

SHORTEST_HISTORY = 32


class Slots:
    """The implementation of prefill, insert and decode over a StepLauncher, whose lock the caller
    holds.
    """

    def __init__(self, steps: StepLauncher, sizes: StateSizes) -> None:
        self.steps = steps
        self.manager = steps.manager
        self.sizes = sizes
        self._scratch = make_rows(steps.manager, sizes)

    def prefill(
        self, weights: Weights, prompts: Sequence[Request]
    ) -> tuple[GenerationState, jax.Array]:
        """Return the prefix of prompts, and the data of its ResultTokens. OutOfPagesError when
        there are not enough pages.
        """
        token_ids = [prompt.prompt_token_ids for prompt in prompts]
        lengths = [len(ids) for ids in token_ids]
        leases = self._admit_all(lengths)
        held = LeaseHandles(self.steps, leases, [length + 1 for length in lengths])
        self._process(weights, token_ids, prompts, leases, samples=True)
        width = max(SHORTEST_HISTORY, 1 << max(lengths).bit_length())
        rows, data = self.steps.take(self._scratch, len(lengths), min(width, self.sizes.max_length))
        base_keys = jnp.asarray(np.asarray([prompt.key for prompt in prompts], np.uint32))
        return GenerationState(rows, base_keys, None, held), data

    def insert(self, prefix: GenerationState, state: ActiveSequenceBatch, slots: list[int]) -> None:
        """Insert a prefix's sequences into free slots, one each, or a single sequence into all of
        them.
        """
        _check_engine(self.manager, state)
        count = prefix.num_prompts
        if (
            not slots
            or (count != 1 and len(slots) != count)
            or len(set(map(int, slots))) != len(slots)
        ):
            raise InputError(
                f"slots {list(slots)} for a prefix of {count} prompts",
                "a slot for each prompt, or different slots for a single prompt",
                f"Pass {count} different slots.",
            )
        with state.context_lock:
            for slot in slots:
                state.check_free(slot)
            here, held = self._adopt(prefix)
            rows = [0] * len(slots) if count == 1 else list(range(count))
            copies = range(len(slots)) if count == 1 else [0] * count
            leases = self._fork_all(held, rows)
            places: dict[int, tuple[int, int]] = {}
            for slot, row, copy, lease in zip(slots, rows, copies, leases, strict=True):
                state.occupy(int(slot), ActiveRequest(f"slot {slot}", lease, held.lengths[row]))
                places[int(slot)] = (row, prefix.num_copies + copy)
            prefix.num_copies += 1 + max(copies)
            state.rows = self.steps.place(state.rows, here, places)

    def decode(
        self, weights: Weights, state: ActiveSequenceBatch, rngs: np.ndarray | None
    ) -> jax.Array | None:
        """Sample one token for each slot that can decode. Returns the data of the ResultTokens, or
        None when no slot can.
        """
        _check_engine(self.manager, state)
        with state.context_lock:
            running = self._make_room(weights, state)
            if not running:
                return None
            pages = {
                slot: active.lease.pages[POOL]
                for slot, active in running.items()
                if active.lease is not None
            }
            longest = max(active.length for active in running.values())
            inputs = ModelInputBatch(
                decode=decode_part(pages, longest, self.sizes.geometry, self.sizes.num_rows)
            )
            output, state.rows = self.steps.run(weights, inputs, state.rows, rngs)
            for active in running.values():
                if active.lease is not None:
                    self.manager.commit(active.lease, active.length)
                active.length += 1
            data: jax.Array = output.decodes_packed
            return data

    def _admit_all(self, lengths: list[int]) -> list[Lease]:
        leases: list[Lease] = []
        for length in lengths:
            lease = self.manager.admit(length)
            if lease is None:
                for given in leases:
                    self.manager.release(given)
                raise OutOfPagesError(
                    f"prompts of {lengths} tokens",
                    f"{self.manager.num_free_pages * self.manager.page_size} tokens, "
                    "which are free now",
                    "Free slots, release prefixes, or make a cache with more pages.",
                )
            leases.append(lease)
        return leases

    def _process(
        self,
        weights: Weights,
        prompts: Sequence[np.ndarray],
        requests: Sequence[Request],
        leases: Sequence[Lease],
        *,
        samples: bool,
    ) -> None:
        """Write the keys and values of prompts to their pages, in chunks of at most a step's
        tokens.
        """
        done = [0] * len(prompts)
        most = self.sizes.geometry.sizes.prefill_tokens[-1]
        while any(count < len(ids) for count, ids in zip(done, prompts, strict=True)):
            chunks, room = [], most
            for row, ids in enumerate(prompts):
                end = min(len(ids), done[row] + room)
                if end > done[row]:
                    count, last = end - done[row], samples and end == len(ids)
                    plan = RowPlan(row, leases[row], done[row], count, last)
                    chunks.append(PromptChunk(plan, ids[done[row] : end], requests[row]))
                    room -= count
                    done[row] = end
            part = prefill_part(chunks, self.sizes.geometry, self.sizes.num_rows)
            _, self._scratch = self.steps.run(weights, ModelInputBatch(prefill=part), self._scratch)
        for lease, ids in zip(leases, prompts, strict=True):
            self.manager.commit(lease, len(ids))

    def _adopt(self, prefix: GenerationState) -> tuple[GenerationState, LeaseHandles]:
        """The prefix with pages in this cache: unchanged, or copied here to new pages."""
        if prefix.held is not None and prefix.held.owner is self.steps and prefix.held.let_go.alive:
            return prefix, prefix.held
        moved: GenerationState = jax.device_put(prefix, self.steps.prefix_sharding())
        lengths = moved.lengths
        most = self.sizes.max_length
        if max(lengths) > most:
            raise InputError(
                f"a prefix of {max(lengths)} tokens",
                f"at most {most}",
                "Insert it into an engine with a larger max_length or more pages.",
            )
        leases = self._admit_all([length - 1 for length in lengths])
        held = LeaseHandles(self.steps, leases, lengths)
        self.steps.write(moved.views, leases)
        for lease, length in zip(leases, lengths, strict=True):
            self.manager.commit(lease, length - 1)
        target = moved if prefix.held is not None else prefix
        target.num_copies = prefix.num_copies
        target.held = held
        target.rows = dataclasses.replace(
            moved.rows,
            max_length=jnp.minimum(moved.rows.max_length, most),
            token_ids=moved.rows.token_ids[:, :most],
        )
        target.base_keys = moved.base_keys
        return target, held

    def _fork_all(self, held: LeaseHandles, rows: list[int]) -> list[Lease]:
        leases: list[Lease] = []
        for row in rows:
            lease = self.manager.fork(held.leases[row], held.lengths[row] - 1)
            if lease is None:
                for given in leases:
                    self.manager.release(given)
                raise OutOfPagesError(
                    "no free page for a copy of the prefix's last page, "
                    "or too many sequences that share pages",
                    "a page for each slot, and at most four sequences per page",
                    "Free slots with free_resource().",
                )
            leases.append(lease)
        return leases

    def _make_room(self, weights: Weights, state: ActiveSequenceBatch) -> dict[int, ActiveRequest]:
        """The slots that get a token, with pages for it, oldest first. At least one, unless all
        have ended.
        """
        while True:
            going = {
                slot: active
                for slot, active in state.active_slot_requests_map.items()
                if active.is_decoding
                and not active.has_ended
                and active.length < self.sizes.max_length
            }
            running = {
                slot: active
                for slot, active in going.items()
                if active.lease is not None and self.manager.reserve(active.lease, active.length)
            }
            if len(running) == len(going):
                return running
            if self._note_ended(state, going):
                continue
            starved = any(
                active.lease is not None for slot, active in going.items() if slot not in running
            )
            if not starved:
                lost = {slot: active for slot, active in going.items() if active.lease is None}
                running |= {
                    s: active
                    for s, active in lost.items()
                    if self._restore(weights, state, s, active)
                }
            if running:
                return running
            self._preempt(going)

    def _note_ended(self, state: ActiveSequenceBatch, going: dict[int, ActiveRequest]) -> bool:
        """Release the pages of sequences that the device has ended, and return whether there were
        any. Waits for all launched steps.
        """
        finished = np.asarray(state.rows.finished)
        ended = [active for slot, active in going.items() if finished[slot]]
        for active in ended:
            active.has_ended = True
            if active.lease is not None:
                self.manager.release(active.lease)
                active.lease = None
        return bool(ended)

    def _restore(
        self, weights: Weights, state: ActiveSequenceBatch, slot: int, active: ActiveRequest
    ) -> bool:
        """Process a preempted slot's tokens again, if there are pages for them and for the next
        token.
        """
        lease = self.manager.admit(active.length)
        if lease is None:
            return False
        tokens = np.asarray(state.rows.token_ids[slot])[: active.length - 1]
        self._process(weights, [tokens], [UNSAMPLED], [lease], samples=False)
        active.lease = lease
        return True

    def _preempt(self, going: dict[int, ActiveRequest]) -> None:
        """Release the pages of the youngest sequence."""
        holding = [active for active in going.values() if active.lease is not None]
        if len(holding) < 2:
            raise OutOfPagesError(
                f"{self.manager.num_free_pages} free pages, and no slot to preempt",
                "pages for the sequences that decode",
                "Release prefixes, call free_hbm_pages(), or make a cache with more pages.",
            )
        lease = holding[-1].lease
        assert lease is not None, "only slots with a lease are in `holding`"
        holding[-1].lease = None
        self.manager.release(lease)


def _check_engine(manager: HBMPageManager, state: ActiveSequenceBatch) -> None:
    """Raise InputError for a state of another engine."""
    if state.manager is not manager:
        raise InputError(
            "a state of another engine",
            "a state of this engine",
            "Call init_decode_state() of this engine.",
        )
