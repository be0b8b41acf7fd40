"""Capture: some live steps are repeated, and the arguments of the ops that they call are written
into a file (`CallTrace`).

It does not change what the live step reads or returns.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.config_sections import CaptureChoice
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.commands import Step
from enginebay.contracts.executor import Layouts, OpsFactory
from enginebay.contracts.model import Model
from enginebay.contracts.step_key import StepKey
from enginebay.errors import error_line
from enginebay.folders import make_writable
from enginebay.memory_maps import require_maps
from enginebay.ops.bound import Ops
from enginebay_runtime.call_trace import (
    CallTrace,
    TracedArray,
    TracedAttention,
    TracedCall,
    TracedStep,
)
from enginebay_runtime.recorded_calls import CallRecorder, RecordedCall
from enginebay_runtime.shadow_steps import ShadowCacheForm, first_inputs, run_model
from enginebay_runtime.view import ExecutorView

ATTENTION = "attention"

log = logging.getLogger("enginebay_runtime")


class Capture:
    """Writes the trace of some steps. Belongs to the executor's thread."""

    def __init__(self, choice: CaptureChoice, run: Mapping[str, str]) -> None:
        """`run`: what the file tells of the run."""
        self._choice, self._run = choice, run
        make_writable(Path(choice.file).parent, "the folder of capture.file")
        self._num_steps, self._is_over = 0, False
        self._steps: tuple[TracedStep, ...] = ()
        self._recorders: dict[Any, tuple[Any, OpsFactory]] = {}
        """Functions that record a step, each with the ops whose identity is in its key."""
        self._seen: set[StepKey] = set()
        self._failed: set[StepKey] = set()

    def watch(self, executor: ExecutorView, step: Step, tables: Mapping[str, np.ndarray]) -> None:
        """Called before a step is launched, with the page tables of its rows, int32 [S, P] by
        group. A captured step waits for the device. An error is logged, and steps of that program
        are not tried again; after one of the file, no step is.
        """
        number, key = self._num_steps, step.program
        self._num_steps += 1
        if self._is_over or key in self._failed or not self._chosen(number, key):
            return
        try:
            steps = (*self._steps, self._captured(executor, step, tables, number))
            CallTrace(self._run, executor.parts.layout, steps).write(Path(self._choice.file))
            self._steps = steps
        except Exception as error:  # noqa: BLE001  # it must not end the live step
            log.warning("capture of step %d (%s): %s", number, key, error_line(error))
            self._failed.add(key)
            self._is_over = isinstance(error, OSError)  # the next file would not be written either

    def _chosen(self, number: int, key: StepKey) -> bool:
        """Whether a step is captured: one of the chosen numbers, or without any the first step of
        each program and then every so manyth step.
        """
        choice = self._choice
        if len(self._steps) >= choice.max_steps:
            return False
        if choice.steps:
            return number in choice.steps
        is_first = key not in self._seen
        self._seen.add(key)
        return is_first or number % choice.every == 0

    def _captured(
        self,
        executor: ExecutorView,
        step: Step,
        row_tables: Mapping[str, np.ndarray],
        number: int,
    ) -> TracedStep:
        key, layouts, bucket = step.program, dict(executor.layouts), step.program.bucket
        form = ShadowCacheForm.of(layouts, bucket, compact=key.kind == "compact")
        run = self._recording(executor, key, layouts, form)
        tables = {group: jnp.asarray(table) for group, table in row_tables.items()}
        inputs = first_inputs(step)
        (q_lens, kv_lens), calls = run(executor.model_weights, executor.state, inputs, tables)
        shown = form if form.compact else dataclasses.replace(form, layouts=layouts, bucket=bucket)
        own_pages = np.arange(bucket.seqs, dtype=np.int32)[:, None]
        return TracedStep(
            number=number,
            bucket=shown.bucket,
            q_lens=np.asarray(q_lens),
            kv_lens=np.asarray(kv_lens),
            tables={
                group: own_pages if form.compact else np.asarray(table)
                for group, table in row_tables.items()
            },
            attention=_attention(executor, shown, calls),
            calls=_calls(executor, [c for c in calls if c.op != ATTENTION]),
        )

    def _recording(
        self, executor: ExecutorView, key: StepKey, layouts: Layouts, form: ShadowCacheForm
    ) -> Any:
        """Return the function that runs a step of a program and returns its calls."""
        model, make_ops = executor.parts.model, executor.parts.ops
        name = key, tuple(layouts.items()), id(make_ops)
        if name not in self._recorders:
            require_maps(f"a capture of {key}")
            ops = make_ops(form.bucket, form.layouts)
            keeps = _is_value if self._choice.values else _is_index
            recorder = CallRecorder(executor.compile_options, ops.shares_layers, keeps)
            wrapped = functools.partial(_wrapped, recorder, make_ops, self._choice.ops)
            step = functools.partial(_whole_step, model, wrapped, layouts, form)
            self._recorders[name] = recorder.recording(step), make_ops
        return self._recorders[name][0]


