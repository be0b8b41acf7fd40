"""What the processes of the zoo have in their environment, as the workers of a check do."""

from __future__ import annotations

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}

SEVERAL_DEVICES = "--xla_force_host_platform_device_count=4"
"""For collectives."""
