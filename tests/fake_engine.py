"""A fake engine: a real row table and ledger, a cache in NumPy, and tokens that a test can predict.

The cache holds token ids where a real cache holds keys and values. The next token is computed from
the ids that the row reads through its page table: a page that is lost or shared wrongly changes the
tokens. The engine runs greedy and sampled requests and verifies drafts. It has no logits.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping

import numpy as np

from enginebay.contracts.cache import Lease, Ledger
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.engine import Engine, GroupState, Pending, RowPlan, RowState, StepPlan
from enginebay.errors import InternalError
from enginebay.memory import MemoryPlan
from enginebay.types import Request
from enginebay_runtime.rows import RowTable

Pages = Mapping[str, np.ndarray]
"""By cache group: page ids int32 [pages] of a row, or [rows, pages]."""

NUM_SPECIAL = 4
"""The engine generates no id below this: lower ids are special tokens of the demo model."""


def next_token(context: np.ndarray, request: Request, vocab_size: int) -> int:
    """The token after `context` (int32 [tokens]); if sampled, it also depends on key and index."""
    seed = zlib.crc32(np.asarray(context, np.int32).tobytes())
    if not request.sampling.is_greedy:
        seed = zlib.crc32(f"{request.key} {request.index}".encode(), seed)
    return NUM_SPECIAL + seed % (vocab_size - NUM_SPECIAL)


@dataclasses.dataclass
class Launched(Pending):
    """A launched step, whose tokens are already computed."""

    tokens: np.ndarray
    before_read: Callable[[], None]
    hidden: list[np.ndarray]

    def read(self) -> np.ndarray:
        self.before_read()
        return self.tokens

    def read_hidden(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        states = self.hidden[row]
        return states.sum(axis=0), states[-1]


def hidden_of(token_ids: np.ndarray, start: int) -> np.ndarray:
    """f32 [tokens, 2], the final hidden states of tokens: the id, and the position from `start`."""
    positions = np.arange(start, start + len(token_ids))
    return np.stack([token_ids, positions], axis=1).astype(np.float32)


class FakeEngine(Engine):
    """Runs steps on the host. A test may set `before_step` and `before_read` to count, wait or
    raise.
    """

    rows: RowTable

    def __init__(
        self,
        rows: RowTable,
        ledger: Ledger,
        num_pages: Mapping[str, int],
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_pages`: of each cache group, of which one keeps whole rows. `forget` makes the
        ledger drop its kept prefixes when the cache is dropped.
        """
        self.rows, self.ledger, self._forget = rows, ledger, forget
        self.compilations = Compilations()
        self.before_step: Callable[[StepPlan], None] = lambda _: None
        self.before_read: Callable[[StepPlan], None] = lambda _: None
        self._num_pages, self._page_size = num_pages, rows.page_sizes[0]
        size = 4 * self._page_size * sum(num_pages.values())
        self.memory = MemoryPlan(0, size, 0, device_bytes=2**40)
        self._cache: dict[str, np.ndarray] | None = None
        self._host: dict[tuple[str, int], np.ndarray] = {}
        self._length, self._last = (np.zeros(rows.max_num_reqs, np.int32) for _ in range(2))
        self._finished = np.ones(rows.max_num_reqs, bool)
        self.written_slots: list[int] = []
        """The slots that adapters were written to."""

    def write_slot(self, slot: int, arrays: Mapping[str, np.ndarray]) -> None:
        self.written_slots.append(slot)

    def make_arrays(self) -> None:
        if self._cache is None:
            self._cache = {
                group: np.full((count, self._page_size), -1, np.int32)
                for group, count in self._num_pages.items()
            }

    def drop_arrays(self) -> None:
        if self.rows.num_reqs:
            raise InternalError(f"the cache is dropped while {self.rows.num_reqs} rows are running")
        self._forget()
        self._cache = None
        self._host = {}

    def warmup(self, progress: object = None) -> int:
        return 0

    def step(self, plan: StepPlan) -> Pending:
        self.before_step(plan)
        tables = self._tables([row.lease for row in plan.rows])
        tokens = np.full((len(plan.rows), max(plan.num_steps, 1)), -1, np.int32)
        for i, (row, its_tokens) in enumerate(zip(plan.rows, tokens, strict=True)):
            its_pages = {group: table[i] for group, table in tables.items()}
            if row.decodes:
                its_tokens[0] = self._decode(row.lease, its_pages)
            elif not plan.is_decode:
                self._prefill(row, its_pages, its_tokens)
            elif row.draft_token_ids:
                self._verify(row, its_pages, its_tokens)
            else:
                its_tokens[:] = [self._decode(row.lease, its_pages) for _ in its_tokens]
        hidden = [self._hidden(row) for row in plan.rows]
        return Launched(tokens, lambda: self.before_read(plan), hidden)

    def _hidden(self, plan: RowPlan) -> np.ndarray:
        start = plan.num_computed
        token_ids = self.rows.token_ids[plan.row, start : start + plan.num_tokens]
        return hidden_of(token_ids, start)

    def take(self, lease: Lease) -> RowState:
        row, num_cached = lease.row, max(int(self._length[lease.row]) - 1, 0)
        pages = {group: table[0] for group, table in self._tables([lease]).items()}
        cached = self._read(pages, num_cached)[None, :, None, None]
        column = {"length": self._length[row], "finished": self._finished[row]}
        token_ids = self.rows.token_ids[row, : self.rows.num_tokens[row]].copy()
        groups = {"all": GroupState(0, {"k": cached, "v": cached})}
        return RowState(token_ids, num_cached, int(self._last[row]), groups, column)

    def put(self, lease: Lease, state: RowState) -> None:
        pages = {group: table[0] for group, table in self._tables([lease]).items()}
        self._write(lease, pages, 0, state.groups["all"].arrays["k"][0, :, 0, 0])
        self._last[lease.row] = state.last_token
        self._length[lease.row] = state.sampling["length"]
        self._finished[lease.row] = state.sampling["finished"]

    def _tables(self, leases: list[Lease]) -> Pages:
        if self._cache is None:
            raise InternalError("the engine is used before make_arrays()")
        for move in self.ledger.take_moves():
            pages = self._cache[move.group]
            if move.kind == "out":
                self._host[move.group, move.target] = pages[move.source].copy()
            elif move.kind == "in":
                pages[move.target] = self._host[move.group, move.source]
            else:
                pages[move.target] = pages[move.source]
        shape = (len(leases), self.rows.page_tables[0].page_ids.shape[1])
        tables = {group: np.zeros(shape, np.int32) for group in self._cache}
        for group, table in tables.items():
            self.ledger.write_table(group, leases, table)
        return tables

    def _read(self, pages: Pages, num_tokens: int) -> np.ndarray:
        """The first tokens of a row. Groups with a window must hold the last ones of these."""
        assert self._cache is not None
        read = {g: cache[pages[g]].reshape(-1)[:num_tokens] for g, cache in self._cache.items()}
        windows = self.ledger.windows
        whole = next(read[group] for group, window in windows.items() if window is None)
        for group, window in windows.items():
            first = 0 if window is None else max(0, num_tokens - window)
            if not np.array_equal(read[group][first:], whole[first:]):
                raise InternalError(
                    f"group {group!r} holds other tokens than the one of whole rows"
                )
        return whole

    def _write(self, lease: Lease, pages: Pages, start: int, token_ids: np.ndarray) -> None:
        assert self._cache is not None
        if (end := start + len(token_ids)) > lease.capacity:
            raise InternalError(
                f"{end} tokens are written where the lease promises {lease.capacity}"
            )
        positions = np.arange(start, end)
        for group, cache in self._cache.items():
            its = pages[group][positions // self._page_size]
            if self.ledger.max_ahead is not None and not its.all():
                raise InternalError(f"tokens are written where group {group!r} has no page")
            cache[its, positions % self._page_size] = token_ids

    def _prefill(self, plan: RowPlan, pages: Pages, tokens: np.ndarray) -> None:
        row, start, end = plan.row, plan.num_computed, plan.num_computed + plan.num_tokens
        self._write(plan.lease, pages, start, self.rows.token_ids[row, start:end])
        if plan.samples:
            self._length[row], self._finished[row] = end, False
            tokens[0] = self._sample(row, pages)

    def _decode(self, lease: Lease, pages: Pages) -> int:
        """Returns one more token of a row, or -1 when the row has finished."""
        row, end = lease.row, int(self._length[lease.row])
        if self._finished[row]:
            return -1
        self._write(lease, pages, end - 1, self._last[row : row + 1])
        return self._sample(row, pages)

    def _verify(self, plan: RowPlan, pages: Pages, tokens: np.ndarray) -> None:
        """Writes the accepted drafts and one more token into `tokens`."""
        for i, draft in enumerate([*plan.draft_token_ids, None]):
            tokens[i] = self._decode(plan.lease, pages)
            if tokens[i] != draft:
                break

    def _sample(self, row: int, pages: Pages) -> int:
        request, length = self.rows.request(row), int(self._length[row])
        token = next_token(self._read(pages, length), request, self.rows.vocab_size)
        most = len(request.prompt_token_ids) + request.sampling.max_tokens
        self._finished[row] = token in request.sampling.stop_token_ids or length + 1 >= most
        self._length[row], self._last[row] = length + 1, token
        return token
