"""The memory plan of an engine."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TierPlan:
    """A tier for pages of prefixes that the device has no room for: its name, the max bytes and
    tokens that it holds, and its folder, "" for memory.
    """

    name: str
    max_bytes: int
    num_tokens: int
    folder: str = ""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The bytes that an engine will use on each device, planned before it allocates any. The device
    has `device_bytes` in all. `tiers`: the places for prefixes besides the device.
    """

    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int
    device_bytes: int
    tiers: tuple[TierPlan, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes that the engine will use in all."""
        return self.weights_bytes + self.cache_bytes + self.workspace_bytes
