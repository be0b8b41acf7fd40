"""Triton kernels of rms_norm and add_rms_norm. Nothing but Triton is imported, so that they can be
interpreted alone.
"""

import triton
import triton.language as tl


@triton.jit
def _norm_rows(x, weight, SIZE: tl.constexpr, EPS: tl.constexpr):
    """x [ROWS, BLOCK], 0 past SIZE -> x / rms(x) rounded to x's type, times weight [BLOCK], rounded
    again.
    """
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + EPS)
    return (wide * scale[:, None]).to(x.dtype) * weight[None, :].to(x.dtype)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    NUM_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows of x [NUM_ROWS, SIZE] a program."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < NUM_ROWS)[:, None] & (columns < SIZE)[None, :]
    at = rows[:, None] * SIZE + columns[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, _norm_rows(x, weight, SIZE, EPS), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    NUM_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As rms_norm_kernel, of x + residual, which is rounded to x's type and stored too."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < NUM_ROWS)[:, None] & (columns < SIZE)[None, :]
    at = rows[:, None] * SIZE + columns[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + at, total, mask=inside)
    tl.store(out_ptr + at, _norm_rows(total, weight, SIZE, EPS), mask=inside)
