"""Compiles a whole decode or mixed step for devices that need not be present, with shapes in place
of weights and cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.compose.binding import OpsBinder, bound_ops
from enginebay.compose.composition import find_family, make_sampler
from enginebay.compose.kernels import ChosenKernels, choose_kernels
from enginebay.compose.partition import split_model
from enginebay.compose.resolve import pick
from enginebay.config import EngineConfig
from enginebay.config_sections import PHASES, Choice
from enginebay.contracts.cache import CacheLayout, KVLayout
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.cache_state import StateLayout
from enginebay.contracts.commands import DecodeInputs, PrefillInputs
from enginebay.contracts.engine import AttentionProblem
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.model import Model, with_cache_dtypes, with_info
from enginebay.contracts.placement import Placement, make_placement
from enginebay.contracts.step_key import StepKey
from enginebay.ops import prefill_columns as columns
from enginebay.ops.caps import Caps, Env
from enginebay.ops.select import Candidate
from enginebay.ops.spec import Bucket
from enginebay.plugins.registry import Registry
from enginebay.weights import QuantizedArray, StoredArray, WeightFormat, WeightSpec, stored_bytes
from enginebay_runtime.device import DeviceRows
from enginebay_runtime.prefill import forward_step
from enginebay_runtime.step import StepState, decode_step
from enginebay_testing.toolchains import CompileReport, KernelCompiler

TENSOR = "tensor"
"""The mesh axis over which weights and heads are split."""


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Sizes of a decode step: rows, max tokens per row, tokens per page, pages of the cache, and
    tokens per call. `cache_dtype` is a dtype or a storage of the cache; None: `dtype`.

    If `prefill_tokens` is not 0, the step is a mixed step of `prefill_tokens` tokens: some rows
    decode, and others compute chunks of prompts. It then has the program of a prefill, up to the
    logits.
    """

    rows: int = 32
    max_model_len: int = 4096
    page_size: int = 64
    num_pages: int = 32 * 64 + 1
    decode_steps: int = 16
    dtype: str = "bfloat16"
    prefill_tokens: int = 0
    cache_dtype: str | None = None

    @property
    def bucket(self) -> Bucket:
        """Return the bucket in which all rows have the max length."""
        pages = -(-self.max_model_len // self.page_size)
        num = self.prefill_tokens
        if num:
            return Bucket(num, self.rows, pages, num, self.max_model_len, "mixed")
        return Bucket(self.rows, self.rows, pages, 1, self.max_model_len, "decode")

    @property
    def inputs(self) -> PrefillInputs | DecodeInputs:
        """Return the inputs of a step of this shape, as shapes in place of arrays."""
        if not self.prefill_tokens:
            return DecodeInputs(_ints(self.rows), _ints())
        floats: Any = jax.ShapeDtypeStruct((self.rows, columns.NUM_FLOAT_COLUMNS), jnp.float32)
        ints = _ints(self.rows, columns.NUM_INT_COLUMNS)
        return PrefillInputs(_ints(self.prefill_tokens), ints, floats)

    def layouts(self, kind: type[KVLayout], model: Model) -> dict[str, KVLayout]:
        """Return the layout of each cache group."""
        return {
            group: dataclasses.replace(spec, kv_dtype=self.dtype).make_layout(
                kind, self.num_pages, self.page_size
            )
            for group, spec in model.info.attention.items()
        }

    def states(self, model: Model) -> dict[str, StateLayout]:
        """Return the layout of each group with a recurrent state: one place per row, and four times
        as many snapshots.
        """
        places = CacheShape(1, 1 + 5 * self.rows, self.max_model_len)
        return {one.name: one.make_layout(places) for one in model.info.states}


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The compiler's report, the names of the kernels in the program, and the bytes of cache and
    weights on one device.
    """

    compiled: CompileReport
    kernels: Mapping[str, str]
    cache_bytes: int
    weight_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """A model's step on a placement, with shapes only."""

    model: Model
    parts: EngineParts
    placement: Placement
    layouts: Mapping[str, CacheLayout]
    shape: DecodeShape
    weight_format: WeightFormat

    def weights(self) -> dict[str, Any]:
        """Return the weights as shapes; a quantised one has several arrays."""

        def weight(path: str, spec: WeightSpec) -> Any:
            def array(one: StoredArray) -> jax.ShapeDtypeStruct:
                where = self.placement.weight(path, one.spec)
                return self._array(one.spec.shape, jnp.dtype(one.dtype), where)

            return jax.tree.map(array, self.weight_format.stored(path, spec))

        return {path: weight(path, spec) for path, spec in self.model.weight_specs().items()}

    def state(self) -> StepState:
        cache: dict[str, Any] = {  # shapes in place of arrays
            group.name: tuple(
                self._layer(self.layouts[group.name]) for _ in range(group.num_layers)
            )
            for group in self.model.info.cache_groups
        }
        empty = functools.partial(DeviceRows.empty, self.shape.rows, self.shape.max_model_len)
        whole = self.placement.replicated
        rows = jax.tree.map(lambda a: self._array(a.shape, a.dtype, whole), jax.eval_shape(empty))
        return StepState(cache, rows)

    def _layer(self, layout: CacheLayout) -> dict[str, jax.ShapeDtypeStruct]:
        where = self.placement.cache(layout)
        return {
            name: self._array(s.shape, s.dtype, where[name]) for name, s in layout.shapes().items()
        }

    def _array(self, shape: Sequence[int], dtype: Any, where: Any) -> jax.ShapeDtypeStruct:
        on_mesh = self.placement.mesh is not None
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=where if on_mesh else None)

    def __call__(self, weights: Any, state: StepState, inputs: Any, pages: Any) -> Any:
        """Run the step; the returned state has the shape of the given one, so that donated arrays
        are reused. `pages`: the pages of the rows by cache group.
        """
        made: dict[str, Any] = {
            "parts": self.parts,
            "layouts": dict(self.layouts),
            "key": StepKey("prefill" if self.shape.prefill_tokens else "decode", self.shape.bucket),
            "pages": pages,
        }
        if self.shape.prefill_tokens:
            after, *sampled = forward_step(weights, state, {}, inputs, **made)
        else:
            steps = self.shape.decode_steps
            after, *sampled = decode_step(weights, state, {}, inputs, max_steps=steps, **made)
        if self.placement.mesh is not None:
            after = jax.tree.map(
                lambda array, before: jax.lax.with_sharding_constraint(array, before.sharding),
                after,
                self.state(),
            )
        return after, sampled


