"""DeviceRows: the decoding state of each row, on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from enginebay.contracts.sampler import DeviceParams, SamplingState
from enginebay.ops import prefill_columns as columns
from enginebay.ops.row_columns import by_name
from enginebay.types import MAX_STOP_TOKENS, NOT_FINITE, ROW_VALUES

_OWN = (
    "last_token",
    "length",
    "max_length",
    "finished",
    "keys",
    "stop_ids",
    "prompt_length",
    "num_logprobs",
)

ADAPTERS = "adapters"
"""A column that rows have only in an engine with adapters."""

COLUMNS = (*_OWN, *ROW_VALUES)
"""The columns of DeviceRows by name, without the token history."""

ADVANCED = ("last_token", "length", "finished")
"""The columns that sampling a token changes."""

NEUTRAL = {"finished": True, "stop_ids": -1, "num_logprobs": -1} | {
    name: one.neutral for name, one in ROW_VALUES.items()
}
"""Values of a row without a request, by column; they are 0 in the other columns."""


@functools.partial(
    tree_util.register_dataclass,
    data_fields=[*_OWN, "params", "token_ids", ADAPTERS],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DeviceRows:
    """Decoding state of R rows, indexed by row id. It is donated to every step, so that steps can
    be launched ahead.

    last_token int32 [R]: sampled, not yet in the cache. length int32 [R]: tokens so far, including
    last_token. max_length int32 [R]: length at which the row is finished. finished bool [R]. keys
    uint32 [R, 2]: the request's key, folded with its completion index. params: the declared
    sampling parameters (enginebay.types.RowParams), an array [R] each. stop_ids int32 [R,
    MAX_STOP_TOKENS]: token ids that finish the row, -1 for none. prompt_length int32 [R]: tokens of
    the prompt. num_logprobs int32 [R]: number of best tokens that get a log-probability beside the
    sampled token; -1: no log-probabilities. token_ids int32 [R, L]: the row's tokens by absolute
    position, for penalties; undefined from `length` on. In rows without penalties, tokens may be
    missing: those of a cached prefix, and those that GREEDY steps have processed. adapters int32
    [R]: the slot of the row's adapter, counted from 1; 0: no adapter.
    """

    last_token: jax.Array
    length: jax.Array
    max_length: jax.Array
    finished: jax.Array
    keys: jax.Array
    params: DeviceParams
    stop_ids: jax.Array
    prompt_length: jax.Array
    num_logprobs: jax.Array
    token_ids: jax.Array
    adapters: jax.Array | None = None

    @staticmethod
    def empty(num_rows: int, max_model_len: int, *, adapts: bool = False) -> DeviceRows:
        """Finished rows, as NumPy arrays, with room for max_model_len tokens each; with `adapts`,
        without adapters but with the column.
        """

        def zeros(dtype: type, *more: int) -> Any:
            return np.zeros((num_rows, *more), dtype)

        def full(value: Any, dtype: Any, *more: int) -> Any:
            return np.full((num_rows, *more), value, dtype)

        return DeviceRows(
            last_token=zeros(np.int32),
            length=zeros(np.int32),
            max_length=zeros(np.int32),
            finished=full(True, np.bool_),
            keys=zeros(np.uint32, 2),
            params=DeviceParams(**{n: full(v.neutral, v.dtype) for n, v in ROW_VALUES.items()}),
            stop_ids=full(-1, np.int32, MAX_STOP_TOKENS),
            prompt_length=zeros(np.int32),
            num_logprobs=full(-1, np.int32),
            token_ids=zeros(np.int32, max_model_len),
            adapters=zeros(np.int32) if adapts else None,
        )

    @staticmethod
    def of(columns: Mapping[str, jax.Array], token_ids: jax.Array) -> DeviceRows:
        """Rows made of all COLUMNS, of the adapters if given, and of a token history."""
        params = DeviceParams(**{name: columns[name] for name in ROW_VALUES})
        return DeviceRows(
            **{name: columns[name] for name in _OWN},
            params=params,
            token_ids=token_ids,
            adapters=columns.get(ADAPTERS),
        )

    def columns(self) -> dict[str, jax.Array]:
        """The arrays of all COLUMNS, and of the adapters if the rows have them."""
        values = {name: getattr(self, name) for name in _OWN}
        if self.adapters is not None:
            values[ADAPTERS] = self.adapters
        return values | {name: getattr(self.params, name) for name in ROW_VALUES}

    def history(self, row_ids: jax.Array, num_tokens: int) -> jax.Array:
        """The rows' first tokens, int32 [S, min(num_tokens, L)]; zeros for an id past the end."""
        width = min(num_tokens, self.token_ids.shape[1])
        return self.token_ids.at[row_ids, :width].get(mode="fill", fill_value=0)

    def take(self, row_ids: jax.Array, num_tokens: int) -> DeviceRows:
        """The rows with these ids [S] and their first num_tokens tokens. An id past the end gives a
        neutral, finished row.
        """
        values = {
            name: column.at[row_ids].get(mode="fill", fill_value=NEUTRAL.get(name, 0))
            for name, column in self.columns().items()
        }
        return DeviceRows.of(values, self.history(row_ids, num_tokens))

    def put(self, row_ids: jax.Array, rows: DeviceRows, names: Sequence[str] = ()) -> DeviceRows:
        """These rows with the columns `names` (default: all) of `rows` written at ids [S], and the
        token history of `rows` as far as it reaches. Ids past the end are dropped.
        """
        values, new = self.columns(), rows.columns()
        for name in names or values:
            values[name] = values[name].at[row_ids].set(new[name], mode="drop")
        width = rows.token_ids.shape[1]
        token_ids = self.token_ids.at[row_ids, :width].set(rows.token_ids, mode="drop")
        return DeviceRows.of(values, token_ids)

    def where(self, keeps: jax.Array, others: DeviceRows) -> DeviceRows:
        """These rows where `keeps` bool [R] is true, `others` elsewhere; both without a history."""

        def chosen(own: jax.Array, other: jax.Array) -> jax.Array:
            return jnp.where(keeps.reshape(-1, *(1,) * (own.ndim - 1)), own, other)

        return jax.tree.map(chosen, self, others)

    def record(self, row_ids: jax.Array, positions: jax.Array, token_ids: jax.Array) -> DeviceRows:
        """These rows with token_ids int32 [T] written to the history of rows [T] at positions [T].
        Rows past the end are dropped.

        Rows without room for a history are returned unchanged.
        """
        if not self.token_ids.shape[1]:
            return self
        history = self.token_ids.at[row_ids, positions].set(token_ids, mode="drop")
        return dataclasses.replace(self, token_ids=history)

    def sampling_state(self) -> SamplingState:
        """The state that sampling of each row's next token depends on; the token's position is the
        row's length.
        """
        return SamplingState(
            keys=self.keys,
            positions=self.length,
            params=self.params,
            token_ids=self.token_ids,
            prompt_lengths=self.prompt_length,
        )

    def advanced(self, token_ids: jax.Array, active: jax.Array) -> DeviceRows:
        """The rows after token_ids int32 [S] were sampled where `active`; rows that meet a stop
        condition, and rows whose logits were not finite (NOT_FINITE), are finished.
        """
        length = self.length + active
        stopped = (token_ids[:, None] == self.stop_ids).any(axis=1) | (length >= self.max_length)
        stopped |= token_ids == NOT_FINITE
        rows = jnp.where(active, jnp.arange(active.shape[0]), active.shape[0])
        return dataclasses.replace(
            self.record(rows, self.length, token_ids),
            last_token=jnp.where(active, token_ids, self.last_token),
            length=length,
            finished=self.finished | (active & stopped),
        )


