"""enginebay serves language models with JAX out of replaceable parts.

from enginebay import LLM, SamplingParams

with LLM("demo") as llm:
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=40))[0].get_text())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginebay.config import EngineConfig
    from enginebay.errors import EnginebayError, InputError, InternalError, UnsupportedError
    from enginebay.llm import LLM
    from enginebay.llm.events import AsyncEvents, Events, RequestEnded
    from enginebay.outputs import CompletionOutput, RequestOutput, StreamChunk
    from enginebay.types import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "enginebay.llm",
    "AsyncEvents": "enginebay.llm.events",
    "Events": "enginebay.llm.events",
    "RequestEnded": "enginebay.llm.events",
    "SamplingParams": "enginebay.types",
    "RequestOutput": "enginebay.outputs",
    "CompletionOutput": "enginebay.outputs",
    "StreamChunk": "enginebay.outputs",
    "EngineConfig": "enginebay.config",
    "EnginebayError": "enginebay.errors",
    "InputError": "enginebay.errors",
    "UnsupportedError": "enginebay.errors",
    "InternalError": "enginebay.errors",
}

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
    "StreamChunk",
    "UnsupportedError",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, so that `import enginebay` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'enginebay' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