def _is_index(op: str, array: Any) -> bool:
    """Whether an array has indices or numbers of rows, which random numbers cannot stand for. Those
    of attention are in its step.
    """
    return op != ATTENTION and str(array.dtype) in ("int32", "bool")


def _is_value(op: str, array: Any) -> bool:
    return op != ATTENTION


def _wrapped(
    recorder: CallRecorder, make_ops: OpsFactory, chosen: Collection[str], *sizes: Any
) -> Ops:
    """Return ops whose calls are recorded, those of `chosen` alone if it is not empty."""

    def wrap(op: str, implementation: Any) -> Any:
        return recorder.wrap(op, implementation) if op in chosen or not chosen else implementation

    return make_ops(*sizes).wrapped(wrap)


def _whole_step(
    model: Model, make_ops: OpsFactory, layouts: Layouts, form: ShadowCacheForm, *given: Any
) -> tuple[jax.Array, jax.Array]:
    """Repeat a step up to its logits. Returns the rows' q_lens and kv_lens int32 [S]."""
    hidden, _, q_lens, kv_lens = run_model(model, make_ops, layouts, form, *given)
    if form.bucket.mode != "decode":
        hidden = hidden[jnp.maximum(jnp.cumsum(q_lens) - 1, 0)]
    ops = make_ops(form.bucket, form.layouts).of_rows(None)
    model.logits(given[0], ops, hidden.astype(model.info.hidden_dtype))
    return q_lens, kv_lens


def _attention(
    executor: ExecutorView, form: ShadowCacheForm, calls: Sequence[RecordedCall]
) -> tuple[TracedAttention, ...]:
    groups = {spec.called: group for group, spec in executor.info.attention.items()}
    found: collections.Counter[tuple[str, bool]] = collections.Counter()
    for call in calls:
        if call.op == ATTENTION:
            positional, keywords = call.arguments
            found[groups[keywords["spec"]], positional[1] is None] += 1
    kernel = executor.parts.kernels[f"attention.{form.bucket.mode}"]
    traced = []
    for (group, shared), num in found.items():
        layout, spec = form.layouts[group], executor.info.attention[group]
        assert isinstance(layout, KVLayout), "attention runs on groups of keys and values"
        spec = dataclasses.replace(spec, kv_shared=spec.kv_shared or shared)
        traced.append(TracedAttention(group, kernel, spec, layout.num_pages, layout.page_size, num))
    return tuple(traced)


def _calls(executor: ExecutorView, calls: Sequence[RecordedCall]) -> tuple[TracedCall, ...]:
    """Return the calls, of which equal ones are one record."""
    found: dict[Any, list[RecordedCall]] = {}
    for call in calls:
        numbers = tuple(np.asarray(x).tobytes() for x in call.arrays if isinstance(x, jax.Array))
        found.setdefault((call.op, call.form, numbers), []).append(call)
    traced = []
    for same in found.values():
        first = same[0]
        positional, keywords = first.form.arguments([_traced_array(x) for x in first.arrays])
        kernel = executor.parts.kernels.get(first.op, "its parts")
        traced.append(TracedCall(first.op, kernel, positional, keywords, len(same)))
    return tuple(traced)


def _traced_array(array: Any) -> TracedArray:
    values = np.asarray(array) if isinstance(array, jax.Array) else None
    return TracedArray(tuple(array.shape), str(array.dtype), values)
