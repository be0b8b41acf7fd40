"""From the rows of a StepPlan to commands: rows sorted and padded, changed pages found."""

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
    """Indices that bring rows into AttnBatch's order: single tokens after a prefix, rows without
    one, the others.
    """
    kinds = [
        0 if r.num_tokens == 1 and r.num_computed else 1 if not r.num_computed else 2 for r in rows
    ]
    return np.argsort(np.asarray(kinds), kind="stable")


class SentTables:
    """The page tables as an executor has them, to send it the entries that have changed."""

    def __init__(self, ledger: Ledger, num_rows: int, widths: Mapping[str, int]) -> None:
        """`widths`: pages of a row at most, by cache group."""
        self._ledger, self._num_rows, self._widths = ledger, num_rows, widths
        self.forget()

    def forget(self) -> None:
        """The executor's tables are new: all entries are 0."""
        self._sent = {g: np.zeros((self._num_rows, w), np.int32) for g, w in self._widths.items()}

    def changes(self, leases: Sequence[Lease], num_pages: int) -> dict[str, np.ndarray]:
        """Entries (row, column, page) int32 [n, 3] of the first `num_pages` pages of leases, by
        group; no group without one. They count as sent.

        What lies behind a row's pages need not be 0: a step looks at the pages of its tokens only.
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
    """The prefill of `rows` by the program of a key."""
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
    """Of a prefill whose rows lie in `order` among num_tokens tokens: the prompt's next token after
    each, int32 [num_tokens], -1 where no request needs it, and (start, count) of each row's.
    """
    targets = np.full(num_tokens, -1, np.int32)
    spans = [(0, 0)] * len(rows)
    start = 0
    for index in order:
        row = rows[index]
        if row.returns_prompt:
            # The last token of the prompt is followed by a sampled one.
            end = min(row.num_computed + row.num_tokens, int(table.num_prompt_tokens[row.row]) - 1)
            own = table.token_ids[row.row, row.num_computed + 1 : end + 1]
            targets[start : start + len(own)] = own
            spans[index] = start, len(own)
        start += row.num_tokens
    return targets, tuple(spans)


def wants_all(rows: Sequence[RowPlan], table: RowTable) -> bool:
    """Whether one of the rows is told of the whole vocabulary."""
    telling = table.returns_logprobs
    return bool(telling.any()) and any(
        telling[row.row] and table.request(row.row).sampling.returns_all for row in rows
    )


def _embeds(
    rows: Sequence[RowPlan], order: np.ndarray, shape: tuple[int, int], table: RowTable
) -> np.ndarray:
    """The embeddings among the tokens of a prefill, f32 [tokens, hidden_size]; 0 for tokens."""
    values, start = np.zeros(shape, np.float32), 0
    for index in order:
        row = rows[index]
        stop, embeds = start + row.num_tokens, table.request(row.row).embeds
        if embeds is not None:
            embeds.copy_to(values[start:stop], row.num_computed)
        start = stop
    return values


def takes_embeds(row: RowPlan, table: RowTable) -> bool:
    """Whether embeddings are among the tokens of a row's part of a prefill."""
    embeds = table.request(row.row).embeds
    return embeds is not None and embeds.touch(row.num_computed, row.num_tokens)


def prefill_writes(rows: Sequence[RowPlan], table: RowTable) -> WriteRows:
    """What a prefill of `rows` needs to be written before it."""
    used = tuple(_used(row, table) for row in rows if row.samples and not row.decodes)
    updates = tuple(RowUpdate(row.row, row.update) for row in rows if row.decodes and row.update)
    return WriteRows(_known(rows, table), used, updates)


def _used(row: RowPlan, table: RowTable) -> RowUpdate:
    """What a row's request uses of logits processors, with the plan's own values where it
    has some.
    """
    values = {
        value.name: value for value in (*table.request(row.row).sampling.processors, *row.update)
    }
    return RowUpdate(row.row, tuple(values.values()))


def _reads_tokens(sampling: FrozenSampling) -> bool:
    return sampling.penalises or sampling.reads_tokens


def needs_of(table: RowTable, rows: Sequence[int] | np.ndarray) -> StepNeeds:
    """The least that serves rows."""
    variant = StepVariant(int(table.variants[rows].max()))
    if variant is not StepVariant.FULL:
        return StepNeeds(variant)
    used = (table.request(int(row)).sampling.processors for row in rows)
    return StepNeeds(variant, frozenset(one.name for processors in used for one in processors))


def _known(rows: Sequence[RowPlan], table: RowTable) -> tuple[KnownTokens, ...]:
    """The tokens that a row's first chunk does not bring since the cache has them, for rows whose
    sampling counts them.
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
    """The decode of `rows`, each at its place in the bucket, by the program of a key."""
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
    """The step that verifies the drafts of `rows`, up to `most` of each."""
    places = np.arange(len(rows), dtype=np.int32)
    step = decode_command(rows, key, places, 1, table, sent)
    draft_ids = np.full((key.bucket.seqs, most), -1, np.int32)
    for place, row in enumerate(rows):
        draft_ids[place, : len(row.draft_token_ids)] = row.draft_token_ids
    return dataclasses.replace(step, inputs=(step.inputs[0], draft_ids))
