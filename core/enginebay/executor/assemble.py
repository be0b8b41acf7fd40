"""Makes commands from the rows of a StepPlan: sorts and pads rows, finds changed page-table
entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from enginebay.cache import Lease, Ledger
from enginebay.engine import RowPlan
from enginebay.errors import InternalError
from enginebay.executor import columns
from enginebay.executor.commands import KnownTokens, RowUpdate, Step, WriteRows
from enginebay.executor.keys import StepKey, StepNeeds
from enginebay.row_columns import write_row
from enginebay.rows import RowTable
from enginebay.types import FrozenSampling, Request, StepVariant


def sorted_for_attention(rows: Sequence[RowPlan]) -> np.ndarray:
    """Indices that sort rows into AttnBatch's order: single tokens with a prefix, then rows without
    a prefix, then the others.
    """
    kinds = [
        0 if r.num_tokens == 1 and r.num_computed else 1 if not r.num_computed else 2 for r in rows
    ]
    return np.argsort(np.asarray(kinds), kind="stable")


class SentTables:
    """A copy of the page tables that the executor has, to find the entries that have changed."""

    def __init__(self, ledger: Ledger, num_rows: int, widths: Mapping[str, int]) -> None:
        """`widths`: the largest number of pages per row, by cache group."""
        self._ledger, self._num_rows, self._widths = ledger, num_rows, widths
        self.forget()

    def forget(self) -> None:
        """The executor has new tables: all their entries are 0."""
        self._sent = {g: np.zeros((self._num_rows, w), np.int32) for g, w in self._widths.items()}

    def changes(self, leases: Sequence[Lease], num_pages: int) -> dict[str, np.ndarray]:
        """Changed entries (row, column, page), int32 [n, 3] by group, among the first `num_pages`
        pages of each lease. Groups without changes are left out. The entries count as sent.

        Entries after a row's pages need not be 0: a step reads only the pages of its tokens.
        """
        row_ids = [lease.row for lease in leases]
        changes = {}
        for group, sent in self._sent.items():
            now = np.zeros((len(leases), min(num_pages, sent.shape[1])), np.int32)
            self._ledger.write_table(group, leases, now)
            different = now != sent[row_ids, : now.shape[1]]
            if not different.any():
                continue
            sent[row_ids, : now.shape[1]] = now
            place, column = np.nonzero(different)
            pages = now[place, column]
            last = now.shape[1] - (now[:, ::-1] != 0).argmax(axis=1)
            is_needed = (pages != 0) | (column < last[place])
            entries = np.stack([np.asarray(row_ids)[place], column, pages], axis=1)
            if is_needed.any():
                changes[group] = entries[is_needed].astype(np.int32)
        return changes


def prefill_command(
    rows: Sequence[RowPlan], key: StepKey, table: RowTable, sent: SentTables, hidden_size: int
) -> Step:
    """The Step that prefills `rows` with the program `key`."""
    bucket, order = key.bucket, sorted_for_attention(rows)
    token_ids = np.zeros(bucket.tokens, np.int32)
    ints, floats = columns.empty_plan(bucket.seqs, table.max_num_reqs)
    start = 0
    for place, index in enumerate(order):
        row = rows[index]
        token_ids[start : start + row.num_tokens] = table.token_ids[
            row.row, row.num_computed : row.num_computed + row.num_tokens
        ]
        start += row.num_tokens
        fill_columns(ints[place], floats[place], row, table.request(row.row))
    places = np.empty(len(rows), np.int32)
    places[order] = np.arange(len(rows))
    sampled = np.asarray([row.row for row in rows if row.samples], np.int32)
    inputs: tuple[np.ndarray, ...] = (token_ids, ints, floats)
    spans: tuple[tuple[int, int], ...] = ()
    if key.full_vocab:
        targets, spans = prompt_targets(rows, order.tolist(), bucket.tokens, table)
        inputs = (*inputs, targets)
    if key.embeds:
        inputs = (*inputs, _embeds(rows, order, (bucket.tokens, hidden_size), table))
    return Step(
        key,
        inputs,
        places,
        sent.changes([row.lease for row in rows], bucket.pages_per_seq),
        returns_logprobs=bool(table.returns_logprobs[sampled].any()),
        returns_all=wants_all([row for row in rows if row.samples], table),
        spans=spans,
    )


def prompt_targets(
    rows: Sequence[RowPlan], order: Iterable[int], num_tokens: int, table: RowTable
) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """Target tokens of a prefill with prompt log-probabilities, whose rows lie in `order` among
    `num_tokens` tokens.

    Returns the prompt's next token after each position, int32 [num_tokens], -1 where no request
    needs it, and the (start, count) of each row's targets.
    """
    targets = np.full(num_tokens, -1, np.int32)
    spans = [(0, 0)] * len(rows)
    start = 0
    for index in order:
        row = rows[index]
        if row.returns_prompt:
            # The token after the last prompt token is sampled, so it is no target.
            end = min(row.num_computed + row.num_tokens, int(table.num_prompt_tokens[row.row]) - 1)
            own = table.token_ids[row.row, row.num_computed + 1 : end + 1]
            targets[start : start + len(own)] = own
            spans[index] = start, len(own)
        start += row.num_tokens
    return targets, tuple(spans)


def wants_all(rows: Sequence[RowPlan], table: RowTable) -> bool:
    """Whether the request of any row asks for full-vocabulary log-probabilities."""
    has_logprobs = table.returns_logprobs
    return bool(has_logprobs.any()) and any(
        has_logprobs[row.row] and table.request(row.row).sampling.returns_all for row in rows
    )


def _embeds(
    rows: Sequence[RowPlan], order: np.ndarray, shape: tuple[int, int], table: RowTable
) -> np.ndarray:
    """The embeddings of a prefill's positions, f32 [tokens, hidden_size]; 0 at token positions."""
    values, start = np.zeros(shape, np.float32), 0
    for index in order:
        row = rows[index]
        stop, embeds = start + row.num_tokens, table.request(row.row).embeds
        if embeds is not None:
            embeds.copy_to(values[start:stop], row.num_computed)
        start = stop
    return values


