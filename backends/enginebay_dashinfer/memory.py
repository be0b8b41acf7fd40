"""The share of memory that a model may use, from the environment of the process."""

from __future__ import annotations

import os

from enginebay.errors import ConfigError, shown
from enginebay.platform import Platform

DEFAULT_RATIO = 0.9
MIB = 2**20


def memory_share(platform: Platform) -> float:
    """Return the share of the first device's free memory that a model may use for weights, cache
    and steps together.

    BFC_MEM_RATIO (default 0.9) is a share of a device's total memory, and on a CPU a share of the
    free memory. BFC_LEFTOVER_MB (default 0) are MiB of the free memory that stay unused.
    ConfigError for other values, and when the leftover is larger than the free memory.
    """
    ratio = _number("BFC_MEM_RATIO", DEFAULT_RATIO)
    leftover = _number("BFC_LEFTOVER_MB", 0.0) * MIB
    if not 0.0 < ratio <= 1.0:
        raise ConfigError(f"BFC_MEM_RATIO = {ratio}", "above 0, up to 1", "Set 0.9, for example.")
    device = platform.devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        total = int(stats["bytes_limit"])
        free = total - int(stats.get("bytes_in_use", 0))
        usable = min(ratio * total, free) - leftover
    else:
        free = platform.hardware().memory_bytes
        usable = ratio * free - leftover
    if usable <= 0:
        given = f"BFC_LEFTOVER_MB = {leftover / MIB:.0f} with {free / MIB:.0f} MiB free"
        raise ConfigError(given, "less than the free memory", "Lower BFC_LEFTOVER_MB.")
    return usable / free


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        number = default if text is None else float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < float("inf"):
        given, todo = f"{name} = {shown(text)}", f"Correct or unset {name}."
        raise ConfigError(given, "a number from 0 up", todo)
    return number
