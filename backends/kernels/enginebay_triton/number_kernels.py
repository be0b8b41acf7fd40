"""Conversions of numbers from their bits, for Triton kernels. It imports Triton only.

So a kernel needs no conversions of an architecture, and can be interpreted.
"""

import triton
import triton.language as tl


@triton.jit
def from_fp8(bits):
    """Return float8_e4m3fn as float16, which has all its values; `bits` are uint8, not NaN."""
    bits = bits.to(tl.uint16)
    # The sign, exponent and fraction of both dtypes are in the same order; their exponents differ
    # by 8.
    same = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return same.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def from_bf16(bits):
    """Return bfloat16 as f32; `bits` are uint16."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
