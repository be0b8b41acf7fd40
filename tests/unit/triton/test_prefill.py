"""First-chunk prefill, interpreted: Triton's kernel by Triton's interpreter, cuDNN's rows and masks
by jax.nn's own attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from enginebay.contracts.cache import KVLayout
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay_testing import kernels
from enginebay_testing.attention_cases import AttentionCase
from enginebay_triton import cudnn as cudnn_module
from enginebay_triton.cudnn import cudnn
from enginebay_triton.layout import NhdLayout
from enginebay_xla.layout import HndLayout

PREFILL = {case.name: case for case in kernels.attention_cases() if case.mode == "prefill"}
CPU = Env("cpu")

F32 = AttnSpec(2, 1, 16, q_dtype="float32", kv_dtype="float32")
LONG = (60, 3, 17)
WINDOW = dataclasses.replace(F32, window=37)
"""Longer than two of the small blocks, so that some are masked on the left, some on the right, some
on neither side.
"""


def flash() -> Any:
    """The kernel interpreted; skips without Triton."""
    pytest.importorskip("triton", reason='triton is not installed: the extra "gpu" brings it')
    from enginebay_triton.flash import triton_flash

    return triton_flash.interpreted()


def small_blocks() -> Any:
    """The same with blocks far smaller than rows."""
    from enginebay_triton.flash import FlashPrefill, TritonFlashConfig

    class Small(FlashPrefill):
        def default_config(
            self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
        ) -> TritonFlashConfig:
            return TritonFlashConfig(16, 16)

    impl = flash()
    return Small(caps=impl.caps, launcher=impl.launcher)


def check(impl: Any, case: AttentionCase, layout: type[KVLayout]) -> None:
    reason = kernels.why_not_case(impl, case, layout, CPU)
    if reason is not None:
        pytest.skip(reason)
    kernels.check_attention(impl, case, layout, CPU)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("prefill_all", HndLayout), ("prefill_not_causal", NhdLayout)],
)
def test_flash_attends(name: str, layout: type[KVLayout]) -> None:
    check(flash(), PREFILL[name], layout)


@pytest.mark.parametrize("spec", [F32, WINDOW], ids=["causal", "window"])
def test_flash_attends_rows_of_many_blocks(spec: AttnSpec) -> None:
    flash()
    case = AttentionCase("prefill_many_blocks", "prefill", LONG, LONG, spec, capacity=80)
    check(small_blocks(), case, NhdLayout)


@pytest.mark.matrix
def test_flash_rows_are_independent() -> None:
    kernels.check_rows_are_independent(flash(), PREFILL["prefill_all"], NhdLayout, CPU)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [NhdLayout, HndLayout])
@pytest.mark.parametrize("name", PREFILL)
def test_flash_attends_in_full(name: str, layout: type[KVLayout]) -> None:
    check(flash(), PREFILL[name], layout)


@pytest.mark.matrix
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_flash_attends_heads_of_models(group: int, head_dim: int) -> None:
    for dtype in ("float32", "float16"):
        spec = AttnSpec(group, 1, head_dim, window=9, softcap=5.0, q_dtype=dtype, kv_dtype=dtype)
        check(flash(), AttentionCase("prefill_heads", "prefill", (20, 3), (20, 3), spec), NhdLayout)


def test_candidates_are_within_the_shared_memory_of_the_architecture() -> None:
    flash()
    from enginebay_triton.flash import triton_flash
    from enginebay_triton.targets import TARGETS

    for arch, target in TARGETS.items():
        for head_dim in (64, 128, 256):
            spec = AttnSpec(32, 8, head_dim, q_dtype="bfloat16", kv_dtype="bfloat16")
            layout = NhdLayout(2, 64, 8, head_dim, "bfloat16")
            problem = (Env("cuda", arch), spec, Bucket(512, 1, 8, 512, 512, "prefill"), layout)
            found = triton_flash.candidates(*problem)
            assert triton_flash.default_config(*problem) in found
            assert all(c.shared_bytes(head_dim, 2) <= target.shared_bytes_per_block for c in found)


@pytest.mark.parametrize("name", ["prefill_paged_bfloat16", "prefill_not_causal"])
def test_cudnn_attends(name: str) -> None:
    check(cudnn.interpreted(), PREFILL[name], NhdLayout)


def test_cudnn_attends_rows_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_module, "PADDING", 2)
    case = AttentionCase(
        "prefill_groups", "prefill", LONG, LONG, WINDOW, capacity=80, padding_rows=2
    )
    check(cudnn.interpreted(), case, NhdLayout)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [NhdLayout, HndLayout])
@pytest.mark.parametrize("name", PREFILL)
def test_cudnn_attends_in_full(name: str, layout: type[KVLayout]) -> None:
    check(cudnn.interpreted(), PREFILL[name], layout)


@pytest.mark.parametrize(
    ("fields", "arch", "reason"),
    [
        ({"head_dim": 256}, "sm_90", "head_dim 256"),
        ({"softcap": 30.0}, "sm_90", "features softcap"),
        ({"q_dtype": "float32", "kv_dtype": "float32"}, "sm_90", "dtype float32"),
        ({}, "sm_75", "architecture sm_75"),
        ({}, "sm_90", None),
    ],
)
def test_cudnn_declares_its_conditions(
    fields: dict[str, Any], arch: str, reason: str | None
) -> None:
    spec = dataclasses.replace(
        AttnSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16"), **fields
    )
    layout = NhdLayout(2, 64, 8, spec.head_dim, spec.kv_dtype)
    bucket = Bucket(16, 1, 1, 16, 64, "prefill")
    told = cudnn.caps.why_not(Env("cuda", arch), spec, bucket, layout)
    assert (told is None) if reason is None else (told is not None and reason in told)


def test_cudnn_refuses_a_window_that_is_not_causal() -> None:
    case = PREFILL["prefill_window"]
    odd = dataclasses.replace(case, spec=dataclasses.replace(case.spec, causal=False))
    with pytest.raises(UnsupportedError, match="window that is not causal"):
        kernels.check_attention(cudnn.interpreted(), odd, NhdLayout, CPU)
