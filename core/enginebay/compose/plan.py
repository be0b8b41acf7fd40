"""Plan: every part of an engine, chosen and not made yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.processors import ChosenProcessors
from enginebay.compose.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from enginebay.config import EngineConfig, Reason
from enginebay.executor.parts import ShadowParts, engine_title
from enginebay.executor.sharding import Placement
from enginebay.model import Checkpoint, Model
from enginebay.platform import Platform
from enginebay.registry import Registry
from enginebay.sampler import Sampler
from enginebay.weights import Weight, WeightFormat


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything chosen, nothing allocated: what `explain` shows and `build` makes."""

    registry: Registry
    config: EngineConfig
    reasons: tuple[Reason, ...]
    platform: Platform
    checkpoint: Checkpoint
    model: Model
    placement: Placement
    kernels: ChosenKernels
    processors: ChosenProcessors
    weight_format: WeightFormat
    shadow: ShadowParts | None = None
    """What runs beside the chosen kernels on some steps."""
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    """What the checkpoint says of sampling fields that a request leaves out."""
    sampler: Sampler | None = None
    """The sampler in the place of the configured one; see `enginebay.compose.by_hand`."""
    swapped: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """What was given to override(), by setting: registered names, import paths, or
    implementations.
    """

    def load_weights(
        self,
        checkpoint: Checkpoint | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Weight]:
        """The model's weights as the plan stores and places them, from another checkpoint of the
        same model if one is given.
        """
        return (checkpoint or self.checkpoint).load_weights(
            self.model,
            dtype=self.weight_format.dtype,
            place=self.placement.weight,
            quantization=self.weight_format.quantization,
            verify=self.config.verify_weights,
            progress=progress,
        )


def make_title(plan: Plan) -> str:
    """The engine of a plan with its attention kernels, for whoever waits for it."""
    return engine_title(plan.config, plan.kernels.names)
