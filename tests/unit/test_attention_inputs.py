"""Inputs of attention that only one kernel knows: passed by name, split, or refused. Steps are
traced, and not compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from enginebay.compose.binding import OpsBinder
from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.ops import usable_ops
from enginebay.compose.simple_attention import adapt_attention
from enginebay.config_sections import PHASES
from enginebay.contracts.model import ModelInfo
from enginebay.contracts.placement import make_placement
from enginebay.errors import UnsupportedError
from enginebay.ops.attention import ATTENTION
from enginebay.ops.batches import derive_batch
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.plugins.registry import load_registry
from enginebay_xla.attention import CAPS, XlaAttention
from enginebay_xla.kv_write import kv_write
from enginebay_xla.layout import HndLayout
from enginebay_xla.rope import rope

BUCKET, LAYOUT = Bucket(2, 2, 1, 1, 16, "decode"), HndLayout(2, 16, 2, 16, "float32")
SEEN: list[dict[str, Any]] = []


BIASED = dataclasses.replace(CAPS, inputs={"bias": ("heads", None), "layer": ()})


@dataclasses.dataclass(frozen=True)
class BiasedAttention:
    """Attention that adds a bias f32 [Hq, 3], which its model has, to its output."""

    name: str = "biased"
    version: str = "0"
    priority: int = 0
    inner: XlaAttention = dataclasses.field(default_factory=XlaAttention)
    caps: Caps = BIASED

    def default_config(self, *where: Any) -> None:
        return None

    def __call__(self, *args: Any, bias: Any, layer: int, **named: Any) -> Any:
        SEEN.append({"bias": bias.shape, "layer": layer})
        out, cache, lse = self.inner(*args, **named)
        return out + bias.sum(axis=1)[:, None], cache, lse


def trace(kernel: Any, spec: AttnSpec, inputs: dict[str, Any], shards: int = 1) -> Any:
    """The shapes of a decode step of two rows."""
    info = ModelInfo("x", 8, 8, 64, (), {"full": spec})
    placement = make_placement(
        jax.devices(), {"tensor": shards} if shards > 1 else {}, {"kv_heads": "tensor"}
    )
    chosen = ChosenKernels(
        dict.fromkeys(PHASES, kernel),
        {"rope": rope, "kv_write": kv_write},
        {},
        "hnd",
        HndLayout,
        reasons=(),
        env=Env("cpu"),
        ops=usable_ops(load_registry())[0],
    )
    ops = OpsBinder(chosen, info, placement)(BUCKET, {"full": LAYOUT})
    numbers = {n: x for n, x in inputs.items() if isinstance(x, int)}

    def step(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        lens = jnp.array([3, 9])
        batch = derive_batch(jnp.ones(2, jnp.int32), lens, jnp.arange(2)[:, None], 16, BUCKET)
        given = numbers | arrays
        return ops[ATTENTION](q, k, v, LAYOUT.init(), batch, spec=spec, inputs=given)[0]

    q, k, v = (jax.ShapeDtypeStruct((2, heads, 16), jnp.float32) for heads in (4, 2, 2))
    arrays = {n: x for n, x in inputs.items() if n not in numbers}
    return jax.eval_shape(step, q, k, v, arrays)


SPEC = AttnSpec(4, 2, 16, inputs=("bias",))
BIAS = jax.ShapeDtypeStruct((4, 3), jnp.float32)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_kernel_gets_the_inputs_that_it_declares_split_as_its_heads_are(shards: int) -> None:
    SEEN.clear()
    found = trace(BiasedAttention(), SPEC, {"bias": BIAS, "layer": 5, "other": BIAS}, shards)
    assert found.shape == (2, 4, 16)
    assert [{"bias": (4 // shards, 3), "layer": 5}] == SEEN


def test_an_input_that_is_not_passed_is_named() -> None:
    with pytest.raises(UnsupportedError, match="'biased' without its inputs layer"):
        trace(BiasedAttention(), SPEC, {"bias": BIAS})


@pytest.mark.parametrize(
    ("kernel", "spec", "reason"),
    [
        (XlaAttention(), SPEC, "does not support inputs bias"),
        (BiasedAttention(), AttnSpec(4, 2, 16), "needs inputs bias, which the model lacks"),
        (BiasedAttention(), SPEC, None),
    ],
)
def test_a_kernel_and_a_model_must_agree_on_inputs(
    kernel: Any, spec: AttnSpec, reason: str | None
) -> None:
    assert kernel.caps.why_not(Env("cpu"), spec, BUCKET, LAYOUT) == reason


def simple(q: Any, k_pages: Any, v_pages: Any, batch: Any, spec: Any, *, layer: int) -> Any:
    SEEN.append({"layer": layer})
    return q


def test_the_simple_form_takes_inputs_as_keywords() -> None:
    SEEN.clear()
    kernel = adapt_attention(simple, "simple", ("hnd",))
    assert trace(kernel, AttnSpec(4, 2, 16), {"layer": 3}).shape == (2, 4, 16)
    assert SEEN == [{"layer": 3}]


def test_the_simple_form_takes_what_the_spec_names() -> None:
    SEEN.clear()

    def scaled(q: Any, k_pages: Any, v_pages: Any, batch: Any, spec: Any, *, bias: Any) -> Any:
        SEEN.append({"bias": bias.shape})
        return q * bias.sum()

    trace(adapt_attention(scaled, "scaled", ("hnd",)), SPEC, {"bias": BIAS, "layer": 3})
    assert SEEN == [{"bias": (4, 3)}]


def test_a_bound_function_has_no_inputs() -> None:
    bound = functools.partial(simple, layer=1)
    assert adapt_attention(bound, "bound", ("hnd",)).inputs == ()
