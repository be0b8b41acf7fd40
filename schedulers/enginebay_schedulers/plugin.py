"""What this package offers: the schedulers "fcfs" and "static"."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_schedulers(register: Register) -> None:
    """fcfs and static."""
    register(
        "fcfs",
        "enginebay_schedulers.fcfs:Fcfs",
        options="enginebay_schedulers.fcfs:FcfsOptions",
        summary="first come, first served: continuous batching with chunked prefill",
        capabilities={"priority": 10},
    )
    register(
        "static",
        "enginebay_schedulers.static_batch:StaticBatch",
        options="enginebay_schedulers.static_batch:StaticBatchOptions",
        summary="a whole batch runs to its end before the next begins",
        capabilities={"priority": 0},
    )