def takes_embeds(row: RowPlan, table: RowTable) -> bool:
    """Whether a row's part of a prefill has positions with embeddings."""
    embeds = table.request(row.row).embeds
    return embeds is not None and embeds.touch(row.num_computed, row.num_tokens)


def prefill_writes(rows: Sequence[RowPlan], table: RowTable) -> WriteRows:
    """What must be written to rows before a prefill of `rows`."""
    used = tuple(_used(row, table) for row in rows if row.samples and not row.decodes)
    updates = tuple(RowUpdate(row.row, row.update) for row in rows if row.decodes and row.update)
    return WriteRows(_known(rows, table), used, updates)


def _used(row: RowPlan, table: RowTable) -> RowUpdate:
    """The logits processors of a row's request, with their values; values of the plan replace the
    request's.
    """
    values = {
        value.name: value for value in (*table.request(row.row).sampling.processors, *row.update)
    }
    return RowUpdate(row.row, tuple(values.values()))


def _reads_tokens(sampling: FrozenSampling) -> bool:
    return sampling.penalises or sampling.reads_tokens


def needs_of(table: RowTable, rows: Sequence[int] | np.ndarray) -> StepNeeds:
    """The smallest step variant, and the logits processors, that rows need."""
    variant = StepVariant(int(table.variants[rows].max()))
    if variant is not StepVariant.FULL:
        return StepNeeds(variant)
    used = (table.request(int(row)).sampling.processors for row in rows)
    return StepNeeds(variant, frozenset(one.name for processors in used for one in processors))


def _known(rows: Sequence[RowPlan], table: RowTable) -> tuple[KnownTokens, ...]:
    """The first tokens of rows whose first chunk starts after a cached prefix, when the sampling
    reads past tokens.
    """
    return tuple(
        KnownTokens(row.row, table.token_ids[row.row, : row.num_computed].copy())
        for row in rows
        if 0 < row.num_computed == row.lease.num_cached
        and _reads_tokens(table.request(row.row).sampling)
    )


def fill_columns(ints: np.ndarray, floats: np.ndarray, row: RowPlan, request: Request) -> None:
    """Write a row of a prefill and its request into one row of a plan's columns."""
    sampling = request.sampling
    write_row(floats, ints[columns.PARAMS : columns.STOP_IDS], sampling.params)
    ints[columns.ROW] = row.row
    ints[columns.Q_LEN] = row.num_tokens
    ints[columns.KV_LEN] = row.num_computed + row.num_tokens
    ints[columns.SAMPLES] = columns.DECODES if row.decodes else row.samples
    ints[columns.INDEX] = request.index
    ints[columns.KEY_HI : columns.KEY_LO + 1] = np.asarray(request.key, np.uint32).view(np.int32)
    ints[columns.MAX_LENGTH] = len(request.prompt_token_ids) + sampling.max_tokens
    ints[columns.PROMPT_LENGTH] = len(request.prompt_token_ids)
    ints[columns.NUM_LOGPROBS] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
    ints[columns.STOP_IDS : columns.STOP_IDS + len(sampling.stop_token_ids)] = (
        sampling.stop_token_ids
    )


def decode_command(
    rows: Sequence[RowPlan],
    key: StepKey,
    places: np.ndarray,
    num_steps: int,
    table: RowTable,
    sent: SentTables,
) -> Step:
    """The Step that decodes `rows`, each at its place in the bucket, with the program `key`."""
    if key.full_vocab and num_steps > 1:
        raise InternalError(
            f"{num_steps} steps of a decode that returns full-vocabulary log-probabilities"
        )
    row_ids = np.full(key.bucket.seqs, table.max_num_reqs, np.int32)
    row_ids[places] = own = np.asarray([row.row for row in rows], np.int32)
    return Step(
        key,
        (row_ids, np.asarray(num_steps, np.int32)),
        places,
        sent.changes([row.lease for row in rows], key.bucket.pages_per_seq),
        returns_logprobs=bool(table.returns_logprobs[own].any()),
        returns_all=key.full_vocab,
    )


def verify_command(
    rows: Sequence[RowPlan], key: StepKey, most: int, table: RowTable, sent: SentTables
) -> Step:
    """The Step that verifies the drafts of `rows`, at most `most` per row."""
    places = np.arange(len(rows), dtype=np.int32)
    step = decode_command(rows, key, places, 1, table, sent)
    draft_ids = np.full((key.bucket.seqs, most), -1, np.int32)
    for place, row in enumerate(rows):
        draft_ids[place, : len(row.draft_token_ids)] = row.draft_token_ids
    return dataclasses.replace(step, inputs=(step.inputs[0], draft_ids))