def fold_keys(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """Raw threefry keys uint32 [S, 2], each folded with a number int [S]."""

    def fold(key: jax.Array, number: jax.Array) -> jax.Array:
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(typed, number))

    return jax.vmap(fold)(keys, numbers)


def rows_from_plan(
    ints: jax.Array, floats: jax.Array, token_ids: jax.Array, adapters: jax.Array | None = None
) -> DeviceRows:
    """The rows that a prefill plan's columns describe: `length` is the context, no token is sampled
    yet.

    token_ids int32 [S, L]: their tokens so far. adapters int32 [S]: their column of this name, if
    rows have it.
    """
    keys = jax.lax.bitcast_convert_type(ints[:, columns.KEY_HI : columns.KEY_LO + 1], jnp.uint32)
    return DeviceRows(
        last_token=jnp.zeros(ints.shape[0], jnp.int32),
        length=ints[:, columns.KV_LEN],
        max_length=ints[:, columns.MAX_LENGTH],
        finished=ints[:, columns.SAMPLES] == 0,
        keys=fold_keys(keys, ints[:, columns.INDEX]),
        params=DeviceParams(**by_name(floats, ints[:, columns.PARAMS : columns.STOP_IDS])),
        stop_ids=ints[:, columns.STOP_IDS :],
        prompt_length=ints[:, columns.PROMPT_LENGTH],
        num_logprobs=ints[:, columns.NUM_LOGPROBS],
        token_ids=token_ids,
        adapters=adapters,
    )


def write_history(rows: DeviceRows, row_id: jax.Array, token_ids: jax.Array) -> DeviceRows:
    """`rows` with token_ids int32 [L] as the whole history of one row."""
    return dataclasses.replace(rows, token_ids=rows.token_ids.at[row_id].set(token_ids))
