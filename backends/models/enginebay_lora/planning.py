"""Gives a plan slots for adapters, as its configuration asks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from enginebay.compose.plan import Plan
from enginebay.config import EngineConfig, Reason
from enginebay.config_sections import AUTO
from enginebay.errors import ConfigError, UnsupportedError
from enginebay_lora.layers import adapted_layers, by_module
from enginebay_lora.model import LoraModel
from enginebay_lora.store import LoraStore, SlotLimits


def with_adapters(plan: Plan) -> Plan:
    """Return the plan with a model that has slots for adapters, and with the adapters of the option
    `lora` loaded. A configuration without slots leaves the plan as it is.

    Raises ConfigError for settings that do not fit each other, UnsupportedError for a model without
    linear layers that may have adapters, and CheckpointError for an adapter that cannot be used.
    """
    config, num_slots = plan.config, plan.config.lora_slots
    _check(config)
    if not num_slots:
        return plan
    targets = None if config.lora_targets == AUTO else config.lora_targets
    layers = adapted_layers(plan.model, num_slots, config.max_lora_rank, targets)
    if not layers:
        raise UnsupportedError(
            f"adapters with lora_targets = {config.lora_targets!r} for a model of family "
            f"{plan.model.info.family!r}",
            "targets that name linear layers of the model",
            "Correct lora_targets, or leave it out.",
        )
    parts = by_module(layers)
    limits = SlotLimits(num_slots, config.max_lora_rank, config.max_cpu_loras)
    store = LoraStore(layers, limits, jnp.dtype(plan.weight_format.dtype))
    for name, folder in config.lora.items():
        store.load(name, folder)
    why = f"for adapters of rank {config.max_lora_rank} at most, on {len(parts)} linear layers"
    reason = Reason("max_loras", str(num_slots), why)
    return dataclasses.replace(
        plan,
        model=LoraModel(plan.model, layers),
        adapters=store,
        reasons=(*plan.reasons, reason),
    )


def _check(config: EngineConfig) -> None:
    if config.lora and not config.lora_slots:
        raise ConfigError(
            f"lora = {config.lora!r} with max_loras = 0",
            "max_loras of at least 1, or unset",
            "Leave max_loras out: then each adapter of `lora` has a slot.",
        )
    if config.lora_slots and config.shadow:
        raise ConfigError(
            "shadow together with adapters",
            "one of the two: a shadow repeats steps without adapters",
            "Leave out shadow, or lora and max_loras.",
        )
