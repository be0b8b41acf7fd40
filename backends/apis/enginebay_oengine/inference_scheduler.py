"""InferenceScheduler: decides which prompt and which slots run next, so that pages suffice and at
least one sequence makes progress.
"""

from __future__ import annotations

import collections
import threading

import numpy as np

from enginebay.errors import InputError
from enginebay_oengine.active_batch import ActiveRequest, ActiveSequenceBatch
from enginebay_oengine.iteration import (
    AllocatedPrefillPages,
    GenerationStepTask,
    InitialSequenceRequest,
    NextIterationPlan,
    SlotPageAssignment,
)
from enginebay_oengine.page_manager import HBMPageManager, OutOfPagesError
from enginebay_paged.page_steps import POOL


class InferenceScheduler:
    """Queues of prompts and of sequences that start to decode, and the plans made from them.

    Any thread may enqueue; one thread makes plans. Sequences are served in order of arrival. While
    one of them waits for pages, no prompt starts. When none can continue, the latest one releases
    its pages and starts again later, with the same tokens.
    """

    def __init__(self, manager: HBMPageManager, seed: int = 0) -> None:
        self.manager = manager
        self._prefills: collections.deque[InitialSequenceRequest] = collections.deque()
        self._decodes: collections.deque[GenerationStepTask] = collections.deque()
        self._condition = threading.Condition()
        self._seeds = np.random.default_rng(seed)

    @property
    def num_waiting(self) -> int:
        """Number of prompts that have not started."""
        with self._condition:
            return len(self._prefills)

    def enqueue_prefill_request(self, request: InitialSequenceRequest) -> None:
        """Queue a prompt. InputError (a ValueError) for a prompt without room for a new token, or
        queued before.
        """
        most = self.manager.metadata.longest_sequence
        if request.num_tokens >= most:
            raise InputError(
                f"a prompt of {request.num_tokens} tokens",
                f"at most {most - 1}, which leaves room for one new token",
                "Shorten the prompt, or make a cache with more pages.",
            )
        self.manager.metadata.check_token_ids(request.tokens())
        self.manager.metadata.check_temperature(request.temperature)
        with self._condition:
            if request.slot is not None or request in self._prefills:
                raise InputError(
                    f"request {request.id!r} a second time",
                    "each request once",
                    "Make a new InitialSequenceRequest.",
                )
            if request.seed is None:
                request.seed = int(self._seeds.integers(0, 2**63))
            self._prefills.append(request)
            self._condition.notify_all()

    def enqueue_decodes_request(self, task: GenerationStepTask) -> None:
        """Queue a sequence whose prompt is processed. It decodes from the next plan on."""
        with self._condition:
            self._decodes.append(task)
            self._condition.notify_all()

    def wait_for_work(self, timeout_s: float | None = None) -> bool:
        """Wait until something is queued, at most timeout_s seconds. Returns whether something is
        queued.
        """
        with self._condition:
            return self._condition.wait_for(
                lambda: bool(self._prefills or self._decodes), timeout_s
            )

    def create_plan(
        self, active_prefill: InitialSequenceRequest | None, decodes_state: ActiveSequenceBatch
    ) -> NextIterationPlan | None:
        """Plan the next step; None when there is nothing to run. `active_prefill`: the prompt that
        is partly processed.

        Pages are allocated here, only for the positions that the step writes. OutOfPagesError when
        all sequences wait for pages that prefixes or alloc_hbm_pages() hold, which only the caller
        can release.
        """
        state = decodes_state
        with state.context_lock, self.manager.lock:
            joined = self._join(state)
            prefill, pages = active_prefill, None
            preempted: list[str] = []
            while True:
                slots, updates, waits = self._reserve(state)
                if prefill is None and not waits and not preempted:
                    prefill, pages = self._begin(state)
                if slots or prefill is not None or not waits:
                    break
                preempted.append(self._preempt(state))
            if not slots and prefill is None:
                return None
            return NextIterationPlan(
                prefill_request=prefill,
                schedule_prefill=prefill is not None,
                schedule_decodes=bool(slots),
                prefill_pages_update=pages,
                new_decodes_requests=joined,
                decodes_state_page_updates=tuple(updates),
                num_prefill_tokens=0 if prefill is None else _next_chunk(prefill, state),
                decode_slots=tuple(slots),
                preempted=tuple(preempted),
            )

    def _join(self, state: ActiveSequenceBatch) -> tuple[GenerationStepTask, ...]:
        with self._condition:
            joined = tuple(self._decodes)
            self._decodes.clear()
        begun = []
        for task in joined:
            active = state.active_slot_requests_map.get(task.slot)
            if active is not None and active.id == task.id:  # else its slot was freed since
                active.is_decoding = True
                begun.append(task)
        return tuple(begun)

    def _reserve(
        self, state: ActiveSequenceBatch
    ) -> tuple[list[int], list[SlotPageAssignment], bool]:
        """Slots that can decode, their new pages, and whether other slots wait for pages."""
        slots: list[int] = []
        updates: list[SlotPageAssignment] = []
        waits = False
        for slot, active in state.active_slot_requests_map.items():
            if not active.is_decoding:
                continue
            before = () if active.lease is None else active.lease.pages[POOL]
            if active.lease is None or not self.manager.reserve(active.lease, active.length):
                waits = True
                continue
            slots.append(slot)
            updates += [
                SlotPageAssignment(slot, i, page)
                for i, page in enumerate(active.lease.pages[POOL])
                if i >= len(before) or before[i] != page
            ]
        return slots, updates, waits

    def _begin(
        self, state: ActiveSequenceBatch
    ) -> tuple[InitialSequenceRequest | None, AllocatedPrefillPages | None]:
        """The next queued prompt with its pages, if there is a free slot and enough pages."""
        with self._condition:
            if not self._prefills or state.available_slots.empty():
                return None, None
            request = self._prefills[0]
            lease = self.manager.admit(
                min(request.num_tokens + 1, self.manager.metadata.longest_sequence)
            )
            if lease is None:
                return None, None
            active = ActiveRequest(
                request.id, lease, request.num_tokens, is_decoding=False, request=request
            )
            slot = state.take_slot(active)
            if slot is None:
                self.manager.release(lease)
                return None, None
            self._prefills.popleft()
            request.slot, request.lease = slot, lease
            return request, AllocatedPrefillPages(request.id, slot, lease.pages[POOL])

    def _preempt(self, state: ActiveSequenceBatch) -> str:
        """Release the pages of the latest sequence, and queue it first."""
        decoding = [
            (slot, active.request)
            for slot, active in state.active_slot_requests_map.items()
            if active.is_decoding and active.request is not None
        ]
        if len(state.active_slot_requests_map) < 2 or not decoding:
            raise OutOfPagesError(
                f"{self.manager.num_free_pages} free pages, and no sequence to preempt",
                "pages for the sequences that decode",
                "Release prefixes, call free_hbm_pages(), or make a cache with more pages.",
            )
        slot, request = decoding[-1]
        state.vacate(slot)
        request.restart()
        with self._condition:
            self._prefills.appendleft(request)
        return request.id


def _next_chunk(request: InitialSequenceRequest, state: ActiveSequenceBatch) -> int:
    return min(
        request.num_tokens - request.num_computed, state.sizes.geometry.sizes.prefill_tokens[-1]
    )
