"""Another size for the cache that a runner has, what is in it kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from enginebay.cache import KVLayout
from enginebay.runner.runner import Runner
from enginebay.runner.step import StepState


def resize_cache(
    runner: Runner,
    layouts: Mapping[str, KVLayout],
    resize: Callable[[jax.Array, KVLayout, KVLayout], jax.Array],
) -> None:
    """Replace the runner's cache by one of `layouts` (by group), layer by layer, so that only one
    layer exists twice.

    `resize` gets an array, its layout and the new one, and returns the array of the new size.
    """
    state = runner.state
    rows, processor_state = state.rows, state.processor_state
    remaining = {group: list(layers) for group, layers in state.cache.items()}
    runner.state = (
        None  # neither the runner nor this frame may hold the old layers while new ones are made
    )
    del state
    cache = {}
    for group, layers in remaining.items():
        old, new = runner.layouts[group], layouts[group]
        where = runner.placement.cache(new)
        resized = []
        while layers:
            layer = dict(layers.pop(0))
            resized.append(
                {n: jax.device_put(resize(layer.pop(n), old, new), where[n]) for n in list(layer)}
            )
        cache[group] = tuple(resized)
    runner.layouts = dict(layouts)
    runner.state = StepState(cache, rows, processor_state)
