"""Triton kernels of rms_norm and add_rms_norm. They import Triton only, for the interpreter's
process.
"""

import triton
import triton.language as tl


@triton.jit
def _norm_rows(x, weight, SIZE: tl.constexpr, EPS: tl.constexpr):
    """Return x / rms(x), rounded to x's type, times weight [BLOCK], rounded again.

    x is [ROWS, BLOCK], with zeros in the columns from SIZE on.
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
    """Each program computes ROWS rows of x [NUM_ROWS, SIZE]."""
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
    """Compute rms_norm_kernel of x + residual. The sum is rounded to x's type and stored too."""
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
