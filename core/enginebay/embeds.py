"""Embeds: embeddings that take the place of tokens at some positions of a prompt."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Embeds:
    """Embeddings at n positions of a prompt: positions int32 [n] in ascending order, values f32
    [n, hidden_size], and one pair (position, hash of the embedding) for each position.
    """

    positions: np.ndarray
    values: np.ndarray
    hashes: tuple[tuple[int, bytes], ...]

    def copy_to(self, target: np.ndarray, first: int) -> None:
        """Write the embeddings into `target` f32 [tokens, hidden_size], whose row i is position
        `first` + i. Rows without an embedding stay as they are.
        """
        start, stop = np.searchsorted(self.positions, [first, first + len(target)])
        target[self.positions[start:stop] - first] = self.values[start:stop]

    def touch(self, first: int, num_tokens: int) -> bool:
        """Return whether one of the `num_tokens` positions from `first` on has an embedding."""
        start, stop = np.searchsorted(self.positions, [first, first + num_tokens])
        return bool(start < stop)
