"""Compiling for TPUs that are not there: what is told of a program, refusals, and several
devices.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginebay.errors import UnknownNameError, UnsupportedError
from enginebay_pallas import generations
from enginebay_pallas.compiler import WITHOUT_A_TPU, compiler, environment_without_a_tpu

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu)"
)

NEWEST = ("v5e", "v6e", "7x")


def doubled(x: jax.Array, *, rows: int = 128) -> jax.Array:
    """A kernel that works in place, over blocks of `rows` rows."""

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] * 2

    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // rows,),
        in_specs=[block],
        out_specs=block,
        input_output_aliases={0: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=4 << 20),
    )(x)


X = jax.ShapeDtypeStruct((512, 512), jnp.float32)


@needs_libtpu
@pytest.mark.parametrize("target", compiler.targets)
def test_a_report_tells_memory(target: str) -> None:
    assert compiler.why_not(target) is None
    report = compiler.compile(doubled, (X,), target=target, donated=(0,))
    assert report.target == target
    assert report.figures["alias_bytes"] == report.figures["argument_bytes"] == 1 << 20
    assert report.figures["temp_bytes"] == 0
    assert 0 < report.figures["vmem_bytes"] <= 4 << 20


@needs_libtpu
def test_without_donation_nothing_is_aliased() -> None:
    assert compiler.compile(doubled, (X,), target="v5e").figures["alias_bytes"] == 0


@needs_libtpu
def test_too_much_vmem_is_refused() -> None:
    with pytest.raises(Exception, match=r"(?i)vmem"):
        compiler.compile(
            lambda x: doubled(x, rows=4096),
            (jax.ShapeDtypeStruct((4096, 512), jnp.float32),),
            target="v5e",
        )


@needs_libtpu
@pytest.mark.parametrize("target", NEWEST)
def test_eight_devices(target: str) -> None:
    mesh = Mesh(np.array(compiler.devices(target, 8)), ("tp",))
    columns = PartitionSpec(None, "tp")
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=NamedSharding(mesh, columns))
    function = jax.shard_map(
        doubled, mesh=mesh, in_specs=columns, out_specs=columns, check_vma=False
    )
    report = compiler.compile(function, (x,), target=target, donated=(0,), num_devices=8)
    assert report.figures["alias_bytes"] == report.figures["argument_bytes"] == 512 * 1024 * 4 // 8


@needs_libtpu
def test_the_environment_is_left_as_it_was() -> None:
    before = dict(os.environ)
    compiler.devices("v6e", 4)
    assert {n: v for n, v in os.environ.items() if n not in before} == {}


def test_variables_are_set_where_there_is_no_tpu_and_while_the_block_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in WITHOUT_A_TPU:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "the user's")
    for without_a_tpu in ("0", "1"):
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", without_a_tpu)
        before = dict(os.environ)
        with environment_without_a_tpu():
            missing = WITHOUT_A_TPU if without_a_tpu == "1" else {}
            assert dict(os.environ) == {**missing, **before}
        assert dict(os.environ) == before
        with pytest.raises(ValueError, match="no topology"), environment_without_a_tpu():
            raise ValueError("no topology")
        assert dict(os.environ) == before


@needs_libtpu
def test_more_devices_than_a_slice_has() -> None:
    with pytest.raises(UnsupportedError, match="at most 16"):
        compiler.devices("v5e", 17)


def test_without_libtpu_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "enginebay[tpu]" in str(compiler.why_not("v6e"))


def test_unknown_targets_are_named() -> None:
    with pytest.raises(UnknownNameError, match="v6e"):
        compiler.why_not("v6")


@pytest.mark.parametrize(("arch", "mib"), [("v5e", 120), ("TPU v6 lite", 120), ("7x", 56), ("", 8)])
def test_generations_are_found_by_name_and_kind(arch: str, mib: int) -> None:
    assert generations.generation(arch).vmem_limit_bytes == mib << 20


def test_unknown_generations_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="v5e"):
        generations.generation("v99")
