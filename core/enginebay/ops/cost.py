"""The ideal cost of a call of an op: the same for every implementation, so that reports can say how
far each one is from it.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """Floating-point operations, bytes read and bytes written."""

    flops: float
    bytes_read: float
    bytes_written: float

    def time_s(self, *, flops_per_s: float, bytes_per_s: float) -> float:
        """Seconds at the given peak rates when arithmetic and traffic overlap fully."""
        return max(self.flops / flops_per_s, (self.bytes_read + self.bytes_written) / bytes_per_s)
