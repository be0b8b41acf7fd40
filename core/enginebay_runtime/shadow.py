"""Shadow mode: on a share of the live steps, a candidate runs on copies beside the chosen
implementation.

It does not change what the live step reads or returns. Before a sampled step is launched, a
separate program computes the queries, keys and values of each layer. Then, layer by layer, both
implementations attend to them over a copy of the pages of the step's rows, one after the other, and
are timed. For another op, a program compares both implementations at every call of the model; then
the model runs with each of them, and is timed. The live step runs the same program as without
shadow mode.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.commands import Step
from enginebay.contracts.executor import Layouts, OpsFactory, ShadowParts
from enginebay.contracts.model import Model
from enginebay.contracts.step_key import StepKey
from enginebay.errors import error_line
from enginebay.memory_maps import require_maps
from enginebay.ops.key_centers import with_center
from enginebay.shadow_report import LayerDifference, ShadowPhase, ShadowReport
from enginebay_runtime.shadow_steps import (
    ShadowCacheForm,
    attend_over_copy,
    capture,
    compare_calls,
    compare_outputs,
    first_inputs,
    hidden_states,
)
from enginebay_runtime.view import ExecutorView

log = logging.getLogger("enginebay_runtime")

MAX_TIMES = 1024
"""Medians are taken of this many latest steps."""


class _Phase:
    """Counts and times of one phase."""

    def __init__(self) -> None:
        self.num_steps = self.num_compared = 0
        self.times: collections.deque[tuple[float, float]] = collections.deque(maxlen=MAX_TIMES)

    def median(self, side: int) -> float:
        """The median of the seconds that one side's steps took."""
        times = list(self.times)
        return statistics.median(pair[side] for pair in times) if times else math.nan


