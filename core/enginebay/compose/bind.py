"""The contract of binders, which apply the chosen implementations of ops in an engine's steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from enginebay.compose.plan import Plan
from enginebay.executor.parts import OpsFactory
from enginebay.model import Model


@dataclasses.dataclass(frozen=True)
class Bound:
    """What the steps of an engine call: the model, and the ops of each step.

    `model`: the plan's model, or a model that passes its weights to ops with the names of their
    axes. `plain`: the implementations of ops other than attention, by name, for samplers. Calls
    are split over the devices of the plan's placement.
    """

    model: Model
    ops: OpsFactory
    plain: Mapping[str, Any]


def bind(plan: Plan) -> Bound:
    """Bind the implementations of a plan with the registered binder of the highest priority."""
    entry = plan.registry.first(
        "binder",
        "an engine, but no plugin binds the implementations of its ops",
        "a plugin that registers a binder, such as executor",
        "Install one, or add it to ENGINEBAY_PLUGINS.",
    )
    bound: Bound = plan.registry.run(entry, plan.kernels, plan.model, plan.placement)
    return bound
