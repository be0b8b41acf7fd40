"""Fused ops: which implementation is taken, and what models and the bound ops make of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.compose.binding import OpsBinder
from enginebay.compose.composition import make_plan
from enginebay.compose.fused import COMPOSED, FusedPart, choose_fused
from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.ops import usable_ops
from enginebay.config import make_config
from enginebay.config_sections import AUTO, PHASES
from enginebay.contracts.model import ModelInfo
from enginebay.contracts.placement import make_placement
from enginebay.errors import UnsupportedError
from enginebay.ops.attention import ATTENTION
from enginebay.ops.batches import derive_batch
from enginebay.ops.caps import Caps, Env
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.select import Candidate
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry, load_registry
from enginebay_testing import fused, kernels
from enginebay_xla.attention import CAPS, XlaAttention
from enginebay_xla.kv_write import kv_write
from enginebay_xla.layout import HndLayout
from enginebay_xla.linear import embedding, linear
from enginebay_xla.norm import add_rms_norm, rms_norm
from enginebay_xla.rope import rope
from enginebay_xla.rope_kv_write import rope_kv_write

pytestmark = pytest.mark.long

NORM = Candidate("plain", 0, rms_norm)
FUSED = Candidate("plain", 0, add_rms_norm)


def choose(
    wanted: str, candidates: list[Candidate], part: Candidate = NORM, *, named: bool = False
) -> Any:
    return choose_fused(
        "kernels.add_rms_norm", wanted, candidates, [FusedPart("rms_norm", part, is_named=named)]
    )


def test_auto_takes_a_fused_op_that_is_as_good_as_its_parts() -> None:
    found, reason = choose(AUTO, [FUSED, Candidate("fast", 5, add_rms_norm)])
    assert found is not None
    assert (found.name, reason.chosen) == ("fast", "fast")


@pytest.mark.parametrize(
    ("candidates", "part", "named", "why"),
    [
        ([FUSED], NORM, True, "rms_norm chosen by name"),
        ([FUSED], Candidate("fast", 5, rms_norm), False, "fast of rms_norm has a higher priority"),
        (
            [Candidate("gone", 9, unavailable="needs a GPU")],
            NORM,
            False,
            "no implementation can serve",
        ),
        ([], NORM, False, "no implementation can serve"),
    ],
)
def test_parts_that_are_named_or_better_compute_it(
    candidates: list[Candidate], part: Candidate, named: bool, why: str
) -> None:
    found, reason = choose(AUTO, candidates, part, named=named)
    assert found is None
    assert reason.chosen == COMPOSED
    assert why in reason.why


def test_a_fused_op_by_name_is_taken_or_refused() -> None:
    found, _ = choose("plain", [FUSED], Candidate("fast", 5, rms_norm), named=True)
    assert found is FUSED
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        choose("gone", [FUSED, Candidate("gone", 9, unavailable="needs a GPU")])


def test_a_named_part_is_used_wherever_its_op_is_computed() -> None:
    base = {"compile_cache": "off", "platform": "cpu", "max_model_len": 64}
    plain = make_plan(make_config(base))
    assert {"add_rms_norm", "rope_kv_write"} <= set(plain.kernels.plain)
    named = make_plan(make_config(base, {"kernels": {"rms_norm": "xla", "rope": "xla"}}))
    assert not {"add_rms_norm", "rope_kv_write"} & set(named.kernels.plain)
    assert named.kernels.names["add_rms_norm"] == COMPOSED


def test_an_op_that_does_not_know_the_layout_is_passed_over_with_the_reason() -> None:
    declared = Declaration(
        "kernel",
        "narrow",
        "enginebay_xla.rope_kv_write:rope_kv_write",
        op="rope_kv_write",
        capabilities={"priority": 50, "layouts": ("nhd",)},
    )
    registry = Registry(
        [
            *load_registry().entries,
            Entry("kernel", "narrow", "external", "1", "external", declaration=declared),
        ]
    )
    base = {"compile_cache": "off", "platform": "cpu", "max_model_len": 64}
    plan = make_plan(make_config(base, {"layout": "hnd"}), registry)
    reason = next(r for r in plan.reasons if r.setting == "kernels.rope_kv_write")
    assert ("narrow", "does not support layout hnd (has nhd)") in reason.refused
    with pytest.raises(UnsupportedError, match="does not support layout hnd"):
        make_plan(
            make_config(base, {"layout": "hnd", "kernels": {"rope_kv_write": "narrow"}}), registry
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_add_rms_norm(dtype: str) -> None:
    fused.check_add_rms_norm(add_rms_norm, dtype)


def test_the_suite_finds_a_sum_that_is_not_rounded() -> None:
    def wide(x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float) -> Any:
        total = x + residual
        return rms_norm(total, weight, eps=eps), total + x * 1e-2

    with pytest.raises(AssertionError, match="the sum differs"):
        fused.check_add_rms_norm(wide, "bfloat16")


def test_the_suite_finds_keys_that_are_not_turned_and_places_that_are_written() -> None:
    def unturned(
        q: Any, k: Any, v: Any, cache: Any, positions: Any, slots: Any, **named: Any
    ) -> Any:
        layout = named["layout"]
        return rope(q, positions, spec=named["spec"]), kv_write(cache, slots, k, v, layout)

    def everywhere(
        q: Any, k: Any, v: Any, cache: Any, positions: Any, slots: Any, **named: Any
    ) -> Any:
        return rope_kv_write(q, k, v, cache, positions, jnp.maximum(slots, 0), **named)

    spec = kernels.ROPE_SPECS["default"]
    with pytest.raises(AssertionError, match="k of hnd"):
        fused.check_rope_kv_write(unturned, HndLayout, spec, "float32")
    with pytest.raises(AssertionError):
        fused.check_rope_kv_write(everywhere, HndLayout, spec, "float32")


READING = dataclasses.replace(CAPS, features=CAPS.features - {"fused_write"})


@dataclasses.dataclass(frozen=True)
class ReadingAttention(XlaAttention):
    """Attention that wants the cache written before."""

    caps: Caps = READING


PLAIN = {
    "embedding": embedding,
    "linear": linear,
    "rms_norm": rms_norm,
    "rope": rope,
    "kv_write": kv_write,
}


def attend(
    attention: XlaAttention,
    plain: dict[str, Any],
    shards: int,
    spec: RopeSpec | None,
    *,
    shared: bool = False,
    sinks: np.ndarray | None = None,
) -> Any:
    """(out, k, v of the cache) of a decode step over two rows."""
    attn = AttnSpec(4, 2, 16, kv_shared=shared, inputs=() if sinks is None else ("sinks",))
    info = ModelInfo("x", 8, 8, 64, (), {"full": attn})
    placement = make_placement(
        jax.devices(), {"tensor": shards} if shards > 1 else {}, {"kv_heads": "tensor"}
    )
    chosen = ChosenKernels(
        dict.fromkeys(PHASES, attention),
        plain,
        {},
        "hnd",
        HndLayout,
        (),
        Env("cpu"),
        ops=usable_ops(load_registry())[0],
    )
    bucket = Bucket(2, 2, 1, 1, 16, "decode")
    layout = HndLayout(2, 16, 2, 16, "float32")
    ops = OpsBinder(chosen, info, placement)(bucket, {"full": layout})
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    history = rng.normal(size=(2, 32, 2, 16)).astype(np.float32)

    @jax.jit
    def step(q: Any, k: Any, v: Any, history: Any) -> Any:
        cache = layout.write(layout.init(), jnp.arange(32), history[0], history[1])
        lens = jnp.array([3, 9])
        batch = derive_batch(jnp.ones(2, jnp.int32), lens, jnp.arange(2)[:, None], 16, bucket)
        new = (None, None) if shared else (k, v)
        given = {} if sinks is None else {"sinks": sinks}
        return ops[ATTENTION](q, *new, cache, batch, spec=attn, rope=spec, inputs=given)

    out, after, _ = step(q, k, v, history)
    return tuple(np.asarray(x) for x in (out, after["k"], after["v"]))


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
def test_every_way_to_rotate_and_write_gives_the_same(shards: int) -> None:
    spec = RopeSpec(10000.0, 16)
    wanted = attend(XlaAttention(), PLAIN, shards, spec)
    reading = attend(ReadingAttention(), PLAIN, shards, spec)
    calls = []

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(named["layout"].num_kv_heads)
        return rope_kv_write(*args, **named)

    in_one = attend(ReadingAttention(), PLAIN | {"rope_kv_write": counted}, shards, spec)
    assert calls == [2 // shards]
    for each in (reading, in_one):
        for got, expected in zip(each, wanted, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_without_rope_nothing_is_rotated() -> None:
    plain = PLAIN | {
        "rope_kv_write": rope_kv_write,
        "rope": functools.partial(pytest.fail, "rotated"),
    }
    for got, expected in zip(
        attend(ReadingAttention(), plain, 1, None),
        attend(XlaAttention(), plain, 1, None),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_layer_that_shares_anothers_cache_rotates_its_queries_and_writes_nothing(
    shards: int,
) -> None:
    spec = RopeSpec(10000.0, 16)
    plain = PLAIN | {
        "rope_kv_write": rope_kv_write,
        "kv_write": functools.partial(pytest.fail, "written"),
    }
    wanted = attend(XlaAttention(), plain, shards, spec, shared=True)
    for got, expected in zip(
        attend(ReadingAttention(), plain, shards, spec, shared=True), wanted, strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    turned = attend(XlaAttention(), plain, shards, spec, shared=True)[0]
    assert not np.array_equal(turned, attend(XlaAttention(), plain, shards, None, shared=True)[0])


def test_a_model_passes_sinks_which_are_split_as_its_heads_are() -> None:
    """A large sink takes its head's weight from every key."""
    sinks = np.array([0.0, 1.0, -2.0, 40.0], np.float32)
    whole, split = (attend(XlaAttention(), PLAIN, n, None, sinks=sinks)[0] for n in (1, 2))
    plain = attend(XlaAttention(), PLAIN, 1, None)[0]
    np.testing.assert_allclose(split, whole, rtol=1e-6, atol=1e-7)
    assert np.abs(whole[:, 3]).max() < 1e-12
    assert (np.abs(whole[:, :3]) < np.abs(plain[:, :3])).all()
