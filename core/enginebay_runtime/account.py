"""One account of device memory for all engines of a process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import jax

from enginebay.memory import MemoryPlan, check_memory


class MemoryAccount:
    """Counts the bytes that the engines of this process use on each device, or will use once they
    allocate. Engines that were garbage-collected do not count. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promises: weakref.WeakKeyDictionary[object, tuple[int, frozenset[jax.Device]]]
        self._promises = weakref.WeakKeyDictionary()

    def promise(self, owner: object, plan: MemoryPlan, devices: Sequence[jax.Device]) -> None:
        """Count `plan` for `owner` on each of the devices, in place of an earlier plan of `owner`.

        UnsupportedError when it does not fit beside the other engines; the counts then stay as they
        were.
        """
        with self._lock:
            check_memory(plan, max(self._promised(device, but=owner) for device in devices))
            self._promises[owner] = plan.total_bytes, frozenset(devices)

    def release(self, owner: object) -> None:
        """Stop counting the plan of `owner`, if it has one."""
        with self._lock:
            self._promises.pop(owner, None)

    def promised_bytes(self, device: jax.Device) -> int:
        """Return the bytes of all engines on a device."""
        with self._lock:
            return self._promised(device, but=None)

    def _promised(self, device: jax.Device, *, but: object) -> int:
        return sum(
            num_bytes
            for owner, (num_bytes, devices) in self._promises.items()
            if device in devices and owner is not but
        )


ACCOUNT = MemoryAccount()
"""The account of this process."""
