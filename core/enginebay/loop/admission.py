"""Admission: the rows and leases of running requests, and which of their tokens the cache has."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from enginebay.engine import Engine
from enginebay.errors import RequestError
from enginebay.loop.request_table import RequestState, RequestTable
from enginebay.prefix_key import PrefixKey

Chunk = tuple[RequestState, int]
"""A request, and how many of its tokens to prefill now."""


class Admission:
    """Gives requests a row of the table and a lease of cache, and takes both back. Belongs to the
    loop's thread.
    """

    def __init__(self, engine: Engine, requests: RequestTable) -> None:
        self.engine = engine
        self.requests = requests

    def why_never(self, tracked: RequestState) -> RequestError | None:
        """The error for a request that would not fit if it were alone, or None."""
        most = self.engine.ledger.max_tokens
        if most is None or tracked.num_total <= most:
            return None
        prompt, new = len(tracked.request.prompt_token_ids), tracked.request.sampling.max_tokens
        return RequestError(
            f"a prompt of {prompt} tokens and up to {new} new ones",
            f"{most} together, which is all the cache there is",
            "Shorten the prompt, lower max_tokens, or give the engine more cache.",
        )

    def let_in(
        self, chunks: Sequence[Chunk], *, hold: bool = True
    ) -> tuple[list[Chunk], list[Chunk]]:
        """Those of the chunks whose request runs, is admitted now, or is held back. Nobody
        overtakes one that is refused.

        Where the ledger forks and with `hold`, a completion is held back while another one computes
        their prompt.
        """
        if not chunks:
            return [], []
        forks = self.engine.ledger.forks
        heads = self.requests.heads() if forks else {}
        begun = self.requests.begun() if forks and hold else set()
        able: list[Chunk] = []
        held: list[Chunk] = []
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

    def admit(self, tracked: RequestState, head: RequestState | None = None) -> bool:
        """Let a waiting request run; False when there is not enough cache now.

        `head` is another completion of its prompt, which has it in the cache.
        """
        request = tracked.request
        table, ledger = self.engine.rows, self.engine.ledger
        row = table.add_request(request)
        table.append_tokens(row, tracked.output)
        token_ids = table.token_ids[row, : tracked.num_prefill]
        wanted = tracked.num_prefill + 1 if ledger.grows else tracked.num_total
        num_shared = tracked.num_shareable
        if tracked.needs_every_token:
            # Nothing is found of a prompt of one token.
            lease = ledger.admit(row, token_ids[:1], wanted, self._key(tracked))
        # After a preemption the cache may have some of its output too.
        elif head is None or (tracked.output and self.num_cached(tracked) > num_shared):
            lease = ledger.admit(row, token_ids, wanted, self._key(tracked))
        else:
            assert head.lease is not None, "running requests have a lease"
            lease = ledger.fork(head.lease, row, num_shared, wanted)
        if lease is None:
            table.remove_request(request.request_id)
            return False
        tracked.lease = lease
        tracked.num_computed = lease.num_cached
        if math.isnan(tracked.metrics.first_scheduled_s):
            tracked.metrics.first_scheduled_s = time.monotonic()
            tracked.metrics.num_cached_tokens = lease.num_cached
        del self.requests.waiting[request.request_id]
        self.requests.running[request.request_id] = tracked
        return True

    def num_cached(self, tracked: RequestState) -> int:
        """How many of the first tokens that a waiting request prefills the cache has now."""
        return self.engine.ledger.num_cached_tokens(tracked.tokens_to_prefill, self._key(tracked))

    def _key(self, tracked: RequestState) -> PrefixKey:
        request = tracked.request
        hashes = () if request.embeds is None else request.embeds.hashes
        return PrefixKey(self.engine.weights_version, request.cache_salt, hashes)

    def reserve(self, tracked: RequestState, num_tokens: int) -> bool:
        """Promise a running request cache for so many tokens; False when there is not enough
        now.
        """
        assert tracked.lease is not None, "running requests have a lease"
        return self.engine.ledger.reserve(tracked.lease, num_tokens)

    def chunk_end(self, tracked: RequestState) -> int:
        """Where the next chunk of a running request that is prefilled ends at the latest."""
        assert tracked.lease is not None, "running requests have a lease"
        ledger, parent = self.engine.ledger, tracked.request.parent_id
        others = self.requests.waiting.values() if ledger.states and parent else ()
        is_forked = any(one.request.parent_id == parent for one in others)
        fork_at = tracked.num_prompt - 1 if is_forked else None
        return ledger.chunk_end(tracked.lease, tracked.num_prefill, fork_at)

    def set_computed(self, tracked: RequestState, num_tokens: int) -> None:
        """Take note that launched steps put so many tokens of a running request into the cache."""
        assert tracked.lease is not None, "an unfinished request of a launched step holds its row"
        table, row = self.engine.rows, tracked.lease.row
        table.num_computed_tokens[row] = num_tokens
        self.engine.ledger.commit(tracked.lease, table.token_ids[row, :num_tokens])

    def append(
        self, requests: Sequence[RequestState], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        """Put the first counts[i] of tokens[i], int32 [requests, steps], behind each request's that
        has not ended.

        All of a request's tokens but the last one are in the cache then.
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

    def free(self, tracked: RequestState) -> None:
        """Take back a request's row and lease, if it holds them."""
        if tracked.lease is not None:
            lease, tracked.lease = tracked.lease, None
            self.engine.rows.remove_request(tracked.request.request_id)
            self.engine.ledger.release(lease)

    def latest_that_blocks(self, *, refused: bool) -> RequestState | None:
        """The latest arrival, when several run and lack cache.

        `refused`: rows were to decode, and none could. Otherwise nobody was to, and it counts
        whether anyone could.
        """
        running = sorted(
            self.requests.running.values(), key=lambda tracked: tracked.request.arrival_s
        )
        if len(running) < 2 or not (refused or not any(map(self._can_go_on, running))):
            return None
        return running[-1]

    def _can_go_on(self, tracked: RequestState) -> bool:
        return tracked.num_computed < tracked.num_prefill or self.reserve(
            tracked, tracked.num_tokens
        )
