"""The contract of adapters: additions to the weights of a model, which requests choose by name."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from enginebay.errors import RequestError, shown

ADAPTER_WEIGHTS = "adapters."
"""Paths of weights with this prefix hold adapters: their first axis counts slots. A slot without an
adapter holds zeros.
"""


class AdapterNotFoundError(RequestError):
    """No loaded adapter has this name."""


class AdapterLoadedError(RequestError):
    """An adapter with this name is loaded already."""


class AdapterInUseError(RequestError):
    """Unfinished requests use the adapter, so it cannot be unloaded."""


class AdapterRankError(RequestError):
    """The rank of the adapter is greater than that of the slots."""


class AdapterCountError(RequestError):
    """The engine has no slots, or holds as many adapters as it may."""


@dataclasses.dataclass(frozen=True)
class SlotCounts:
    """Number of slots on the device, of adapters that were written to them, and of those that were
    written in place of another adapter.
    """

    slots: int
    written: int
    evicted: int


class Adapters(ABC):
    """The adapters of one engine. Some are in slots on the device, the others on the host only.

    `place` and `release` belong to the loop's thread, and `unload` is called between two steps; any
    thread may call the other methods.
    """

    write: Callable[[int, Mapping[str, np.ndarray]], None]
    """Writes the arrays of an adapter to a slot, counted from 0, after the launched steps. The
    engine sets it when it is made; all slots are empty then.
    """

    @abstractmethod
    def load(self, name: str, folder: str | Path) -> None:
        """Read an adapter, which requests may use from now on under `name`. CheckpointError for a
        folder that cannot be used, AdapterRankError, AdapterLoadedError or AdapterCountError.
        """

    @abstractmethod
    def unload(self, name: str, in_use: Collection[str]) -> None:
        """Forget an adapter. AdapterNotFoundError for a name that is not loaded, AdapterInUseError
        for an adapter whose key is in `in_use`.
        """

    @abstractmethod
    def loaded(self) -> Mapping[str, str]:
        """Return the keys of all loaded adapters by name. Two adapters with the same key, at any
        time and in any process, have the same arrays.
        """

    @abstractmethod
    def counts(self) -> SlotCounts:
        """Return what happened in the slots since the engine was made."""

    @abstractmethod
    def place(self, key: str) -> int | None:
        """Return the number of the adapter's slot, counted from 1, for a row that begins. An
        adapter that is in no slot is first written to one. None when rows use the adapters of all
        slots.
        """

    @abstractmethod
    def release(self, key: str) -> None:
        """Record that one row of `place` has ended."""

    def key_of(self, name: str) -> str:
        """Return the key of an adapter. AdapterNotFoundError for a name that is not loaded."""
        found = self.loaded()
        if name not in found:
            names = ", ".join(map(shown, sorted(found))) or "none is loaded"
            todo = "Load it with load_adapter(), or choose a loaded one."
            raise AdapterNotFoundError(
                f"adapter {shown(name)}", f"the loaded adapters: {names}", todo
            )
        return found[name]


def required(adapters: Adapters | None, given: str) -> Adapters:
    """Return `adapters`; AdapterCountError, which begins with `given`, for an engine without
    slots.
    """
    if adapters is None:
        raise AdapterCountError(
            f"{given} with an engine without slots for adapters",
            "an engine with max_loras of at least 1",
            "Pass max_loras=4, or --max-loras 4, when the engine is made.",
        )
    return adapters
