"""enginebay serves language models with JAX; every part of it is a plugin that can be replaced.

from enginebay import LLM, SamplingParams

with LLM("demo") as llm:
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=40))[0].get_text())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginebay.former_names import find_former_names
from enginebay.on_demand import on_demand

if TYPE_CHECKING:
    from enginebay.config import EngineConfig
    from enginebay.errors import EnginebayError, InputError, InternalError, UnsupportedError
    from enginebay.outputs import CompletionOutput, RequestOutput, StreamChunk
    from enginebay.serving import LLM
    from enginebay.serving.events import AsyncEvents, Events, RequestEnded
    from enginebay.serving.segments import Segments
    from enginebay.types import SamplingParams

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncEvents",
    "CompletionOutput",
    "EngineConfig",
    "EnginebayError",
    "Events",
    "InputError",
    "InternalError",
    "RequestEnded",
    "RequestOutput",
    "SamplingParams",
    "Segments",
    "StreamChunk",
    "UnsupportedError",
]

find_former_names()

# Names are imported when they are first used, so that `import enginebay` stays cheap.
__getattr__, __dir__ = on_demand(
    __name__,
    {
        "enginebay.config": "EngineConfig",
        "enginebay.errors": "EnginebayError InputError InternalError UnsupportedError",
        "enginebay.serving": "LLM",
        "enginebay.serving.events": "AsyncEvents Events RequestEnded",
        "enginebay.outputs": "CompletionOutput RequestOutput StreamChunk",
        "enginebay.serving.segments": "Segments",
        "enginebay.types": "SamplingParams",
    },
)
