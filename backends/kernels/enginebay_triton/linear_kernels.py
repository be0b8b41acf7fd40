"""The Triton kernel of the ops linear and grouped_linear. It imports Triton only, for the
interpreter's process.

Values of a quantised weight are widened in registers. Their products are exact, and scales and zero
points are applied to sums of products, in f32.
"""

import triton
import triton.language as tl

from enginebay_triton.number_kernels import from_fp8


@triton.jit
def _load_x(x_ptr, rows, at, inside, is_row, INPUTS: tl.constexpr):
    """Load x [DEPTH, ROWS]: inputs `at` of some rows of x [T, INPUTS]."""
    return tl.load(
        x_ptr + rows.to(tl.int64)[None, :] * INPUTS + at[:, None],
        mask=inside[:, None] & is_row[None, :],
        other=0.0,
    )


@triton.jit
def _dot(weight, x, AS_INT: tl.constexpr, PRECISION: tl.constexpr):
    """Return the f32 products of weight [WIDTH, DEPTH] and x [DEPTH, ROWS].

    Products of small integers, and sums of up to a thousand of them, are exact in float16 with f32
    sums. So integers are multiplied as float16 unless AS_INT.
    """
    if AS_INT:
        return tl.dot(weight, x, out_dtype=tl.int32).to(tl.float32)
    elif x.dtype == tl.int8:
        return tl.dot(weight.to(tl.float16), x.to(tl.float16))
    else:
        return tl.dot(weight.to(x.dtype), x, input_precision=PRECISION)


@triton.jit
def linear_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    points_ptr,
    group_ptr,
    first_ptr,
    end_ptr,
    out_ptr,
    NUM_ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARES: tl.constexpr,
    FORM: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_POINTS: tl.constexpr,
    AS_INT: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program multiplies rows first..end of x [NUM_ROWS, INPUTS] with WIDTH outputs of one
    weight and one split of its inputs.

    The rows, at most ROWS, belong to one group. The result goes to out [SPLITS, NUM_ROWS, OUTPUTS].
    A block without rows does nothing. FORM is "plain" for numbers that convert to the dtype of x,
    "fp8" for the bits of float8_e4m3fn, and "int4" or "uint4" for PACKED bytes: the low four bits
    have the value of an even input, the high ones of the next input, and x has its even inputs
    first. Scales and zero points are [groups, OUTPUTS, SHARES], each for an equal share of the
    inputs. The products of a tile of weights [WIDTH, DEPTH] and of x [DEPTH, ROWS] are in this
    order because tensor cores take converted numbers from registers on the left side only.
    """
    STORED: tl.constexpr = INPUTS // 2 if PACKED else INPUTS
    SHARE: tl.constexpr = STORED // SHARES
    STEPS_PER_SHARE: tl.constexpr = (SHARE + DEPTH - 1) // DEPTH
    STEPS_PER_SPLIT: tl.constexpr = (SHARES * STEPS_PER_SHARE + SPLITS - 1) // SPLITS
    BY_SHARE: tl.constexpr = SHARES > 1 or HAS_POINTS
    block = tl.program_id(0)
    first = tl.load(first_ptr + block)
    end = tl.load(end_ptr + block)
    if first < end:
        group = tl.load(group_ptr + block).to(tl.int64)
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        is_row = rows < end
        is_column = columns < OUTPUTS
        weights = weight_ptr + (group * OUTPUTS + columns)[:, None] * STORED
        factor = (group * OUTPUTS + columns) * SHARES
        total = tl.zeros([WIDTH, ROWS], tl.float32)
        begin = tl.program_id(2) * STEPS_PER_SPLIT
        stop = tl.minimum(begin + STEPS_PER_SPLIT, SHARES * STEPS_PER_SHARE)
        for step in range(begin, stop):
            share = step // STEPS_PER_SHARE
            inner = step % STEPS_PER_SHARE * DEPTH + tl.arange(0, DEPTH)
            inside = inner < SHARE
            at = share * SHARE + inner
            x = _load_x(x_ptr, rows, at, inside, is_row, INPUTS)
            weight = tl.load(
                weights + at[None, :], mask=is_column[:, None] & inside[None, :], other=0
            )
            if PACKED:
                if FORM == "int4":
                    signed = weight.to(tl.int8, bitcast=True)
                    low, high = (signed << 4) >> 4, signed >> 4
                else:
                    low, high = (weight & 15).to(tl.int8), (weight >> 4).to(tl.int8)
                odd = _load_x(x_ptr, rows, STORED + at, inside, is_row, INPUTS)
                part = _dot(low, x, AS_INT, PRECISION) + _dot(high, odd, AS_INT, PRECISION)
            elif FORM == "fp8":
                part = _dot(from_fp8(weight), x, AS_INT, PRECISION)
            else:
                part = _dot(weight, x, AS_INT, PRECISION)
            if HAS_POINTS:
                points = tl.load(points_ptr + factor + share, mask=is_column, other=0.0)
                sums = tl.sum(x.to(tl.float32), 0)
                if PACKED:
                    sums += tl.sum(odd.to(tl.float32), 0)  # type: ignore[possibly-undefined]
                part -= points.to(tl.float32)[:, None] * sums[None, :]
            if BY_SHARE:
                scales = tl.load(scales_ptr + factor + share, mask=is_column, other=0.0)
                part *= scales.to(tl.float32)[:, None]
            total += part
        if HAS_SCALES and not BY_SHARE:
            scales = tl.load(scales_ptr + factor, mask=is_column, other=0.0)
            total *= scales.to(tl.float32)[:, None]
        row = tl.program_id(2).to(tl.int64) * NUM_ROWS + rows
        tl.store(
            out_ptr + row[None, :] * OUTPUTS + columns[:, None],
            total.to(out_ptr.dtype.element_ty),
            mask=is_column[:, None] & is_row[None, :],
        )
