"""LoraStore: the loaded adapters of an engine, and which of them are in slots on the device."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from enginebay.adapters import Adapters
from enginebay.errors import RequestError, shown
from enginebay_lora.layers import LayerPart
from enginebay_lora.peft import read_adapter


@dataclasses.dataclass(frozen=True)
class HostAdapter:
    """An adapter in the memory of the host: its key, and its arrays by path of the weight."""

    key: str
    arrays: Mapping[str, np.ndarray]


class LoraStore(Adapters):
    """All loaded adapters are in the memory of the host. When a row needs an adapter that is in no
    slot, it is written to an empty slot, or in place of the one that rows used least recently.
    """

    def __init__(
        self, parts: Mapping[str, LayerPart], num_slots: int, max_rank: int, dtype: np.dtype
    ) -> None:
        """`parts`: the layers that may have adapters, by their names in the checkpoint."""
        self._parts, self._max_rank, self._dtype = parts, max_rank, dtype
        self._lock = threading.Lock()
        self._loaded: dict[str, HostAdapter] = {}
        self._numbers = itertools.count(1)
        self._slots: dict[str, int] = {}
        """Slot by key, from the least to the most recently used."""
        self._empty = list(range(num_slots - 1, -1, -1))
        self._users: Counter[str] = Counter()

    def load(self, name: str, folder: str | Path) -> None:
        if not isinstance(name, str) or not name or not name.isprintable():
            allowed = "text that is not empty, of printable characters"
            raise RequestError(f"adapter name {shown(name)}", allowed, "Pass another name.")
        self._refuse_taken(name)
        arrays = read_adapter(folder, self._parts, self._max_rank, self._dtype)
        with self._lock:
            self._refuse_taken(name)
            self._loaded[name] = HostAdapter(f"{name}#{next(self._numbers)}", arrays)

    def _refuse_taken(self, name: str) -> None:
        if name in self._loaded:
            raise RequestError(
                f"adapter {shown(name)}, which is loaded",
                "a name that no loaded adapter has",
                "Unload this adapter first, or pass another name.",
            )

    def unload(self, name: str, in_use: Collection[str]) -> None:
        key = self.key_of(name)
        if key in in_use:
            raise RequestError(
                f"unloading adapter {shown(name)}, which unfinished requests use",
                "an adapter that no unfinished request uses",
                "Wait until these requests have ended, or abort them, then try again.",
            )
        with self._lock:
            del self._loaded[name]
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._empty.append(slot)

    def key_of(self, name: str) -> str:
        with self._lock:
            found = self._loaded.get(name)
            names = ", ".join(map(shown, sorted(self._loaded))) or "none is loaded"
        if found is None:
            todo = "Load it with load_adapter(), or choose a loaded one."
            raise RequestError(f"adapter {shown(name)}", f"the loaded adapters: {names}", todo)
        return found.key

    def has(self, key: str) -> bool:
        return self._find(key) is not None

    def _find(self, key: str) -> HostAdapter | None:
        with self._lock:
            found = self._loaded.get(key.rpartition("#")[0])
        return found if found is not None and found.key == key else None

    def place(self, key: str) -> int | None:
        slot = self._slots.pop(key, None)
        if slot is None:
            adapter = self._find(key)
            assert adapter is not None, "an adapter is not unloaded while a request uses it"
            slot = self._free_slot()
            if slot is None:
                return None
            try:
                self.write(slot, adapter.arrays)
            except BaseException:
                self._empty.append(slot)
                raise
        self._slots[key] = slot  # the last one: the most recently used
        self._users[key] += 1
        return slot + 1

    def _free_slot(self) -> int | None:
        if self._empty:
            return self._empty.pop()
        idle = next((key for key in self._slots if not self._users[key]), None)
        return None if idle is None else self._slots.pop(idle)

    def release(self, key: str) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
