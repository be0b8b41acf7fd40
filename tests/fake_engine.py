"""A fake engine: a real row table and ledger, a cache in NumPy, and tokens that a test can predict.

The cache holds token ids where a real cache holds keys and values. The next token is computed from
the ids that the row reads through its page table: a page that is lost or shared wrongly changes the
tokens. The engine runs greedy and sampled requests and verifies drafts. It has no logits.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable

import numpy as np

from enginebay.cache import Lease, Ledger
from enginebay.engine import (
    Compilations,
    Engine,
    GroupState,
    MemoryPlan,
    Pending,
    RowPlan,
    RowState,
    StepPlan,
)
from enginebay.errors import InternalError
from enginebay.rows import RowTable
from enginebay.types import Request

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

    def read(self) -> np.ndarray:
        self.before_read()
        return self.tokens


class FakeEngine(Engine):
    """Runs steps on the host. A test may set `before_step` and `before_read` to count, wait or
    raise.
    """

    def __init__(
        self,
        rows: RowTable,
        ledger: Ledger,
        num_pages: int,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """`forget` makes the ledger drop its kept prefixes when the cache is dropped."""
        self.rows, self.ledger, self._forget = rows, ledger, forget
        self.compilations = Compilations()
        self.before_step: Callable[[StepPlan], None] = lambda _: None
        self.before_read: Callable[[StepPlan], None] = lambda _: None
        self._shape = (num_pages, rows.page_sizes[0])
        self.memory = MemoryPlan(0, 4 * num_pages * rows.page_sizes[0], 0, device_bytes=2**40)
        self._cache: np.ndarray | None = None
        self._length, self._last = (np.zeros(rows.max_num_reqs, np.int32) for _ in range(2))
        self._finished = np.ones(rows.max_num_reqs, bool)

    def make_arrays(self) -> None:
        if self._cache is None:
            self._cache = np.full(self._shape, -1, np.int32)

    def drop_arrays(self) -> None:
        if self.rows.num_reqs:
            raise InternalError(f"the cache is dropped while {self.rows.num_reqs} rows are running")
        self._forget()
        self._cache = None

    def warmup(self, progress: object = None) -> int:
        return 0

    def step(self, plan: StepPlan) -> Pending:
        self.before_step(plan)
        pages = self._pages([row.lease for row in plan.rows])
        tokens = np.full((len(plan.rows), max(plan.num_steps, 1)), -1, np.int32)
        for row, its_pages, its_tokens in zip(plan.rows, pages, tokens, strict=True):
            if not plan.is_decode:
                self._prefill(row, its_pages, its_tokens)
            elif row.draft_token_ids:
                self._verify(row, its_pages, its_tokens)
            else:
                its_tokens[:] = [self._decode(row.lease, its_pages) for _ in its_tokens]
        return Launched(tokens, lambda: self.before_read(plan))

    def take(self, lease: Lease) -> RowState:
        row, num_cached = lease.row, max(int(self._length[lease.row]) - 1, 0)
        cached = self._read(self._pages([lease])[0], num_cached)[None, :, None, None]
        column = {"length": self._length[row], "finished": self._finished[row]}
        token_ids = self.rows.token_ids[row, : self.rows.num_tokens[row]].copy()
        groups = {"all": GroupState(0, {"k": cached, "v": cached})}
        return RowState(token_ids, num_cached, int(self._last[row]), groups, column)

    def put(self, lease: Lease, state: RowState) -> None:
        self._write(lease, self._pages([lease])[0], 0, state.groups["all"].arrays["k"][0, :, 0, 0])
        self._last[lease.row] = state.last_token
        self._length[lease.row] = state.sampling["length"]
        self._finished[lease.row] = state.sampling["finished"]

    def _pages(self, leases: list[Lease]) -> np.ndarray:
        if self._cache is None:
            raise InternalError("the engine is used before make_arrays()")
        (group,) = self.ledger.windows
        for source, target in self.ledger.take_copies().get(group, ()):
            self._cache[target] = self._cache[source]
        table = np.zeros((len(leases), self.rows.page_tables[0].page_ids.shape[1]), np.int32)
        self.ledger.write_table(group, leases, table)
        return table

    def _read(self, pages: np.ndarray, num_tokens: int) -> np.ndarray:
        assert self._cache is not None
        return self._cache[pages].reshape(-1)[:num_tokens].copy()

    def _write(self, lease: Lease, pages: np.ndarray, start: int, token_ids: np.ndarray) -> None:
        assert self._cache is not None
        if (end := start + len(token_ids)) > lease.capacity:
            raise InternalError(
                f"{end} tokens are written where the lease promises {lease.capacity}"
            )
        positions = np.arange(start, end)
        self._cache[pages[positions // self._shape[1]], positions % self._shape[1]] = token_ids

    def _prefill(self, plan: RowPlan, pages: np.ndarray, tokens: np.ndarray) -> None:
        row, start, end = plan.row, plan.num_computed, plan.num_computed + plan.num_tokens
        self._write(plan.lease, pages, start, self.rows.token_ids[row, start:end])
        if plan.samples:
            self._length[row], self._finished[row] = end, False
            tokens[0] = self._sample(row, pages)

    def _decode(self, lease: Lease, pages: np.ndarray) -> int:
        """Returns one more token of a row, or -1 when the row has finished."""
        row, end = lease.row, int(self._length[lease.row])
        if self._finished[row]:
            return -1
        self._write(lease, pages, end - 1, self._last[row : row + 1])
        return self._sample(row, pages)

    def _verify(self, plan: RowPlan, pages: np.ndarray, tokens: np.ndarray) -> None:
        """Writes the accepted drafts and one more token into `tokens`."""
        for i, draft in enumerate([*plan.draft_token_ids, None]):
            tokens[i] = self._decode(plan.lease, pages)
            if tokens[i] != draft:
                break

    def _sample(self, row: int, pages: np.ndarray) -> int:
        request, length = self.rows.request(row), int(self._length[row])
        token = next_token(self._read(pages, length), request, self.rows.vocab_size)
        most = len(request.prompt_token_ids) + request.sampling.max_tokens
        self._finished[row] = token in request.sampling.stop_token_ids or length + 1 >= most
        self._length[row], self._last[row] = length + 1, token
        return token
