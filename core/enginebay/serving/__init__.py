"""Serving: LLM, the engine as a Python object, and the loop, the thread that serves its requests.

`llm` is the face; `prepare` turns prompts into checked requests, `events` and `reading` are their
output. `loop` is the thread, `messages` the records that other threads exchange with it,
`request_table` the state of each request, `admission` rows and cache leases of running requests,
`planning` the plans of its steps, `steps` launching and reading them, `observer` the interface for
metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginebay.on_demand import on_demand

if TYPE_CHECKING:
    from enginebay.serving.llm import LLM

__all__ = ["LLM"]

__getattr__, __dir__ = on_demand(__name__, {"enginebay.serving.llm": "LLM"})
