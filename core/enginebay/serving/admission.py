"""Admission: gives requests rows and cache leases, and records which tokens are in the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from enginebay.contracts.engine import Engine
from enginebay.contracts.prefix_key import PrefixKey
from enginebay.contracts.text import MAX_GENERATION_PROMPT
from enginebay.errors import RequestError
from enginebay.serving.request_table import RequestTable
from enginebay.serving.running import Running

PlannedChunk = tuple[Running, int]
"""A request, and the number of its tokens to prefill now."""


class Admission:
    """Gives requests a row of the row table and a lease of cache, and frees both. Belongs to the
    loop's thread.
    """

    def __init__(self, engine: Engine, requests: RequestTable) -> None:
        self.engine = engine
        self.requests = requests

    def refusal(self, tracked: Running) -> RequestError | None:
        """The error for a request that would not fit even if it ran alone, or whose adapter was
        unloaded before it was queued; None for one that can run.
        """
        adapters, key = self.engine.adapters, tracked.request.adapter
        if key and (adapters is None or key not in adapters.loaded().values()):
            todo = "Load the adapter again, then send the request."
            return RequestError(
                "the adapter of this request was unloaded", "an adapter that is loaded", todo
            )
        most = self.engine.ledger.max_tokens
        if most is None or tracked.num_total <= most:
            return None
        prompt, new = tracked.num_prompt, tracked.num_total - tracked.num_prompt
        return RequestError(
            f"a prompt of {prompt} tokens and up to {new} new ones",
            f"{most} together, which is the size of the whole cache",
            "Shorten the prompt, pass a smaller max_tokens, or give the engine more cache.",
        )

    def admit_chunks(
        self, chunks: Sequence[PlannedChunk], *, hold: bool = True
    ) -> tuple[list[PlannedChunk], list[PlannedChunk]]:
        """Return (chunks to launch now, chunks that are held back).

        A chunk is launched when its request runs already or is admitted now. After the first
        request that is not admitted, no later one is, so that none overtakes it; neither list has
        these chunks. When the ledger forks and with `hold`, a request is held back while another
        completion of the same prompt computes the prompt.
        """
        if not chunks:
            return [], []
        forks = self.engine.ledger.forks
        heads = self.requests.heads() if forks else {}
        begun = self.requests.begun() if forks and hold else set()
        able: list[PlannedChunk] = []
        held: list[PlannedChunk] = []
        is_open = True
        for tracked, num_tokens in chunks:
            parent = tracked.request.parent_id
            if tracked.lease is None and parent in begun and parent not in heads:
                held.append((tracked, num_tokens))
                continue
            if tracked.lease is None:
                is_open = is_open and self.admit(tracked, heads.get(parent))
                if not is_open:
                    continue
                if forks and hold and parent:
                    begun.add(parent)
            able.append((tracked, num_tokens))
        return able, held if is_open else []

    def admit(self, tracked: Running, head: Running | None = None) -> bool:
        """Admit a waiting request; False when there is not enough free cache now.

        `head` is another completion of the same prompt, whose prompt is in the cache.
        """
        request = tracked.request
        table, ledger, adapters = self.engine.rows, self.engine.ledger, self.engine.adapters
        place: int | None = 0
        if adapters is not None and request.adapter:
            place = adapters.place(request.adapter)
        if place is None:
            return False
        row = table.add_request(request)
        table.append_tokens(row, tracked.output)
        token_ids = table.token_ids[row, : tracked.num_prefill]
        wanted = tracked.num_total
        if ledger.grows:
            wanted = min(wanted, tracked.num_prefill + 1)
        num_shared = tracked.num_shareable
        if tracked.needs_every_token:
            token_ids, head = token_ids[:1], None  # a lookup of one token finds no cached prefix
        # After a preemption the cache may also have some of its output.
        if head is None or (tracked.output and self.num_cached(tracked) > num_shared):
            lease = ledger.admit(row, token_ids, wanted, self._key(tracked))
        else:
            lease = ledger.fork(head.row_lease, row, num_shared, wanted)
        if lease is None:
            table.remove_request(request.request_id)
            if place and adapters is not None:
                adapters.release(request.adapter)
            return False
        table.adapters[row] = place
        tracked.lease = lease
        tracked.num_computed = lease.num_cached
        if math.isnan(tracked.metrics.first_scheduled_s):
            tracked.metrics.first_scheduled_s = time.monotonic()
            tracked.metrics.num_cached_tokens = lease.num_cached
            tracked.metrics.num_host_tokens = lease.num_from_host
            tracked.metrics.num_disk_tokens = lease.num_from_disk
        del self.requests.waiting[request.request_id]
        self.requests.running[request.request_id] = tracked
        return True

    def num_cached(self, tracked: Running) -> int:
        """How many of the first tokens that a waiting request prefills are in the cache now."""
        return self.engine.ledger.num_cached_tokens(tracked.tokens_to_prefill, self._key(tracked))

    def _key(self, tracked: Running) -> PrefixKey:
        request = tracked.request
        hashes = () if request.embeds is None else request.embeds.hashes
        version, salt = self.engine.weights_version, request.cache_salt
        return PrefixKey(version, salt, hashes, request.adapter)

    def reserve(self, tracked: Running, num_tokens: int) -> bool:
        """Reserve cache for `num_tokens` tokens of a running request; False when there is not
        enough free cache now.
        """
        return self.engine.ledger.reserve(tracked.row_lease, num_tokens)

    def chunk_end(self, tracked: Running) -> int:
        """The last position up to which the next prefill chunk of a running request may reach."""
        ledger, parent = self.engine.ledger, tracked.request.parent_id
        others = self.requests.waiting.values() if ledger.states and parent else ()
        is_forked = parent in [one.request.parent_id for one in others]
        fork_at = tracked.num_prompt - 1 if is_forked else None
        if not (ledger.states and tracked.request.begins_text):
            return ledger.chunk_end(tracked.row_lease, tracked.num_prefill, fork_at)
        reuse_at = max(0, tracked.num_prompt - MAX_GENERATION_PROMPT)
        return ledger.chunk_end(tracked.row_lease, tracked.num_prefill, fork_at, reuse_at)

    def set_computed(self, tracked: Running, num_tokens: int) -> None:
        """Record that launched steps have put the first `num_tokens` tokens of a running request
        into the cache.
        """
        table, lease = self.engine.rows, tracked.row_lease
        table.num_computed_tokens[lease.row] = num_tokens
        self.engine.ledger.commit(lease, table.token_ids[lease.row, :num_tokens])

    def append(self, requests: Sequence[Running], tokens: np.ndarray, counts: np.ndarray) -> None:
        """Append the first counts[i] of tokens[i], int32 [requests, steps], to each request that
        has not ended.

        After that, all of a request's tokens except the last are in the cache.
        """
        places = [
            i
            for i, (t, count) in enumerate(zip(requests, counts.tolist(), strict=True))
            if count and not t.finished
        ]
        leases = [lease for i in places if (lease := requests[i].lease) is not None]
        assert len(leases) == len(places), "an unfinished request of a launched step holds its row"
        table, rows = self.engine.rows, np.asarray([lease.row for lease in leases], np.int32)
        table.append_step(rows, tokens[places], counts[places])
        table.num_computed_tokens[rows] = num_computed = table.num_tokens[rows] - 1
        self.engine.ledger.commit_rows(leases, table.token_ids, num_computed)

    def free(self, tracked: Running) -> None:
        """Free a request's row and lease, if it has them."""
        if tracked.lease is not None:
            lease, tracked.lease = tracked.lease, None
            self.engine.rows.remove_request(tracked.request.request_id)
            self.engine.ledger.release(lease)
            adapters, key = self.engine.adapters, tracked.request.adapter
            if adapters is not None and key:
                adapters.release(key)

    def is_stuck(self, *, refused: bool) -> bool:
        """Whether several rows run, and none can go on until another row frees its cache.

        `refused`: the scheduler chose rows to decode and none had cache for it. Otherwise this
        checks whether any running row could continue.
        """
        running = self.requests.running.values()
        return len(running) > 1 and (refused or not any(map(self._can_continue, running)))

    def _can_continue(self, tracked: Running) -> bool:
        return tracked.num_computed < tracked.num_prefill or self.reserve(
            tracked, tracked.num_tokens
        )
