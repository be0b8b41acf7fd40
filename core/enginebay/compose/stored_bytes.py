"""Counts the bytes that a configuration stores, beside those of the model without quantisation."""

from __future__ import annotations

import dataclasses
import math

from enginebay.compose.plan import Plan
from enginebay.contracts.executor import weight_bytes
from enginebay.ops.spec import AttnSpec
from enginebay.weights import WeightFormat, stored_bytes

_TOKENS = 256
"""Tokens of the cache whose bytes are counted, or one page where that is larger."""


@dataclasses.dataclass(frozen=True)
class StoredBytes:
    """Bytes on each device of the weights, and of a token in the caches of all layers. The plain
    ones are those of the same configuration with no quantised weight or cache.
    """

    weights: int
    plain_weights: int
    cache_of_token: float
    plain_cache_of_token: float


def count_stored_bytes(plan: Plan) -> StoredBytes:
    """Count the bytes of a plan. Recurrent states, which do not grow with tokens, are left out."""
    form = plan.weight_format
    specs = plan.model.info.attention
    return StoredBytes(
        weights=weight_bytes(plan.model, plan.placement, form),
        plain_weights=weight_bytes(plan.model, plan.placement, WeightFormat(form.dtype)),
        cache_of_token=sum(_token_bytes(plan, name, spec) for name, spec in specs.items()),
        plain_cache_of_token=sum(
            _token_bytes(plan, name, spec.called) for name, spec in specs.items()
        ),
    )


def _token_bytes(plan: Plan, name: str, spec: AttnSpec) -> float:
    """Return the bytes of a token in all layers of a cache group."""
    layers = {group.name: group.num_layers for group in plan.model.info.groups}[name]
    page_size = plan.kernels.smallest_page or _TOKENS
    num_pages = max(1, _TOKENS // page_size)
    layout = spec.make_layout(plan.kernels.layout_type, num_pages, page_size)
    axes = layout.logical_axes()
    total = sum(
        stored_bytes(one.shape, one.dtype) // math.prod(map(plan.placement.num_shards, axes[array]))
        for array, one in layout.shapes().items()
    )
    return layers * total / (num_pages * page_size)
