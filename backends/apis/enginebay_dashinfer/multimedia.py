"""MultiMediaInfo: embeddings that replace placeholder tokens of a prompt."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from enginebay.errors import RequestError, shown
from enginebay.serving.segments import Segment, Segments
from enginebay_dashinfer.statuses import AsStatus

CPU_DEVICE = (1, 0)
"""DLPack's pair of device type and id for the memory of the host."""


class Capsule:
    """A DLPack capsule of an array in the host's memory, as an object with DLPack's methods."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU_DEVICE


class MultiMediaInfo:
    """Embeddings by placeholder. A prompt has a placeholder token for each row of the embeddings;
    the rows take the places of these tokens in order.
    """

    def __init__(self) -> None:
        self._contents: dict[int, list[np.ndarray]] = {}

    def add_multimedia_content(self, key: str | int, dl_tensor_list: Sequence[Any]) -> AsStatus:
        """Add embeddings [tokens, hidden_size] for a placeholder. Further calls with the same
        placeholder append.

        key: the token id of the placeholder. dl_tensor_list: DLPack capsules, or arrays of NumPy,
        JAX or torch. The values are copied. ALLSPARK_PARAM_ERROR, with nothing added, for another
        key or value.
        """
        try:
            token_id = int(key) if isinstance(key, str) else operator.index(key)
            arrays = [_as_array(one) for one in dl_tensor_list]
        except (TypeError, ValueError, RuntimeError, BufferError):
            return AsStatus.ALLSPARK_PARAM_ERROR
        if token_id < 0 or not arrays or any(one.ndim != 2 for one in arrays):
            return AsStatus.ALLSPARK_PARAM_ERROR
        self._contents.setdefault(token_id, []).extend(arrays)
        return AsStatus.ALLSPARK_SUCCESS

    def segments(self, token_ids: Sequence[int]) -> Segments:
        """Return the prompt `token_ids` with its placeholders replaced.

        RequestError unless each placeholder occurs as often as it has rows.
        """
        rows = {key: np.concatenate(arrays) for key, arrays in self._contents.items()}
        for key, one in rows.items():
            count = list(token_ids).count(key)
            if count != len(one):
                raise RequestError(
                    f"{count} times the placeholder {key} in a prompt for {len(one)} embeddings",
                    "a placeholder for each row of the embeddings",
                    f"Repeat token {key} {len(one)} times in the prompt.",
                )
        places = dict.fromkeys(rows, 0)
        parts: list[Segment] = []
        for found, run in itertools.groupby(token_ids, lambda one: one if one in rows else None):
            ids = list(run)
            if found is None:
                parts.append(ids)
                continue
            start = places[found]
            places[found] = stop = start + len(ids)
            parts.append(rows[found][start:stop])
        return Segments(*parts)


def _as_array(given: Any) -> np.ndarray:
    """Return a copy of a DLPack capsule or an array, on the host."""
    if type(given).__name__ == "PyCapsule":
        return np.array(jax.dlpack.from_dlpack(Capsule(given)))
    if isinstance(given, np.ndarray | jax.Array):
        return np.array(given)
    if callable(getattr(given, "__dlpack__", None)):
        return np.array(jax.dlpack.from_dlpack(given))
    raise RequestError(
        f"embeddings of type {type(given).__name__} ({shown(given)})",
        "DLPack capsules, or arrays of NumPy, JAX or torch",
        "Pass torch.utils.dlpack.to_dlpack(embeddings).",
    )
