"""The vInference API over the contiguous engine: generation whose state can be stored, moved
to another process and resumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginebay.on_demand import on_demand

if TYPE_CHECKING:
    from enginebay_vinference.api_server import vInferenceApiServer
    from enginebay_vinference.errors import InferenceWarning, SpentStateError
    from enginebay_vinference.inference import vInference
    from enginebay_vinference.inference_config import vInferenceConfig
    from enginebay_vinference.partition import PartitionAxis
    from enginebay_vinference.precompile import vInferencePreCompileConfig
    from enginebay_vinference.prompts import PromptOutput
    from enginebay_vinference.state import SampleState

__all__ = [
    "InferenceWarning",
    "PartitionAxis",
    "PromptOutput",
    "SampleState",
    "SpentStateError",
    "vInference",
    "vInferenceApiServer",
    "vInferenceConfig",
    "vInferencePreCompileConfig",
]

# Names are imported at first use, so that listing plugins does not import JAX.
__getattr__, __dir__ = on_demand(
    __name__,
    {
        "enginebay_vinference.api_server": "vInferenceApiServer",
        "enginebay_vinference.errors": "InferenceWarning SpentStateError",
        "enginebay_vinference.inference": "vInference",
        "enginebay_vinference.inference_config": "vInferenceConfig",
        "enginebay_vinference.partition": "PartitionAxis",
        "enginebay_vinference.precompile": "vInferencePreCompileConfig",
        "enginebay_vinference.prompts": "PromptOutput",
        "enginebay_vinference.state": "SampleState",
    },
)
