"""LoraStore: the loaded adapters of an engine, and which of them are in slots on the device."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from enginebay.contracts.adapters import (
    AdapterCountError,
    AdapterInUseError,
    AdapterLoadedError,
    Adapters,
    SlotCounts,
)
from enginebay.errors import RequestError, shown
from enginebay_lora.layers import Adapted
from enginebay_lora.peft import read_adapter

WriteSlot = Callable[[int, Mapping[str, np.ndarray]], None]


@dataclasses.dataclass(frozen=True)
class HostAdapter:
    """An adapter in the memory of the host: its key, and its arrays by path of the weight."""

    key: str
    arrays: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class SlotLimits:
    """Number of slots on the device, their rank, and how many adapters may be loaded (None: any
    number).
    """

    slots: int
    rank: int
    loaded: int | None = None


class LoraStore(Adapters):
    """All loaded adapters are in the memory of the host. When a row needs an adapter that is in no
    slot, it is written to an empty slot, or in place of the one that rows used least recently.
    """

    def __init__(self, layers: Mapping[str, Adapted], limits: SlotLimits, dtype: np.dtype) -> None:
        """`layers`: the weights that have slots, by path. `dtype`: that of the slots."""
        self._layers, self._limits, self._dtype = layers, limits, dtype
        self._lock = threading.Lock()
        self._loaded: dict[str, HostAdapter] = {}
        self._slots: dict[str, int] = {}
        """Slot by key, from the least to the most recently used."""
        self._empty: list[int] = []
        self._users: Counter[str] = Counter()
        self._written = self._evicted = 0

    @property
    def write(self) -> WriteSlot:
        """Writes the arrays of an adapter to a slot. Setting `write` empties all slots, because the
        engine that sets it was just made.
        """
        return self._write

    @write.setter
    def write(self, write: WriteSlot) -> None:
        self._write = write
        self._slots.clear()
        self._users.clear()
        self._empty = list(range(self._limits.slots - 1, -1, -1))

    def load(self, name: str, folder: str | Path) -> None:
        if not isinstance(name, str) or not name or not name.isprintable():
            allowed = "text that is not empty, of printable characters"
            raise RequestError(f"adapter name {shown(name)}", allowed, "Pass another name.")
        self._check_room(name)
        arrays = read_adapter(folder, self._layers, self._limits.rank, self._dtype)
        key = f"{name}#{content_digest(arrays)}"  # the same in every process, for pages in files
        with self._lock:
            self._check_room(name)
            self._loaded[name] = HostAdapter(key, arrays)

    def _check_room(self, name: str) -> None:
        if name in self._loaded:
            raise AdapterLoadedError(
                f"adapter {shown(name)}, which is loaded",
                "a name that no loaded adapter has",
                "Unload this adapter first, or pass another name.",
            )
        most = self._limits.loaded
        if most is not None and len(self._loaded) >= most:
            raise AdapterCountError(
                f"adapter {shown(name)}, while {len(self._loaded)} adapters are loaded",
                f"at most {most} loaded adapters",
                "Unload an adapter first, or raise max_cpu_loras.",
            )

    def unload(self, name: str, in_use: Collection[str]) -> None:
        key = self.key_of(name)
        if key in in_use:
            raise AdapterInUseError(
                f"unloading adapter {shown(name)}, which unfinished requests use",
                "an adapter that no unfinished request uses",
                "Wait until these requests have ended, or abort them, then try again.",
            )
        with self._lock:
            del self._loaded[name]
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._empty.append(slot)

    def loaded(self) -> Mapping[str, str]:
        with self._lock:
            return {name: one.key for name, one in self._loaded.items()}

    def counts(self) -> SlotCounts:
        return SlotCounts(self._limits.slots, self._written, self._evicted)

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
            self._written += 1
        self._slots[key] = slot  # the last one: the most recently used
        self._users[key] += 1
        return slot + 1

    def _free_slot(self) -> int | None:
        if self._empty:
            return self._empty.pop()
        idle = next((key for key in self._slots if not self._users[key]), None)
        if idle is None:
            return None
        self._evicted += 1
        return self._slots.pop(idle)

    def release(self, key: str) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]


def content_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a hash over the names, dtypes, shapes and bytes of arrays."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(json.dumps([name, str(array.dtype), array.shape]).encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()
