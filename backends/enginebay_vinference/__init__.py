"""The contiguous-cache engine, and the vInference API over it: generation whose state can leave the
process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginebay_vinference.errors import InferenceWarning, SpentStateError
    from enginebay_vinference.inference import vInference
    from enginebay_vinference.inference_config import vInferenceConfig
    from enginebay_vinference.partition import PartitionAxis
    from enginebay_vinference.precompile import vInferencePreCompileConfig
    from enginebay_vinference.prompts import PromptOutput
    from enginebay_vinference.state import SampleState

_HOMES = {
    "InferenceWarning": "errors",
    "PartitionAxis": "partition",
    "PromptOutput": "prompts",
    "SampleState": "state",
    "SpentStateError": "errors",
    "vInference": "inference",
    "vInferenceConfig": "inference_config",
    "vInferencePreCompileConfig": "precompile",
}

__all__ = [
    "InferenceWarning",
    "PartitionAxis",
    "PromptOutput",
    "SampleState",
    "SpentStateError",
    "vInference",
    "vInferenceConfig",
    "vInferencePreCompileConfig",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, so that listing plugins imports no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'enginebay_vinference' has no attribute {name!r}")
    return getattr(importlib.import_module(f"enginebay_vinference.{_HOMES[name]}"), name)