class Shadow:
    """Compares a candidate with the chosen implementation. Belongs to the executor's thread."""

    def __init__(self, parts: ShadowParts) -> None:
        self.parts = parts
        self._phases = {phase: _Phase() for phase in parts.chosen}
        self._layers: dict[tuple[str, str, int], LayerDifference] = {}
        self._programs: dict[Any, Any] = {}
        self._failed: set[StepKey] = set()
        self._num_failed = 0
        self._error: str | None = None

    def watch(self, executor: ExecutorView, step: Step, tables: Mapping[str, np.ndarray]) -> None:
        """Called before a step is launched, with the page tables of its rows, int32 [S, P] by
        group. The first step of each phase is sampled, and then every 1/share-th.

        A sampled step waits for the device. An error is reported in the ShadowReport, and that
        program is not tried again.
        """
        key = step.program
        phase = self._phases.get(key.bucket.mode)
        if phase is None:
            return
        number = phase.num_steps
        phase.num_steps += 1
        if number and int(number * self.parts.share) == int((number - 1) * self.parts.share):
            return
        if key in self._failed:
            return
        try:
            self._compare(executor, step, tables, phase)
        except Exception as error:  # a candidate's error must not end the live step
            log.info("shadow %s failed on %s", self.parts.name, key, exc_info=True)
            self._failed.add(key)
            self._num_failed += 1
            self._error = self._error or f"{key}: {error_line(error)}"

    def report(self) -> ShadowReport:
        """The comparisons so far. Any thread may call this."""
        phases = tuple(
            ShadowPhase(
                name, self.parts.chosen[name], p.num_steps, p.num_compared, p.median(0), p.median(1)
            )
            for name, p in self._phases.items()
        )
        layers = tuple(self._layers.values())
        parts = self.parts
        return ShadowReport(
            op=parts.op,
            name=parts.name,
            share=parts.share,
            phases=phases,
            layers=layers,
            num_failed=self._num_failed,
            error=self._error,
        )

    def _compare(
        self,
        executor: ExecutorView,
        step: Step,
        row_tables: Mapping[str, np.ndarray],
        phase: _Phase,
    ) -> None:
        key, layouts, bucket = step.program, dict(executor.layouts), step.program.bucket
        forms = (
            ShadowCacheForm.of(layouts, bucket, compact=key.kind == "compact"),
            ShadowCacheForm.of(
                layouts, bucket, compact=self.parts.compact_decode and bucket.mode == "decode"
            ),
        )
        factories = (executor.parts.ops, self.parts.ops)
        tables = {group: jnp.asarray(table) for group, table in row_tables.items()}
        run = functools.partial(self._run, executor, (key, tuple(layouts.items())))
        given = (executor.model_weights, executor.state, first_inputs(step), tables)
        model = executor.parts.model
        if self.parts.op != "attention":
            self._compare_op(run, model, factories, (layouts, forms[0]), given, phase)
            return
        capturing = functools.partial(capture, model, factories[0], layouts, forms[0])
        captured, q_lens, kv_lens = run("capture", capturing, given)[0]
        totals = [0.0, 0.0]
        for group, layers in captured.items():
            spec = executor.info.attention[group].called
            for layer, qkv in enumerate(layers):
                outs = []
                for side, (form, make_ops) in enumerate(zip(forms, factories, strict=True)):
                    cache = executor.state.cache[group][layer]
                    cache = with_center(cache, executor.model_weights, group, layer)
                    copying = functools.partial(form.copy, layouts, group)
                    copy, _ = run(("copy", side, group), copying, (cache, tables[group]))
                    attending = functools.partial(attend_over_copy, make_ops, form, group, spec)
                    (_, out), seconds = run(
                        ("attend", side, group),
                        attending,
                        (copy, qkv, q_lens, kv_lens),
                        donated=(0,),
                    )
                    totals[side] += seconds
                    outs.append(out)
                self._note(bucket.mode, group, layer, compare_outputs(*outs))
        phase.times.append((totals[0], totals[1]))
        phase.num_compared += 1

    def _compare_op(
        self,
        run: Callable[..., tuple[Any, float]],
        model: Model,
        factories: tuple[OpsFactory, OpsFactory],
        copies: tuple[Layouts, ShadowCacheForm],
        given: tuple[Any, ...],
        phase: _Phase,
    ) -> None:
        """Compare both implementations at each call of the model, and time the model with each."""
        op, mode = self.parts.op, copies[1].bucket.mode
        comparing = functools.partial(compare_calls, op, model, *factories, *copies)
        (calls, num_tokens), _ = run("compare", comparing, given)
        for number, (off, relative, bad) in enumerate(np.asarray(calls)):
            self._note(mode, op, number, (off, relative, bad, 0, num_tokens))
        seconds = []
        for side, make_ops in enumerate(factories):
            whole = functools.partial(hidden_states, model, make_ops, *copies)
            seconds.append(run(("model", side), whole, given)[1])
        phase.times.append((seconds[0], seconds[1]))
        phase.num_compared += 1

    def _run(
        self,
        executor: ExecutorView,
        key: Any,
        what: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        donated: tuple[int, ...] = (),
    ) -> tuple[Any, float]:
        """The function's result and its seconds. The function is compiled once per key and
        `what`.
        """
        program = self._programs.get((key, what))
        if program is None:
            require_maps(f"a shadow's program for {key}")
            lowered = jax.jit(function, donate_argnums=donated).lower(*args)
            program = lowered.compile(compiler_options=executor.compile_options)
            self._programs[key, what] = program
        began_s = time.perf_counter()
        result = jax.block_until_ready(program(*args))
        return result, time.perf_counter() - began_s

    def _note(self, phase: str, group: str, layer: int, found: tuple[Any, ...]) -> None:
        off, relative, bad, others, tokens = (np.asarray(x).item() for x in found)
        new = LayerDifference(
            phase=phase,
            group=group,
            layer=layer,
            absolute=off,
            relative=relative,
            num_nonfinite=int(bad),
            num_cache_differences=int(others),
            num_tokens=int(tokens),
        )
        old = self._layers.get((phase, group, layer))
        self._layers[phase, group, layer] = new if old is None else _joined(old, new)


def _joined(old: LayerDifference, new: LayerDifference) -> LayerDifference:
    """Combine the differences of several steps of one layer."""
    return dataclasses.replace(
        old,
        absolute=max(old.absolute, new.absolute),
        relative=max(old.relative, new.relative),
        num_nonfinite=old.num_nonfinite + new.num_nonfinite,
        num_cache_differences=old.num_cache_differences + new.num_cache_differences,
        num_tokens=old.num_tokens + new.num_tokens,
    )
