"""Chooses how the weights of a model are stored: plain, quantised while they are loaded, or as the
checkpoint itself quantised them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from enginebay.config import NO_QUANTIZATION, EngineConfig, Reason
from enginebay.config_sections import AUTO
from enginebay.contracts.model import Checkpoint, Model
from enginebay.contracts.placement import Placement
from enginebay.errors import ConfigError, UnsupportedError
from enginebay.plugins.registry import Registry
from enginebay.weights import (
    FLOAT,
    Quantization,
    QuantizedArray,
    StoredArray,
    WeightFormat,
    WeightSpec,
    stored_bytes,
)


def choose_weight_format(
    registry: Registry,
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: Model,
    dtype: str,
    placement: Placement | None = None,
) -> tuple[WeightFormat, tuple[Reason, ...]]:
    """Return the weight format of a configuration, with plain weights of `dtype`, and the reasons.
    `placement`: None means one device.

    UnknownNameError for an unknown quantisation. UnsupportedError for a model without weights that
    may be quantised, and for a second quantisation of a checkpoint that is quantised. ConfigError
    for rounded activations without quantised weights.
    """
    form, why = _quantized(registry, config, checkpoint, model, dtype)
    rounding = config.activation_quantization
    inputs = FLOAT if rounding == NO_QUANTIZATION else rounding
    changed = {
        path: dataclasses.replace(one, activations=inputs)
        for path, one in form.quantized.items()
        if rounding != AUTO and (inputs == FLOAT or _is_whole(one))
    }
    if not changed and inputs not in (AUTO, FLOAT):
        raise ConfigError(
            f"activation_quantization = {rounding!r} with weights stored as {form}",
            "rounded inputs only for weights that are quantised to whole numbers",
            "Pass --quantization int8 or int4 too, or leave --activation-quantization out.",
        )
    quantized = {**form.quantized, **changed}
    if placement is not None:
        quantized = {path: _divisible(one, placement) for path, one in quantized.items()}
    form = dataclasses.replace(form, quantized=quantized)
    if rounded := ", ".join(sorted(form.needs["activation_quantizations"])):
        by = "the checkpoint's own" if rounding == AUTO else "chosen by name"
        why = (*why, Reason("activation_quantization", rounded, by))
    return form, why


def _divisible(weight: QuantizedArray, placement: Placement) -> QuantizedArray:
    """Return the weight with smaller groups if its own cannot be split over the devices. A group is
    on one device, and parts of a group may have the scale of the whole group.
    """
    scales: StoredArray = weight.scales
    *outputs, groups = scales.spec.shape
    shards = placement.num_shards(scales.spec.axes[-1])
    more = groups * shards // math.gcd(groups, shards)
    if more == groups or math.prod(weight.values.spec.shape[len(outputs) :]) % more:
        return weight
    spec = WeightSpec((*outputs, more), scales.spec.axes)
    finer = dataclasses.replace(scales, spec=spec)
    points = None if weight.zero_points is None else finer
    return dataclasses.replace(weight, scales=finer, zero_points=points)


def _is_whole(weight: QuantizedArray) -> bool:
    return bool(jnp.issubdtype(jnp.dtype(weight.values.dtype), jnp.integer))


def _quantized(
    registry: Registry, config: EngineConfig, checkpoint: Checkpoint, model: Model, dtype: str
) -> tuple[WeightFormat, tuple[Reason, ...]]:
    own, choice = checkpoint.quantization, config.quantization
    name = own if choice.name == AUTO else choice.name
    if name == NO_QUANTIZATION:
        why = () if own == name else (Reason("quantization", name, f"chosen by name, not {own}"),)
        return WeightFormat(dtype), why
    if own not in (NO_QUANTIZATION, name):
        raise UnsupportedError(
            f"quantization = {name!r} for a checkpoint that is stored as {own}",
            f"auto, {own}, or none, which dequantises its weights",
            "Leave --quantization out, or choose a checkpoint that is not quantised.",
        )
    quantization: Quantization | None = None
    if own == NO_QUANTIZATION:
        entry = registry.find("quantization", name)
        options = registry.options(entry, choice.options)
        target = registry.load(entry)
        made: Quantization = target() if options is None else target(options)
        found = {
            path: made.arrays(spec)
            for path, spec in model.weight_specs().items()
            if spec.num_inputs is not None
        }
        quantized = {path: one for path, one in found.items() if one is not None}
        quantization = made
    else:
        quantized = dict(checkpoint.quantized_weights(model))
    if not quantized:
        raise UnsupportedError(
            f"quantization = {name!r} for a model of family {model.info.family!r}, none of whose "
            "weights is quantised by it (a weight with `num_inputs` may be)",
            "a model whose family sets num_inputs of the weights that may be quantised",
            "Leave --quantization out.",
        )
    by = "the checkpoint's own" if choice.name == AUTO else "chosen by name"
    why = (Reason("quantization", name, f"{by}; {_saving(model, quantized, dtype)}"),)
    return WeightFormat(dtype, quantized, name, quantization), why


def _saving(model: Model, quantized: Mapping[str, QuantizedArray], dtype: str) -> str:
    """Return the bytes of the quantised weights, and those of plain ones, in words."""
    specs = model.weight_specs()
    few = sum(stored_bytes(a.spec.shape, a.dtype) for a in jax.tree.leaves(dict(quantized)))
    plain = sum(stored_bytes(specs[path].shape, dtype) for path in quantized)
    counts = collections.Counter(one.method for one in quantized.values())
    how = ", ".join(f"{count} as {method}" for method, count in counts.most_common())
    sizes = f"{few / 2**20:.1f} MiB in place of {plain / 2**20:.1f} in {dtype}"
    return f"{len(quantized)} weights ({how}) take {sizes}"
