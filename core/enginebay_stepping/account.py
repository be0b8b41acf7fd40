"""One account of device memory for all engines of a process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import jax

from enginebay.errors import UnsupportedError
from enginebay.memory import MemoryPlan


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


def check_memory(plan: MemoryPlan, promised_bytes: int = 0) -> None:
    """Raise UnsupportedError when a planned engine does not fit the device beside
    `promised_bytes` of other engines.
    """
    if plan.total_bytes + promised_bytes <= plan.device_bytes:
        return
    parts = plan.weights_bytes, plan.cache_bytes, plan.workspace_bytes
    weights, cache, workspace, others, device = (
        f"{n / 2**20:.0f} MiB" for n in (*parts, promised_bytes, plan.device_bytes)
    )
    beside = f" beside the {others} of this process's other engines" if promised_bytes else ""
    close = "Close another engine of this process, or lower" if promised_bytes else "Lower"
    raise UnsupportedError(
        f"weights {weights}, cache {cache} and working space {workspace} do not fit the "
        f"device{beside}",
        f"{device} in all",
        f"{close} the engine option num_pages or cache_bytes if it is set, --max-model-len or "
        "--max-num-seqs; or use a smaller --dtype, or more devices (--mesh).",
    )


ACCOUNT = MemoryAccount()
"""The account of this process."""
