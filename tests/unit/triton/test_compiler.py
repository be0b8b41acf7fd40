"""Programs with Triton kernels compiled with no GPU: what each kernel takes, and where every byte
lies.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason='triton is not installed: the extra "gpu" brings it')
pytest.importorskip("jax_triton", reason='jax-triton is not installed: the extra "gpu" brings it')

from enginebay.errors import UnsupportedError
from enginebay_triton import call
from enginebay_triton import compiler as compiler_module
from enginebay_triton.call import Launch, launch
from enginebay_triton.compiler import compiler
from enginebay_triton.targets import TARGETS
from tests.unit.triton import faults

S = jax.ShapeDtypeStruct
F32 = jnp.float32

absent = compiler.why_not("sm_90")
pytestmark = pytest.mark.skipif(absent is not None, reason=absent or "")


def in_place(x: Any, length: Any, y: Any) -> Any:
    how = Launch((2,), (S((2,), F32),), {"BLOCK": 8}, num_in_place=1)
    return launch(faults.add_in_place, [x, length, y], how)


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_compiles_for_every_target_and_its_donated_array_is_not_copied(
    target: str,
) -> None:
    size = 1 << 20
    report = compiler.compile(
        in_place,
        [S((size,), F32), S((1,), jnp.int32), S((size,), F32)],
        target=target,
        donated=(2,),
    )
    assert report.target == target
    assert 0 < report.figures["registers"] <= 255
    assert report.figures["spill_bytes"] == 0
    if "alias_bytes" in report.figures:
        assert report.figures["alias_bytes"] == size * 4
        assert report.figures["temp_bytes"] < size


@pytest.mark.parametrize(
    ("compute_capability", "version"),
    [(80, 83), (90, 83), (100, 86), (103, 88), (110, 90), (120, 87), (121, 88)],
)
def test_ptx_is_the_oldest_that_the_architecture_has(compute_capability: int, version: int) -> None:
    assert call.ptx_version(compute_capability) == version


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_are_written_in_that_ptx_whatever_tritons_own_assembler_knows(target: str) -> None:
    arguments = [S((64,), F32), S((1,), jnp.int32), S((64,), F32)]

    def program(*given: Any) -> Any:  # one of its own, so that nothing traced before is taken
        return in_place(*given)

    with compiler_module.lowering_for(TARGETS[target].compute_capability):
        (kernel,) = compiler_module.kernels_in(
            jax.jit(program).trace(*arguments).lower(lowering_platforms=("cuda",))
        )
    version = call.ptx_version(TARGETS[target].compute_capability)
    assert f".version {version // 10}.{version % 10}\n" in kernel.ptx


def test_spills_are_told() -> None:
    def step(x: jax.Array) -> Any:
        return launch(faults.spilling, [x], Launch((1,), (x,), {"BLOCK": 64}, num_warps=1))

    report = compiler.compile(step, [S((64, 64), jnp.float16)], target="sm_80")
    assert report.figures["spill_bytes"] > 0
    assert report.figures["shared_bytes"] > 0


def test_an_unknown_target_is_refused_with_those_there_are() -> None:
    assert "sm_90" in (compiler.why_not("sm_70") or "")
    with pytest.raises(UnsupportedError, match="sm_70"):
        compiler.compile(in_place, [], target="sm_70")


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"jax-triton": None, "triton": "3.6.0", "jax": "0.11.2"}, "jax-triton not installed"),
        ({"jax-triton": "0.3.0", "triton": "3.6.0", "jax": "0.11.2"}, "0.3.1 or 0.4"),
        ({"jax-triton": "0.4.1", "triton": "3.5.1", "jax": "0.11.2"}, "triton 3.6"),
        ({"jax-triton": "0.4.1", "triton": "3.6.0", "jax": "0.10.2"}, "jax 0.11"),
        ({"jax-triton": "0.3.1", "triton": "3.6.0+git1", "jax": "0.10.2"}, None),
    ],
)
def test_versions_that_cannot_work_together_are_refused(
    versions: dict[str, str | None], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "version", versions.__getitem__)
    if reason is None:
        call.require_versions()
        return
    with pytest.raises(UnsupportedError, match=reason):
        call.require_versions()
