"""The contract of adapters: additions to the weights of a model, which requests choose by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from enginebay.errors import RequestError

ADAPTER_WEIGHTS = "adapters."
"""Paths of weights with this prefix hold adapters: their first axis counts slots. A slot without an
adapter holds zeros.
"""


class Adapters(ABC):
    """The adapters of one engine. Some are in slots on the device, the others on the host only.

    `place` and `release` belong to the loop's thread, and `unload` is called between two steps; any
    thread may call the other methods.
    """

    write: Callable[[int, Mapping[str, np.ndarray]], None]
    """Writes the arrays of an adapter to a slot, counted from 0, after the launched steps. The
    engine sets it when it is made.
    """

    @abstractmethod
    def load(self, name: str, folder: str | Path) -> None:
        """Read an adapter, which requests may use from now on under `name`. CheckpointError for a
        folder that cannot be used, RequestError for a name that is taken.
        """

    @abstractmethod
    def unload(self, name: str, in_use: Collection[str]) -> None:
        """Forget an adapter. RequestError for a name that is not loaded, and for an adapter whose
        key is in `in_use`.
        """

    @abstractmethod
    def key_of(self, name: str) -> str:
        """Return the key of an adapter. No two adapters of an engine have the same key, even under
        the same name. RequestError for a name that is not loaded.
        """

    @abstractmethod
    def has(self, key: str) -> bool:
        """Return whether the adapter with this key is loaded."""

    @abstractmethod
    def place(self, key: str) -> int | None:
        """Return the number of the adapter's slot, counted from 1, for a row that begins. An
        adapter that is in no slot is first written to one. None when rows use the adapters of all
        slots.
        """

    @abstractmethod
    def release(self, key: str) -> None:
        """Record that one row of `place` has ended."""


def required(adapters: Adapters | None, given: str) -> Adapters:
    """Return `adapters`; RequestError, which begins with `given`, for an engine without slots."""
    if adapters is None:
        raise RequestError(
            f"{given} with an engine without slots for adapters",
            "an engine with max_loras of at least 1",
            "Pass max_loras=4, or --max-loras 4, when the engine is made.",
        )
    return adapters
