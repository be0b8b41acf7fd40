"""The cases of kv_write and rope_kv_write find kernels that go wrong with quantised caches, with
the sizes of serving, or with a donated cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.contracts.cache import KVLayout
from enginebay.ops.caps import Env
from enginebay.ops.kv_storage import KV_STORAGES, QUANTIZE
from enginebay.plugins.registry import load_registry
from enginebay_testing.op_kit import CaseBudget, OpCase, kit_of
from enginebay_testing.verdicts import FAULTS, judge
from enginebay_xla.kit.heads import rounded_one_way
from enginebay_xla.kv_write import kv_write
from enginebay_xla.layout import HndLayout
from enginebay_xla.rope import rope
from enginebay_xla.rope_kv_write import composed_rope_kv_write

pytestmark = pytest.mark.long

REGISTRY = load_registry()
ALL = tuple(sorted(KV_STORAGES))
Arrays = Mapping[str, jax.Array]


def cases(op: str, kernel: Any, *parts: str, storages: tuple[str, ...] = ALL) -> list[OpCase]:
    """Return the default cases in the layout hnd whose names have all `parts`."""
    extent = CaseBudget(triples=False, storages=storages)
    found = kit_of(REGISTRY, op).cases(kernel, Env("cpu"), [HndLayout], extent)
    return [case for case in found if all(part in case.name for part in parts)]


def failure(op: str, kernel: Any, *parts: str, most: int = 4) -> str:
    """Return what the first failing one of the cases says, or ""."""
    chosen = cases(op, kernel, *parts)
    assert chosen, f"no case of {op} has {parts} in its name"
    for case in chosen[:most]:
        outcome = judge(case.run)
        if outcome.verdict in FAULTS:
            return f"{outcome.verdict}: {outcome.detail}"
    return ""


def changing(change: Callable[[dict[str, jax.Array], Arrays, Any, KVLayout], Any]) -> Any:
    """Return a kv_write that changes what it wrote."""

    def write(cache: Arrays, slots: jax.Array, k: Any, v: Any, layout: KVLayout) -> Any:
        return change(dict(kv_write(cache, slots, k, v, layout)), cache, slots, layout)

    return write


def no_scales(new: dict[str, jax.Array], cache: Arrays, slots: Any, layout: KVLayout) -> Any:
    return {n: cache[n] if n.endswith("_scales") else a for n, a in new.items()}


def old_value_scales(new: dict[str, jax.Array], cache: Arrays, slots: Any, layout: KVLayout) -> Any:
    return {n: cache[n] if n == "v_scales" else a for n, a in new.items()}


def scale_of_the_first_head(
    new: dict[str, jax.Array], cache: Arrays, slots: Any, layout: KVLayout
) -> Any:
    pages, at = layout.split_slots(slots)
    return {
        n: a.at[pages, :, at].set(a[pages, :1, at], mode="drop") if n.endswith("_scales") else a
        for n, a in new.items()
    }


def swapped_nibbles(new: dict[str, jax.Array], cache: Arrays, slots: Any, layout: KVLayout) -> Any:
    if layout.storage != "uint4":
        return new
    pages, at = layout.split_slots(slots)
    return {
        n: a.at[pages, :, at].set((a << 4 | a >> 4)[pages, :, at], mode="drop") if n in "kv" else a
        for n, a in new.items()
    }


def clears_other_scales(
    new: dict[str, jax.Array], cache: Arrays, slots: Any, layout: KVLayout
) -> Any:
    return {n: jnp.nan_to_num(a) if n.endswith("_scales") else a for n, a in new.items()}


@pytest.mark.parametrize(
    ("change", "storage"),
    [
        (no_scales, "int8"),
        (old_value_scales, "fp8"),
        (scale_of_the_first_head, "int8"),
        (swapped_nibbles, "uint4"),
        (clears_other_scales, "int8"),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_a_kernel_that_writes_wrong_codes_or_scales_is_found(change: Any, storage: str) -> None:
    assert "INCORRECT" in failure("kv_write", changing(change), f"storage_{storage}", "kv_heads_")


def quantised_otherwise(storage: str, change: Callable[[jax.Array], jax.Array]) -> Any:
    """Return a kv_write that changes keys before it quantises them."""

    def write(cache: Arrays, slots: jax.Array, k: Any, v: Any, layout: KVLayout) -> Any:
        return kv_write(cache, slots, change(k) if layout.storage == storage else k, v, layout)

    return write


def test_a_kernel_that_clips_what_it_quantises_is_found() -> None:
    faulty = quantised_otherwise("int8", lambda k: k.clip(-100, 100))
    assert "INCORRECT" in failure("kv_write", faulty, "storage_int8")


def test_a_kernel_that_rounds_through_fewer_bits_is_found() -> None:
    faulty = quantised_otherwise("int8", lambda k: k.astype(jnp.bfloat16).astype(k.dtype))
    assert "INCORRECT" in failure("kv_write", faulty, "float32", "storage_int8")


def test_a_rope_kv_write_that_forgets_value_scales_is_found() -> None:
    faulty = composed_rope_kv_write(rope, changing(old_value_scales))
    assert "INCORRECT" in failure("rope_kv_write", faulty, "storage_int8")


def test_a_rope_kv_write_that_changes_scales_of_other_places_is_found() -> None:
    faulty = composed_rope_kv_write(rope, changing(clears_other_scales))
    assert "have changed" in failure("rope_kv_write", faulty, "storage_int8")


def test_page_ids_of_eight_bits_are_found() -> None:
    def write(cache: Arrays, slots: jax.Array, k: Any, v: Any, layout: KVLayout) -> Any:
        pages, at = slots // layout.page_size, slots % layout.page_size
        small = jnp.where(slots < 0, slots, pages % 256 * layout.page_size + at)
        return kv_write(cache, small, k, v, layout)

    assert "INCORRECT" in failure("kv_write", write, "pages_many")


def test_a_kernel_for_256_tokens_is_found() -> None:
    def write(cache: Arrays, slots: jax.Array, k: Any, v: Any, layout: KVLayout) -> Any:
        return kv_write(cache, slots[:256], k[:256], v[:256], layout)

    assert "INCORRECT" in failure("kv_write", write, "tokens_300")


def test_a_kernel_for_eight_heads_is_found() -> None:
    def write(cache: Arrays, slots: jax.Array, k: Any, v: Any, layout: KVLayout) -> Any:
        return kv_write(cache, slots, k.at[:, 8:].set(0), v, layout)

    assert "INCORRECT" in failure("kv_write", write, "kv_heads_12")


def test_a_rope_for_256_tokens_or_eight_heads_is_found() -> None:
    def tokens(x: jax.Array, positions: jax.Array, *, spec: Any) -> jax.Array:
        return rope(x, positions % jnp.int32(1 << 30), spec=spec).at[256:].set(0)

    def heads(x: jax.Array, positions: jax.Array, *, spec: Any) -> jax.Array:
        return rope(x, positions, spec=spec).at[:, 8:].set(0)

    assert "INCORRECT" in failure("rope", tokens, "tokens_513")
    assert "INCORRECT" in failure("rope", heads, "heads_12")


def test_a_kernel_that_keeps_the_first_cache_is_found() -> None:
    kept: dict[Any, Any] = {}

    def on_host(*arrays: Any) -> Any:
        key = tuple((a.shape, str(a.dtype)) for a in arrays)
        return kept.setdefault(key, tuple(np.array(a) for a in arrays))

    def write(cache: Arrays, slots: jax.Array, k: Any, v: Any, layout: KVLayout) -> Any:
        new = kv_write(cache, slots, k, v, layout)
        shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in new.values())
        found = jax.pure_callback(on_host, shapes, *new.values())
        return dict(zip(new, found, strict=True))

    for donated in ("-donated_True", ""):
        assert "INCORRECT" in failure("kv_write", write, "dtype"[:0], donated)
        kept.clear()


def test_only_declared_storages_have_cases() -> None:
    names = [case.name for case in cases("kv_write", kv_write, storages=("int8",))]
    assert any("storage_int8" in name for name in names)
    assert not any("storage_fp8" in name or "storage_uint4" in name for name in names)


@pytest.mark.long
@pytest.mark.parametrize("storage", ALL)
def test_heads_of_the_kit_are_rounded_one_way(storage: str) -> None:
    x = np.random.default_rng(3).normal(size=(400, 64))
    for dtype in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
        k = rounded_one_way(x, storage, dtype)
        wide = k.astype(np.float32)
        usual = QUANTIZE[storage](wide)
        for factor in (1 - 2.0**-17, 1 + 2.0**-17):  # what an inexact division may give
            other = QUANTIZE[storage](wide * np.float32(factor))
            for one, two in zip(usual, other, strict=True):
                if one is not None:
                    assert (np.asarray(one) == np.asarray(two)).all()
