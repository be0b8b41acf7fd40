"""The ideal cost of a call of an op. It is the same for all implementations, so that reports can
compare each of them with it.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """Numbers of floating-point operations, bytes read and bytes written by a call."""

    flops: float
    bytes_read: float
    bytes_written: float

    def time_s(self, *, flops_per_s: float, bytes_per_s: float) -> float:
        """Return the seconds at these peak rates, if arithmetic and memory traffic overlap."""
        return max(self.flops / flops_per_s, (self.bytes_read + self.bytes_written) / bytes_per_s)
