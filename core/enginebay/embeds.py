"""Embeds: the embeddings among the positions of a prompt."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Embeds:
    """The positions of a prompt that hold embeddings: int32 [n] ascending, f32 [n, hidden_size],
    and (position, hash) of each.
    """

    positions: np.ndarray
    values: np.ndarray
    hashes: tuple[tuple[int, bytes], ...]

    def copy_to(self, target: np.ndarray, first: int) -> None:
        """Write the embeddings of positions `first`, first + 1, ... into target f32 [tokens,
        hidden_size].
        """
        start, stop = np.searchsorted(self.positions, [first, first + len(target)])
        target[self.positions[start:stop] - first] = self.values[start:stop]

    def touch(self, first: int, num_tokens: int) -> bool:
        """Whether one of the `num_tokens` positions from `first` on holds an embedding."""
        start, stop = np.searchsorted(self.positions, [first, first + num_tokens])
        return bool(start < stop)
