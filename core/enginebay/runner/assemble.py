"""From a StepPlan to the host arrays of a compiled call: rows sorted and padded, tables filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from enginebay.cache import Lease, Ledger
from enginebay.engine import RowPlan
from enginebay.ops.spec import Bucket
from enginebay.rows import RowTable
from enginebay.runner import device
from enginebay.runner.full_vocab import full_vocab_decode, full_vocab_prefill
from enginebay.runner.inputs import DecodeInputs, KnownTokens, PrefillInputs, RowUpdate
from enginebay.runner.scoping import StepNeeds
from enginebay.types import FrozenSampling, StepVariant


def sorted_for_attention(rows: Sequence[RowPlan]) -> np.ndarray:
    """Indices that bring rows into AttnBatch's order: single tokens after a prefix, rows without
    one, the others.
    """
    kinds = [
        0 if r.num_tokens == 1 and r.num_computed else 1 if not r.num_computed else 2 for r in rows
    ]
    return np.argsort(np.asarray(kinds), kind="stable")


def prefill_inputs(
    rows: Sequence[RowPlan],
    bucket: Bucket,
    table: RowTable,
    ledger: Ledger,
) -> tuple[PrefillInputs, np.ndarray]:
    """The arrays of a prefill of `rows`, and for each row of the plan its place in the bucket."""
    order = sorted_for_attention(rows)
    token_ids = np.zeros(bucket.tokens, np.int32)
    ints = np.zeros((bucket.seqs, device.NUM_INT_COLUMNS), np.int32)
    ints[:, device.ROW] = table.max_num_reqs
    ints[:, device.NUM_LOGPROBS :] = -1
    floats = np.zeros((bucket.seqs, device.NUM_FLOAT_COLUMNS), np.float32)
    floats[:, device.TOP_P] = floats[:, device.REPETITION] = 1.0
    start = 0
    for place, index in enumerate(order):
        row = rows[index]
        token_ids[start : start + row.num_tokens] = table.token_ids[
            row.row, row.num_computed : row.num_computed + row.num_tokens
        ]
        start += row.num_tokens
        _fill_columns(ints[place], floats[place], row, table)
    places = np.empty(len(rows), np.int64)
    places[order] = np.arange(len(rows))
    sampled = np.asarray([row.row for row in rows if row.samples], np.int32)
    return PrefillInputs(
        token_ids,
        ints,
        floats,
        _tables([rows[i].lease for i in order], slice(len(rows)), bucket, ledger),
        known=_known(rows, table),
        returns_logprobs=bool(table.returns_logprobs[sampled].any()),
        need=_need(
            table, [row.row for row in rows]
        ),  # of those that do not sample too: full keeps their history
        used=tuple(_used(row, table) for row in rows if row.samples),
        full_vocab=full_vocab_prefill(rows, order.tolist(), bucket.tokens, table),
    ), places


def _tables(
    leases: Sequence[Lease], places: np.ndarray | slice, bucket: Bucket, ledger: Ledger
) -> dict[str, np.ndarray]:
    """The page table of each cache group, int32 [seqs, pages_per_seq]: leases[i] at places[i]."""
    tables: dict[str, np.ndarray] = {}
    for group in ledger.windows:
        packed = np.zeros((len(leases), bucket.pages_per_seq), np.int32)
        ledger.write_table(group, leases, packed)
        tables[group] = np.zeros((bucket.seqs, bucket.pages_per_seq), np.int32)
        tables[group][places] = packed
    return tables


def _used(row: RowPlan, table: RowTable) -> RowUpdate:
    """What a row's request uses of logits processors, with the plan's own values where it has some."""
    values = {
        value.name: value for value in (*table.request(row.row).sampling.processors, *row.update)
    }
    return RowUpdate(row.row, tuple(values.values()))


def _reads_tokens(sampling: FrozenSampling) -> bool:
    return sampling.penalises or sampling.reads_tokens


def _need(table: RowTable, rows: Sequence[int] | np.ndarray) -> StepNeeds:
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


def _fill_columns(ints: np.ndarray, floats: np.ndarray, row: RowPlan, table: RowTable) -> None:
    request = table.request(row.row)
    sampling = request.sampling
    ints[device.ROW] = row.row
    ints[device.Q_LEN] = row.num_tokens
    ints[device.KV_LEN] = row.num_computed + row.num_tokens
    ints[device.SAMPLES] = row.samples
    ints[device.INDEX] = request.index
    ints[device.KEY_HI : device.KEY_LO + 1] = np.asarray(request.key, np.uint32).view(np.int32)
    ints[device.TOP_K] = max(sampling.top_k, 0)
    ints[device.MAX_LENGTH] = len(request.prompt_token_ids) + sampling.max_tokens
    ints[device.PROMPT_LENGTH] = len(request.prompt_token_ids)
    ints[device.NUM_LOGPROBS] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
    ints[device.STOP_IDS : device.STOP_IDS + len(sampling.stop_token_ids)] = sampling.stop_token_ids
    floats[device.TEMPERATURE] = sampling.temperature
    floats[device.TOP_P] = sampling.top_p
    floats[device.MIN_P] = sampling.min_p
    floats[device.PRESENCE] = sampling.presence_penalty
    floats[device.FREQUENCY] = sampling.frequency_penalty
    floats[device.REPETITION] = sampling.repetition_penalty


def decode_inputs(
    rows: Sequence[RowPlan],
    places: np.ndarray,
    bucket: Bucket,
    num_steps: int,
    table: RowTable,
    ledger: Ledger,
) -> DecodeInputs:
    """The arrays of a decode of `rows`, each at its place in the bucket."""
    row_ids = np.full(bucket.seqs, table.max_num_reqs, np.int32)
    row_ids[places] = own = np.asarray([row.row for row in rows])
    return DecodeInputs(
        row_ids,
        num_steps,
        _tables([row.lease for row in rows], places, bucket, ledger),
        returns_logprobs=bool(table.returns_logprobs[own].any()),
        need=_need(table, own),
        updates=tuple(RowUpdate(row.row, row.update) for row in rows if row.update),
        full_vocab=full_vocab_decode(rows, table),
    )


def verify_inputs(
    rows: Sequence[RowPlan],
    bucket: Bucket,
    drafts_a_step: int,
    table: RowTable,
    ledger: Ledger,
) -> DecodeInputs:
    """The arrays of a step that verifies the drafts of `rows`, which are its first rows, up to
    `drafts_a_step` each.
    """
    inputs = decode_inputs(rows, np.arange(len(rows)), bucket, bucket.max_q_len, table, ledger)
    draft_ids = np.full((bucket.seqs, drafts_a_step), -1, np.int32)
    for place, row in enumerate(rows):
        draft_ids[place, : len(row.draft_token_ids)] = row.draft_token_ids
    return dataclasses.replace(inputs, draft_ids=draft_ids)