def compile_decode_step(
    registry: Registry,
    model_config: Mapping[str, Any],
    compiler: KernelCompiler,
    target: str,
    *,
    num_devices: int = 1,
    shape: DecodeShape | None = None,
    config: EngineConfig | None = None,
    quantize: Callable[[WeightSpec], QuantizedArray] | None = None,
) -> StepReport:
    """Compile the whole step of a `shape` for a target, over `num_devices` devices, for the model
    of a config.json.

    `quantize` returns the StoredArrays of a weight that may be quantised; None: all weights are
    plain. Kernels are chosen as `config` says and as on the device. Exceptions of the compiler are
    passed on, such as for a model that does not fit into the device's memory.
    """
    shape, config = shape or DecodeShape(), _with_a_sampler(registry, config or EngineConfig())
    devices = compiler.devices(target, num_devices)
    placement = make_placement(devices, {TENSOR: num_devices}, config.rules())
    family = find_family(registry, model_config["architectures"][0])
    shards = placement.num_shards("kv_heads")
    model = family.build(
        model_config, dtype=shape.dtype, num_shards=shards, max_model_len=shape.max_model_len
    )
    if shape.cache_dtype is not None:
        stored = dict.fromkeys(model.info.attention, shape.cache_dtype)
        model = with_info(model, with_cache_dtypes(model.info, stored))
    quantized = {
        path: quantize(spec)
        for path, spec in model.weight_specs().items()
        if quantize is not None and spec.num_inputs is not None
    }
    weight_format = WeightFormat(shape.dtype, quantized)
    env = Env(compiler.platform, target)
    kernels = _kernels(
        registry,
        config,
        env,
        model=model,
        placement=placement,
        shape=shape,
        weight_format=weight_format,
    )
    parts = EngineParts(
        config=config.model_copy(update={"mixed_steps": "on"}),
        model=split_model(model, placement),
        platform=registry.load(registry.find("platform", env.platform))(),
        placement=placement,
        weight_format=weight_format,
        layout=kernels.layout,
        layout_type=kernels.layout_type,
        ops=OpsBinder(kernels, model.info, placement),
        sampler=make_sampler(registry, config, bound_ops(kernels, placement)),
    )
    pages, places = shape.layouts(kernels.layout_type, model), shape.states(model)
    step = _Step(model, parts, placement, {**pages, **places}, shape, weight_format)
    tables = dict.fromkeys(pages, _ints(shape.rows, shape.bucket.pages_per_seq))
    tables |= dict.fromkeys(places, _ints(shape.rows, 1))
    held = (step.weights(), step.state())
    arguments = (*held, shape.inputs, tables)
    report = compiler.compile(step, arguments, target=target, donated=(1,), num_devices=num_devices)
    return StepReport(
        report, kernels.names, _bytes(held[1].cache, num_devices), _bytes(held[0], num_devices)
    )


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _with_a_sampler(registry: Registry, config: EngineConfig) -> EngineConfig:
    found = (e for e in registry.entries if e.kind == "sampler" and e.state == "ready")
    facts = [Candidate(e.name, e.priority, built_in=e.built_in) for e in found]
    name = pick("sampler", config.sampler.name, facts).chosen
    return config.model_copy(update={"sampler": Choice(name=name, options=config.sampler.options)})


def _kernels(
    registry: Registry,
    config: EngineConfig,
    env: Env,
    model: Model,
    placement: Placement,
    shape: DecodeShape,
    weight_format: WeightFormat,
) -> ChosenKernels:
    default = registry.load(registry.find("platform", env.platform)).default_layout

    def steps(
        layout: str, layout_type: type[KVLayout], free_padding_rows: int, decode: Caps
    ) -> list[AttentionProblem]:
        layouts = shape.layouts(layout_type, model)
        return [(dataclasses.replace(shape.bucket, mode=phase), layouts) for phase in PHASES]

    return choose_kernels(
        registry,
        config,
        env,
        info=model.info,
        placement=placement,
        default_layout=default,
        steps=steps,
        needs=weight_format.needs,
    )


def _bytes(tree: Any, num_devices: int) -> int:
    """Return the bytes of a tree of shapes that are on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        local = leaf.shape if num_devices == 1 else leaf.sharding.shard_shape(leaf.shape)
        total += stored_bytes(local, leaf.dtype)
    return total
