"""Small Triton kernels: a right one, and some that do what the interpreter must find. Nothing but
Triton is imported.
"""

import triton
import triton.language as tl


@triton.jit
def total(x):
    return tl.sum(x, 0)


@triton.jit
def add_in_place(x_ptr, length_ptr, y_ptr, _y, sums_ptr, BLOCK: tl.constexpr):
    """y[:length] += x[:length]; the sum of each block."""
    length = tl.load(length_ptr)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < length, other=0.0)
    y = tl.load(y_ptr + at, mask=at < length, other=0.0)
    tl.store(y_ptr + at, x + y, mask=at < length)
    tl.store(sums_ptr + tl.program_id(0), total(x + y))


@triton.jit
def copy_page(cache_ptr, table_ptr, out_ptr, PAGE: tl.constexpr):
    """out[row] = cache[table[row]], wherever the table points to."""
    row = tl.program_id(0)
    page = tl.load(table_ptr + row).to(tl.int64)
    at = tl.arange(0, PAGE)
    tl.store(out_ptr + row * PAGE + at, tl.load(cache_ptr + page * PAGE + at))


@triton.jit
def write_slots(x_ptr, slots_ptr, cache_ptr, _cache):
    """cache[slots[i]] = x[i], and nobody looks whether there is such a slot."""
    token = tl.program_id(0)
    tl.store(cache_ptr + tl.load(slots_ptr + token), tl.load(x_ptr + token))


@triton.jit
def sum_up_to(x_ptr, length_ptr, out_ptr, BLOCK: tl.constexpr):
    """The sum of one element too many: the mask is off by one."""
    length = tl.load(length_ptr)
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + at, mask=at <= length, other=0.0), 0))


@triton.jit
def half_written(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """out[: BLOCK // 2] = x[: BLOCK // 2], and the rest is left as it was."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at), mask=at < BLOCK // 2)


@triton.jit
def neighbour(x_ptr, _x, BLOCK: tl.constexpr):
    """Each program reads the block that the next one writes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + BLOCK, mask=at + BLOCK < 2 * BLOCK, other=0.0)
    tl.store(x_ptr + at, x)


@triton.jit
def spilling(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Far more values at once than a thread has registers for."""
    at = tl.arange(0, BLOCK)
    place = at[:, None] * BLOCK + at[None, :]
    x = tl.load(x_ptr + place)
    y = tl.dot(x, tl.trans(x))
    z = tl.dot(x, y.to(tl.float16))
    tl.store(out_ptr + place, (y * tl.sum(tl.sum(z, 0), 0) + z).to(tl.float16))
