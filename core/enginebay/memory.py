"""The memory plan of an engine."""

from __future__ import annotations

import dataclasses

from enginebay.errors import UnsupportedError


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

    The other fields count the memory of the host, where the device uses the same memory, and are 0
    elsewhere. `runtime_bytes`: the interpreter and its libraries. `programs_bytes`: all compiled
    programs. `start_cache_bytes`: the part of the cache that is resident before the first request.
    """

    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int
    device_bytes: int
    tiers: tuple[TierPlan, ...] = ()
    runtime_bytes: int = 0
    programs_bytes: int = 0
    start_cache_bytes: int = 0

    @property
    def start_bytes(self) -> int:
        """Resident bytes of the process before the first request and the first program."""
        return self.weights_bytes + self.start_cache_bytes + self.runtime_bytes

    @property
    def max_bytes(self) -> int:
        """Resident bytes of the process at most: with a full cache and all programs."""
        return self.total_bytes + self.runtime_bytes + self.programs_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes that the engine will use in all."""
        return self.weights_bytes + self.cache_bytes + self.workspace_bytes


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
