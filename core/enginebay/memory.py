"""What engines will hold on each device, and one account of it for all engines of a process."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence

import jax

from enginebay.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes an engine will hold on each device, made before anything is allocated."""

    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int
    device_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.cache_bytes + self.workspace_bytes

    def check(self, promised_bytes: int = 0) -> None:
        """UnsupportedError when it does not fit the device, of which `promised_bytes` are
        others'.
        """
        if self.total_bytes + promised_bytes <= self.device_bytes:
            return
        parts = self.weights_bytes, self.cache_bytes, self.workspace_bytes
        weights, cache, workspace, others, device = (
            f"{n / 2**20:.0f} MiB" for n in (*parts, promised_bytes, self.device_bytes)
        )
        beside = f" beside the {others} of this process's other engines" if promised_bytes else ""
        close = "Close an engine that is not needed; or lower" if promised_bytes else "Lower"
        raise UnsupportedError(
            f"weights {weights}, cache {cache} and working space {workspace} do not fit the "
            f"device{beside}",
            f"{device} in all",
            f"{close} the engine's num_pages or cache_bytes where one is given, "
            "max_model_len or max_num_seqs; use a smaller dtype, or more devices.",
        )


class MemoryAccount:
    """Bytes that the engines of this process have promised to hold on each device, allocated yet or
    not. An engine that is garbage is not counted. Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promises: weakref.WeakKeyDictionary[object, tuple[int, frozenset[jax.Device]]]
        self._promises = weakref.WeakKeyDictionary()

    def promise(self, owner: object, plan: MemoryPlan, devices: Sequence[jax.Device]) -> None:
        """Count `plan` for `owner` on each of the devices, in the place of what it had promised.

        UnsupportedError when it does not fit beside what others have promised there; nothing is
        counted then.
        """
        with self._lock:
            plan.check(max(self._promised(device, but=owner) for device in devices))
            self._promises[owner] = plan.total_bytes, frozenset(devices)

    def release(self, owner: object) -> None:
        """Count nothing for `owner` any more; nothing to do when it has promised nothing."""
        with self._lock:
            self._promises.pop(owner, None)

    def promised_bytes(self, device: jax.Device) -> int:
        """Of all engines on a device."""
        with self._lock:
            return self._promised(device, but=None)

    def _promised(self, device: jax.Device, *, but: object) -> int:
        return sum(
            num_bytes
            for owner, (num_bytes, devices) in self._promises.items()
            if device in devices and owner is not but
        )


ACCOUNT = MemoryAccount()
"""That of this process."""
