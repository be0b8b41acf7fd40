"""Registers the schedulers "fcfs", "priority", "fair", "sjf", "prefix_aware" and "static"."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_schedulers(register: Register) -> None:
    """Register five orders of continuous batching, and static batches."""
    register(
        "fcfs",
        "enginebay_schedulers.fcfs:Fcfs",
        options="enginebay_schedulers.fcfs:FcfsOptions",
        summary="first come, first served: continuous batching with chunked prefill",
        capabilities={"priority": 10, "order": "arrival"},
    )
    register(
        "priority",
        "enginebay_schedulers.priority:Priority",
        options="enginebay_schedulers.priority:PriorityOptions",
        summary="the most urgent request first, with ageing",
        capabilities={"order": "priority"},
    )
    register(
        "fair",
        "enginebay_schedulers.fair:Fair",
        options="enginebay_schedulers.fair:FairOptions",
        summary="equal service for all tenants, by virtual token counters",
    )
    register(
        "sjf",
        "enginebay_schedulers.sjf:Sjf",
        options="enginebay_schedulers.sjf:SjfOptions",
        summary="the shortest prompt first, with bounded waiting",
        capabilities={"order": "shortest_prompt"},
    )
    register(
        "prefix_aware",
        "enginebay_schedulers.prefix_aware:PrefixAware",
        options="enginebay_schedulers.prefix_aware:PrefixAwareOptions",
        summary="the longest cached prefix first, with bounded waiting",
        capabilities={"order": "cached_prefix"},
    )
    register(
        "static",
        "enginebay_schedulers.static_batch:StaticBatch",
        options="enginebay_schedulers.static_batch:StaticBatchOptions",
        summary="a whole batch runs to its end before the next begins",
        capabilities={"priority": 0, "order": "arrival"},
    )
