"""The bytes per second that decode steps read, and the rate that the machine's memory reaches."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from enginebay.compose.plan import Plan
from enginebay.contracts.cache import CacheLayout
from enginebay.serving.observer import Execution
from enginebay.weights import stored_bytes
from enginebay_bench.roofline import measure_reads

log = logging.getLogger("enginebay.server")

WINDOW_S = 60.0
NUM_STEPS = 256
PAGE = 64
"""Tokens of a page of the layout from which the bytes of a cached token are computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassBytes:
    """The bytes that one pass of a decode step must read on each device: weights, and the cached
    keys, values and states of its rows.

    A pass reads of the embedding table only the rows of its tokens, which are not counted, unless
    the table is also the head. It reads at most `experts_per_row` experts of a layer for each row;
    without a number it counts all experts.
    """

    weights: float
    experts: float
    num_experts: int
    experts_per_row: int | None
    groups: Sequence[tuple[float, float]]
    """Bytes of a cached token in all layers of a cache group, and the group's window or inf."""
    row_states: float
    """Bytes of a row's recurrent states."""

    @staticmethod
    def of(plan: Plan) -> PassBytes:
        """Return the bytes for the model, the layouts and the weight format of a plan."""
        info, placement, specs = plan.model.info, plan.placement, plan.model.weight_specs()

        def on_device(shape: Sequence[int], dtype: str, axes: Sequence[str | None]) -> int:
            return stored_bytes(shape, dtype) // math.prod(map(placement.num_shards, axes))

        def of_layer(layout: CacheLayout) -> int:
            axes = layout.logical_axes()
            shapes = layout.shapes().items()
            return sum(on_device(one.shape, one.dtype, axes[name]) for name, one in shapes)

        sizes: dict[str | None, list[int]] = {}  # of each weight, by its first axis
        for path, spec in specs.items():
            arrays = jax.tree.leaves(plan.weight_format.stored(path, spec))
            size = sum(on_device(one.spec.shape, one.dtype, one.spec.axes) for one in arrays)
            sizes.setdefault(spec.axes[0], []).append(size)
        experts, tables = sum(sizes.pop("expert", ())), sizes.pop("vocab", [0])
        counts = [spec.shape[0] for spec in specs.values() if spec.axes[0] == "expert"]
        chosen = plan.checkpoint.config.get("num_experts_per_tok")
        layouts = {
            name: spec.make_layout(plan.kernels.layout_type, 1, PAGE)
            for name, spec in info.attention.items()
        }
        return PassBytes(
            weights=sum(map(sum, sizes.values())) + tables[-1],
            experts=experts,
            num_experts=max(counts, default=1),
            experts_per_row=chosen if isinstance(chosen, int) else None,
            groups=[
                (
                    group.num_layers * of_layer(layouts[group.name]) / PAGE,
                    math.inf if group.window is None else group.window,
                )
                for group in info.groups
            ],
            row_states=sum(
                group.num_layers * on_device(one.shape, one.dtype, one.axes)
                for group in info.states
                for one in group.arrays
            ),
        )

    def of_passes(self, num_passes: int, num_cached: Sequence[int]) -> float:
        """Return the bytes of the passes of a step: row i has num_cached[i] tokens in the cache
        before it, and one more after each pass.
        """
        rows, experts = len(num_cached), 1.0
        if self.experts_per_row is not None:
            experts = min(1.0, rows * self.experts_per_row / self.num_experts)
        lengths = np.asarray(num_cached, float) + (num_passes + 1) / 2  # the mean of the passes
        cache = sum(size * np.minimum(lengths, window).sum() for size, window in self.groups)
        read = self.weights + experts * self.experts + rows * self.row_states + float(cache)
        return num_passes * read


class DecodeRate:
    """The rate at which the latest decode steps read. `add` runs on the engine's thread and the
    property on any thread. Verify steps are left out.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pass_bytes: PassBytes | None = None
        self._steps: deque[tuple[float, float, int, Sequence[int]]] = deque(maxlen=NUM_STEPS)

    def add(self, execution: Execution) -> None:
        """Record a step, if it is a decode."""
        if execution.num_passes and execution.plan is not None:
            lengths = [row.num_computed for row in execution.plan.rows]
            step = (execution.at_s, execution.execute_s, execution.num_passes, lengths)
            self._steps.append(step)

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of the last minute's decode steps, while they ran; at most 256 steps
        count. 0 without a step.
        """
        since_s = time.monotonic() - WINDOW_S
        steps = [step for step in list(self._steps) if step[0] >= since_s]
        if not steps:
            return 0.0
        self._pass_bytes = self._pass_bytes or PassBytes.of(self._plan)
        read = sum(self._pass_bytes.of_passes(passes, lengths) for _, _, passes, lengths in steps)
        return read / max(1e-9, sum(step[1] for step in steps))


class MemoryRoofline:
    """The measured read rate of each device of this process. Thread-safe."""

    def __init__(self) -> None:
        self._rates: dict[tuple[Any, ...], float | None] = {}
        self._lock = threading.Lock()

    def known(self, plan: Plan) -> float | None:
        """Return the bytes per second of a plan's device; None if they are not measured."""
        return self._rates.get(_key(plan))

    def measure(self, plan: Plan) -> None:
        """Measure the device of a plan, unless that was done. Takes up to a second, in which other
        work on the device makes the figure too low.
        """
        key = _key(plan)
        with self._lock:
            if key in self._rates:
                return
            try:
                rate = measure_reads(plan.placement.device, plan.platform.compile_options())
            except jax.errors.JaxRuntimeError as error:  # no memory is left
                log.warning("the read rate of %s was not measured: %s", key[0], error)
                rate = None
            self._rates[key] = rate


def _key(plan: Plan) -> tuple[Any, ...]:
    return plan.placement.device, tuple(sorted(plan.platform.compile_options().items()))


ROOFLINE = MemoryRoofline()
"""The measurements of this process."""
