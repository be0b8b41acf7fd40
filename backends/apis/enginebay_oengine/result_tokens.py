"""ResultTokens: the sampled tokens of all slots in one array, so that one copy brings them to the
host.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax import tree_util

from enginebay.errors import InputError

TOKEN, VALID, LENGTH = range(3)
"""The columns of the packed array."""


@dataclasses.dataclass(frozen=True)
class SlotData:
    """The results of one slot: tokens int32 [samples, 1], valid bool [samples, 1], lengths int32
    [samples], as NumPy or JAX arrays.

    `valid` is False where the slot got no token, because it is free, has ended, or waits for pages.
    `lengths` is the number of tokens sampled so far.
    """

    tokens: np.ndarray | jax.Array
    valid: np.ndarray | jax.Array
    lengths: np.ndarray | jax.Array


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["data"],
    meta_fields=["tokens_idx", "valid_idx", "length_idx", "samples_per_slot"],
)
@dataclasses.dataclass(frozen=True)
class ResultTokens:
    """data int32 [slots * samples_per_slot, 3]. tokens_idx, valid_idx and length_idx are the column
    ranges (start, stop) of tokens, valid flags and lengths.
    """

    data: np.ndarray | jax.Array
    tokens_idx: tuple[int, int] = (TOKEN, TOKEN + 1)
    valid_idx: tuple[int, int] = (VALID, VALID + 1)
    length_idx: tuple[int, int] = (LENGTH, LENGTH + 1)
    samples_per_slot: int = 1

    def copy_to_host_async(self) -> None:
        """Start the copy to the host and return at once; does nothing if the data is there."""
        if isinstance(self.data, jax.Array):
            self.data.copy_to_host_async()

    def convert_to_numpy(self) -> ResultTokens:
        """Return the same results on the host; waits for the step."""
        return dataclasses.replace(self, data=np.asarray(self.data))

    def get_result_at_slot(self, slot: int) -> SlotData:
        """Return the results of one slot. InputError (a ValueError) for a number out of range."""
        num_slots = self.data.shape[0] // self.samples_per_slot
        if not 0 <= slot < num_slots:
            raise InputError(
                f"slot {slot}",
                f"0 to {num_slots - 1}",
                "Pass the number of a slot (or prompt), from 0.",
            )
        rows = self.data[slot * self.samples_per_slot : (slot + 1) * self.samples_per_slot]
        return SlotData(
            tokens=rows[:, slice(*self.tokens_idx)],
            valid=rows[:, slice(*self.valid_idx)].astype(bool),
            lengths=rows[:, self.length_idx[0]],
        )
