"""Plan: all chosen parts of an engine that is not made yet."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping

from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.key_centers import with_measured_centers
from enginebay.compose.processors import ChosenProcessors
from enginebay.compose.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from enginebay.config import EngineConfig, Reason
from enginebay.contracts.adapters import Adapters
from enginebay.contracts.executor import MakeExecutor, ShadowParts, engine_title
from enginebay.contracts.model import Checkpoint, Model
from enginebay.contracts.placement import Placement
from enginebay.contracts.platform import Platform
from enginebay.contracts.sampler import Sampler
from enginebay.html_table import html_table, html_text
from enginebay.plugins.registry import Registry
from enginebay.weights import Weight, WeightFormat


@dataclasses.dataclass(frozen=True)
class Plan:
    """All chosen parts of an engine, before anything is allocated. `enginebay explain` shows it,
    and `enginebay.compose.composition.build` makes the engine.
    """

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
    make_executor: MakeExecutor | None = None
    """Makes the engine's executor; None: the engine uses its own."""
    adapters: Adapters | None = None
    """The adapters that requests may use; None: the model has no slots for adapters."""
    shadow: ShadowParts | None = None
    """Shadow mode: the candidate that also runs on some steps, for comparison."""
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    """The checkpoint's values for sampling fields that a request leaves out."""
    sampler: Sampler | None = None
    """A sampler passed to override(), used in place of the configured one."""
    swapped: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """The parts passed to override(), by setting: registered names, import paths, or functions."""

    def __repr__(self) -> str:
        config = self.config
        chosen = (config.model, config.engine.name, config.platform, config.dtype)
        kernels = dict(self.kernels.names)
        return "Plan(model={!r}, engine={!r}, platform={!r}, dtype={!r}, kernels={!r})".format(
            *chosen, kernels
        )

    def _repr_html_(self) -> str:
        """Return what notebooks show: each choice, its reason, and the refused candidates."""
        rows = []
        for reason in self.reasons:
            refused = "\n".join(f"{name}: {why}" for name, why in reason.refused)
            rows.append((reason.setting, reason.chosen, reason.why, refused))
        return f"<p><b>{html_text(self.config.model)}</b></p>" + html_table(
            ("setting", "chosen", "why", "refused"), rows
        )

    def load_weights(
        self,
        checkpoint: Checkpoint | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Weight]:
        """Load the model's weights, stored and placed as the plan says. `checkpoint`: another
        checkpoint of the same model, or None for the plan's own.
        """
        weights = (checkpoint or self.checkpoint).load_weights(
            self.model,
            form=self.weight_format,
            place=self.placement.weight,
            verify=self.config.verify_weights,
            progress=progress,
        )
        return with_measured_centers(self.model, self.kernels, self.placement, weights)

    def program_digest(self) -> str:
        """Return a digest of all that steps are traced from, except for sizes, versions and code;
        "" for a plan with parts that were passed to override().
        """
        if self.swapped or self.sampler is not None:
            return ""
        kernels = self.kernels
        stored = {
            path: repr(self.weight_format.stored(path, spec))
            for path, spec in self.model.weight_specs().items()
        }
        parts = [(e.kind, e.op, e.name, e.package, e.state) for e in self.registry.entries]
        facts = (
            self.config.model_dump_json(exclude={"capture"}),
            repr(parts),
            json.dumps(dict(self.checkpoint.config), sort_keys=True, default=repr),
            repr(self.model.info),
            repr(stored),
            repr(sorted(kernels.names.items())),
            repr(kernels.tuned),
            repr(kernels.layout_type),
            repr([*self.processors.entries]),
        )
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def make_title(plan: Plan) -> str:
    """Return the names of the engine and its attention kernels, for messages about waits."""
    return engine_title(plan.config, plan.kernels.names)
