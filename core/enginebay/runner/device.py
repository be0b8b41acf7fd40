"""DeviceRows: each row's decoding state on the device, and how a plan's columns reach it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from enginebay.sampler import SamplingState
from enginebay.types import MAX_STOP_TOKENS

FIELDS = (
    "last_token",
    "length",
    "max_length",
    "finished",
    "keys",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "stop_ids",
)

# Columns of a prefill plan's int32 array, one row of it per row of the step.
ROW, Q_LEN, KV_LEN, SAMPLES, INDEX, KEY_HI, KEY_LO, TOP_K, MAX_LENGTH, STOP_IDS = range(10)
NUM_INT_COLUMNS = STOP_IDS + MAX_STOP_TOKENS
TEMPERATURE, TOP_P, MIN_P = range(3)
NUM_FLOAT_COLUMNS = 3


@functools.partial(tree_util.register_dataclass, data_fields=list(FIELDS), meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DeviceRows:
    """Decoding state of R rows, donated to every step and indexed by row id, so that steps can be launched ahead.

    last_token int32 [R]: sampled, not yet in the cache. length int32 [R]: tokens so far, last_token included.
    max_length int32 [R]: length at which the row is finished. finished bool [R]. keys uint32 [R, 2]: the request's key,
    folded with its completion index. temperature, top_p, min_p f32 [R]; top_k int32 [R]. stop_ids int32
    [R, MAX_STOP_TOKENS]: token ids that finish the row, -1 where there is none.
    """

    last_token: jax.Array
    length: jax.Array
    max_length: jax.Array
    finished: jax.Array
    keys: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    stop_ids: jax.Array

    @staticmethod
    def empty(num_rows: int) -> DeviceRows:
        """Rows that are all finished."""

        def zeros(dtype: type, *more: int) -> jax.Array:
            return jnp.zeros((num_rows, *more), dtype)

        return DeviceRows(
            last_token=zeros(np.int32),
            length=zeros(np.int32),
            max_length=zeros(np.int32),
            finished=jnp.ones(num_rows, bool),
            keys=zeros(np.uint32, 2),
            temperature=zeros(np.float32),
            top_k=zeros(np.int32),
            top_p=jnp.ones(num_rows, np.float32),
            min_p=zeros(np.float32),
            stop_ids=jnp.full((num_rows, MAX_STOP_TOKENS), -1, jnp.int32),
        )

    def take(self, row_ids: jax.Array) -> DeviceRows:
        """The rows with these ids [S]; an id past the end is a finished row of zeros."""
        values = {f: getattr(self, f).at[row_ids].get(mode="fill", fill_value=0) for f in FIELDS}
        values["finished"] |= row_ids >= self.length.shape[0]
        return DeviceRows(**values)

    def put(self, row_ids: jax.Array, rows: DeviceRows) -> DeviceRows:
        """These rows with `rows` at ids [S]; an id past the end is dropped."""
        return DeviceRows(
            **{f: getattr(self, f).at[row_ids].set(getattr(rows, f), mode="drop") for f in FIELDS}
        )

    def sampling_state(self) -> SamplingState:
        """What sampling each row's next token depends on; its position is the row's length."""
        return SamplingState(self.keys, self.length, self.temperature, self.top_k, self.top_p, self.min_p)

    def advanced(self, token_ids: jax.Array, active: jax.Array) -> DeviceRows:
        """The rows after token_ids int32 [S] were sampled where `active`; stop conditions are masked in."""
        length = self.length + active
        stopped = (token_ids[:, None] == self.stop_ids).any(axis=1) | (length >= self.max_length)
        return dataclasses.replace(
            self,
            last_token=jnp.where(active, token_ids, self.last_token),
            length=length,
            finished=self.finished | (active & stopped),
        )


def rows_from_plan(ints: jax.Array, floats: jax.Array) -> DeviceRows:
    """Rows as a prefill plan's columns describe them: `length` is the context, nothing is sampled yet."""
    keys = jax.lax.bitcast_convert_type(ints[:, KEY_HI : KEY_LO + 1], jnp.uint32)

    def fold(key: jax.Array, index: jax.Array) -> jax.Array:
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(typed, index))

    return DeviceRows(
        last_token=jnp.zeros(ints.shape[0], jnp.int32),
        length=ints[:, KV_LEN],
        max_length=ints[:, MAX_LENGTH],
        finished=ints[:, SAMPLES] == 0,
        keys=jax.vmap(fold)(keys, ints[:, INDEX]),
        temperature=floats[:, TEMPERATURE],
        top_k=ints[:, TOP_K],
        top_p=floats[:, TOP_P],
        min_p=floats[:, MIN_P],
        stop_ids=ints[:, STOP_IDS:],
    )
