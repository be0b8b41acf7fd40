"""Products with quantised weights, as tests of kernels for GPUs and TPUs check them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.config import EngineConfig
from enginebay.ops.activations import rounded_rows
from enginebay.plugins.registry import load_registry
from enginebay.weights import FLOAT, QuantizedArray, WeightSpec
from enginebay_models.quantized_tensors import QuantizedForm
from enginebay_testing import oracle
from enginebay_testing.cross_compile import DecodeShape, StepReport, compile_decode_step
from tests.unit.pallas.test_pallas_step import LLAMA_8B

DTYPES = {
    "int8": "int8",
    "int8_group": "int8",
    "int4": "int4",
    "uint4": "uint4",
    "fp8": "float8_e4m3fn",
}


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of weights: the method, how many inputs have a scale (None: all), the dtype of scales,
    and how inputs are rounded.
    """

    method: str
    share: int | None = None
    has_points: bool = False
    scale_dtype: str = "float32"
    activations: str = FLOAT

    def __str__(self) -> str:
        points = "_points" if self.has_points else ""
        rounded = "" if self.activations == FLOAT else "_rounded"
        return f"{self.method}_{self.share or 'all'}{points}_{self.scale_dtype}{rounded}"

    def shapes(self, *shape: int) -> QuantizedArray:
        """The arrays of a weight [*outputs, inputs] as shapes."""
        factors = jax.ShapeDtypeStruct(
            (*shape[:-1], shape[-1] // (self.share or shape[-1])), jnp.dtype(self.scale_dtype)
        )
        values = jax.ShapeDtypeStruct(shape, jnp.dtype(DTYPES[self.method]))
        points = factors if self.has_points else None
        return QuantizedArray(values, factors, points, self.method, self.activations)

    def weight(self, rng: np.random.Generator, *shape: int) -> QuantizedArray:
        """A weight [*outputs, inputs] with all values of its dtype."""
        arrays = self.shapes(*shape)
        low, high = {"int4": (-8, 8), "uint4": (0, 16)}.get(self.method, (-127, 128))
        values = rng.integers(low, high, size=shape)
        if self.method == "fp8":
            every = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
            values = rng.choice(every[np.isfinite(every.astype(np.float32))], size=shape)
        scales = (rng.random(arrays.scales.shape) + 0.1).astype(self.scale_dtype)
        points = None
        if self.has_points:
            points = (15 * rng.random(scales.shape)).astype(self.scale_dtype)
        return dataclasses.replace(
            arrays, values=values.astype(arrays.values.dtype), scales=scales, zero_points=points
        )


FORMS = (
    Form("int8"),
    Form("int8", activations="int8"),
    Form("int8_group", 32, scale_dtype="float16"),
    Form("int8_group", 128, has_points=True, activations="int8"),
    Form("int4", 128),
    Form("int4", 32, scale_dtype="float16", activations="int8"),
    Form("uint4", 64, has_points=True),
    Form("uint4", 128, has_points=True, scale_dtype="float16", activations="int8"),
    Form("fp8"),
    Form("fp8", activations="int8"),
)
QUICK = (FORMS[5], FORMS[6], FORMS[8])


def exact(x: np.ndarray, weight: QuantizedArray) -> tuple[np.ndarray, np.ndarray]:
    """The f64 products of x [T, inputs], and the sums of their absolute terms."""
    wide = np.asarray(weight.values).astype(np.float64).reshape(*weight.scales.shape, -1)
    magnitudes = np.abs(wide)
    if weight.zero_points is not None:
        points = np.asarray(weight.zero_points, np.float64)[..., None]
        wide, magnitudes = wide - points, magnitudes + points
    scales = np.asarray(weight.scales, np.float64)[..., None]
    if weight.activations != FLOAT:
        values, of_rows = (np.asarray(each, np.float64) for each in jax.jit(rounded_rows)(x))
        x = values * of_rows
    wide, magnitudes = ((each * scales).reshape(weight.shape) for each in (wide, magnitudes))
    return oracle.linear(x, wide), oracle.linear(np.abs(x), magnitudes)


def check_linear(linear: Any, form: Form, dtype: str, rows: int, *shape: int) -> None:
    """The products, with a bias, are exact up to the rounding of f32 sums."""
    rng = np.random.default_rng(0)
    weight = form.weight(rng, *shape)
    x = rng.normal(size=(rows, shape[-1])).astype(jnp.dtype(dtype))
    bias = rng.normal(size=shape[:-1]).astype(jnp.dtype(dtype))
    got = np.asarray(jax.jit(functools.partial(linear, out_dtype="float32"))(x, weight, bias))
    expected, sums = exact(x, weight)
    error = np.abs(got - (expected + bias.astype(np.float64)))
    allowed = max(4.0, math.sqrt(shape[-1])) * 2.0**-24 * (sums + np.abs(bias.astype(np.float64)))
    assert (error <= allowed).all(), (form, float((error / allowed).max()))


def check_grouped_linear(grouped: Any, form: Form, dtype: str, *shape: int) -> None:
    """The rows of each group are multiplied by the weight of the group."""
    rng, sizes = np.random.default_rng(0), np.array([3, 0, 20], np.int32)
    weight = form.weight(rng, len(sizes), *shape)
    x = rng.normal(size=(sizes.sum() + 2, shape[-1])).astype(jnp.dtype(dtype))
    got = np.asarray(jax.jit(functools.partial(grouped, out_dtype="float32"))(x, weight, sizes))
    assert not got[sizes.sum() :].any()
    for group, end in enumerate(np.cumsum(sizes)):
        mine = slice(end - sizes[group], end)
        one = jax.tree.map(lambda array, group=group: array[group], weight)
        expected, sums = exact(x[mine], one)
        allowed = max(4.0, math.sqrt(shape[-1])) * 2.0**-24 * sums
        assert (np.abs(got[mine] - expected) <= allowed).all(), form


def assert_no_copy(text: str, *shape: int) -> None:
    """The compiled text makes no array of the shape of a weight, widened or not: it is a parameter,
    or the same bytes by another name.
    """
    sizes = {",".join(map(str, s)) for s in (shape, (1, *shape), (*shape[:-1], shape[-1] // 2))}
    made = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", text)
    wrong = [
        (size, by) for size, by in made if size in sizes and by not in ("parameter", "bitcast")
    ]
    assert not wrong, wrong


def quantized_step(compiler: Any, target: str, page_size: int) -> StepReport:
    """A decode step of two layers of an 8B model, with uint4 weights and an int8 cache."""

    def quantize(spec: WeightSpec) -> QuantizedArray:
        assert spec.num_inputs is not None
        inputs = math.prod(spec.shape[-spec.num_inputs :])
        return QuantizedForm("uint4", inputs // 128, has_zero_points=True).arrays(spec)

    pages = 32 * 4096 // page_size + 1
    return compile_decode_step(
        load_registry(),
        LLAMA_8B | {"num_hidden_layers": 2, "vocab_size": 4096},
        compiler,
        target,
        shape=DecodeShape(page_size=page_size, num_pages=pages, decode_steps=8, cache_dtype="int8"),
        config=EngineConfig(sampler="greedy"),
        quantize=quantize,
    )


def check_step(report: StepReport, name: str) -> None:
    """The kernels of a device run it, the cache is in place, and no array of floats in the program
    is as large as the smallest weight.
    """
    assert {report.kernels[op] for op in ("linear", "kv_write", "attention.decode")} == {name}
    figures = report.compiled.figures
    assert report.cache_bytes <= figures["alias_bytes"] < report.cache_bytes + (8 << 20)
    assert figures["temp_bytes"] < (report.cache_bytes + report.weight_bytes) // 8
    sizes = re.findall(r"= (?:bf16|f16|f32)\[([\d,]+)\]", report.compiled.text)
    largest = max(math.prod(map(int, size.split(","))) for size in sizes)
    assert largest < 4096 * 4096, largest
