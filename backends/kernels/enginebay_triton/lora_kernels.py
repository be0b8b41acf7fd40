"""The Triton kernels of lora. They import Triton only, for the interpreter's process."""

import triton
import triton.language as tl


@triton.jit
def lora_shrink_kernel(
    x_ptr,
    a_ptr,
    group_ptr,
    first_ptr,
    end_ptr,
    token_ptr,
    out_ptr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program multiplies a block of tokens with WIDTH ranks of a part of their adapter.

    A block has the places first..end, at most ROWS, whose tokens are `token`. a is [slots, PARTS,
    RANK, INPUTS]; the result goes to out [places, PARTS, RANK]. A block without places does
    nothing.
    """
    block = tl.program_id(0)
    part = tl.program_id(1)
    first = tl.load(first_ptr + block)
    end = tl.load(end_ptr + block)
    if first < end:
        group = tl.load(group_ptr + block).to(tl.int64)
        places = first + tl.arange(0, ROWS)
        is_place = places < end
        tokens = tl.load(token_ptr + places, mask=is_place, other=0).to(tl.int64)
        ranks = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
        is_rank = ranks < RANK
        x_rows = x_ptr + tokens[:, None] * INPUTS
        a_rows = a_ptr + ((group * PARTS + part) * RANK + ranks)[None, :] * INPUTS
        total = tl.zeros([ROWS, WIDTH], tl.float32)
        for begin in range(0, INPUTS, DEPTH):
            at = begin + tl.arange(0, DEPTH)
            inside = at < INPUTS
            x = tl.load(x_rows + at[None, :], mask=is_place[:, None] & inside[None, :], other=0.0)
            a = tl.load(a_rows + at[:, None], mask=inside[:, None] & is_rank[None, :], other=0.0)
            total = tl.dot(x, a.to(x.dtype), total, input_precision=PRECISION)
        out = out_ptr + (places.to(tl.int64) * PARTS + part)[:, None] * RANK + ranks[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_place[:, None] & is_rank[None, :])


@triton.jit
def lora_expand_kernel(
    shrunk_ptr,
    b_ptr,
    group_ptr,
    first_ptr,
    end_ptr,
    token_ptr,
    run_ptr,
    y_ptr,
    unused_ptr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program adds the products of a block of tokens with a run of outputs to y [T, OUTPUTS].

    run is [runs, 3]: the first output, the end, and the part to which these outputs belong, at most
    WIDTH. shrunk is [places, PARTS, RANK], b [slots, RANK, OUTPUTS].
    """
    block = tl.program_id(0)
    first = tl.load(first_ptr + block)
    end = tl.load(end_ptr + block)
    if first < end:
        group = tl.load(group_ptr + block).to(tl.int64)
        places = first + tl.arange(0, ROWS)
        is_place = places < end
        tokens = tl.load(token_ptr + places, mask=is_place, other=0).to(tl.int64)
        run = run_ptr + tl.program_id(1) * 3
        columns = tl.load(run) + tl.arange(0, WIDTH)
        is_column = columns < tl.load(run + 1)
        part = tl.load(run + 2)
        rows = shrunk_ptr + (places.to(tl.int64) * PARTS + part)[:, None] * RANK
        total = tl.zeros([ROWS, WIDTH], tl.float32)
        for begin in range(0, RANK, DEPTH):
            ranks = begin + tl.arange(0, DEPTH)
            is_rank = ranks < RANK
            values = tl.load(
                rows + ranks[None, :], mask=is_place[:, None] & is_rank[None, :], other=0.0
            )
            b = tl.load(
                b_ptr + (group * RANK + ranks)[:, None] * OUTPUTS + columns[None, :],
                mask=is_rank[:, None] & is_column[None, :],
                other=0.0,
            )
            total = tl.dot(values, b.to(values.dtype), total, input_precision=PRECISION)
        y = y_ptr + tokens[:, None] * OUTPUTS + columns[None, :]
        mask = is_place[:, None] & is_column[None, :]
        before = tl.load(y, mask=mask, other=0.0).to(tl.float32)
        tl.store(y, (before + total).to(y_ptr.dtype.element_ty), mask=mask)
