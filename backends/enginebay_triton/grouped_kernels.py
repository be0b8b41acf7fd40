"""The Triton kernel of grouped_linear. It imports Triton only, for the interpreter's process."""

import triton
import triton.language as tl


@triton.jit
def grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    group_ptr,
    first_ptr,
    end_ptr,
    out_ptr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program multiplies rows first..end of x [T, INPUTS] with WIDTH outputs of one weight.

    The rows, at most ROWS, belong to one group. The result goes to out f32 [T, OUTPUTS]. A block
    without rows does nothing.
    """
    block = tl.program_id(0)
    first = tl.load(first_ptr + block)
    end = tl.load(end_ptr + block)
    if first < end:
        group = tl.load(group_ptr + block).to(tl.int64)
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        is_row = (rows < end)[:, None]
        is_column = columns < OUTPUTS
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * INPUTS
        weights = weight_ptr + (group * OUTPUTS + columns)[None, :] * INPUTS
        total = tl.zeros([ROWS, WIDTH], tl.float32)
        for begin in range(0, INPUTS, DEPTH):
            at = begin + tl.arange(0, DEPTH)
            inside = at < INPUTS
            x = tl.load(x_rows + at[None, :], mask=is_row & inside[None, :], other=0.0)
            weight = tl.load(
                weights + at[:, None], mask=inside[:, None] & is_column[None, :], other=0
            )
            total = tl.dot(x, weight.to(x.dtype), total, input_precision=PRECISION)
        if HAS_SCALES:
            scales = tl.load(scales_ptr + group * OUTPUTS + columns, mask=is_column, other=0.0)
            total = total * scales[None, :]
        out = out_ptr + rows.to(tl.int64)[:, None] * OUTPUTS + columns[None, :]
        tl.store(out, total, mask=is_row & is_column[None, :])
