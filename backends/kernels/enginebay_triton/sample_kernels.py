"""The Triton kernel of the op sample: one program per row. It imports Triton only.

The borders of top_k and top_p are found without sorting, by bisection over the bits of |z|, which
are ordered as the f32 values are. A bisection computes about sixty sums. A histogram of the row
first finds the tokens that fit CAPACITY, and the sums run over these. Rows with more kept tokens
pay for sums over the whole vocabulary.
"""

import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)
NO_MASS_BITS = tl.constexpr(0x42D00000)
"""The bits of 104.0. exp(-104) is 0 in f32, so tokens at this depth have no probability."""

BIN_SHIFT = tl.constexpr(20)
"""A bin of the histogram is the exponent and three bits of the mantissa: eight bins per octave."""
FIRST_BIN = tl.constexpr((127 - 4) * 8)
NUM_BINS = tl.constexpr(128)
"""Bins cover depths from 2 ** -4 to 2 ** 12; the first and last bin have everything outside."""


@triton.jit
def _depth(z):
    return tl.abs(z).to(tl.int32, bitcast=True)


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(ids, seed, salt):
    """Return the noise of enginebay.ops.sampling.gumbel_noise.

    log1p is computed by its series where the device's fast logarithm is not accurate enough.
    """
    bits = _mixed(_mixed(ids.to(tl.uint32) * 0x9E3779B9 + seed) ^ salt)
    uniform = (bits >> 1).to(tl.int32).to(
        tl.float32
    ) * 4.656612873077393e-10 + 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)
    series = 1.0 + uniform * (
        0.5 + uniform * (0.33333334 + uniform * (0.25 + uniform * (0.2 + uniform * 0.16666667)))
    )
    rate = tl.where(uniform < 0.0625, uniform * series, -tl.log(1.0 - uniform))
    return -tl.log(rate)


@triton.jit
def _survey(z_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr):
    """Return (sum of exp(z), deepest limit that at most CAPACITY tokens reach, their number)."""
    total = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([NUM_BINS], tl.int32)
    for begin in range(0, VOCAB, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
        total += tl.exp(z)
        bins = tl.minimum(tl.maximum((_depth(z) >> BIN_SHIFT) - FIRST_BIN, 0), NUM_BINS - 1)
        counts += tl.histogram(bins, NUM_BINS)
    upto = tl.cumsum(counts, 0)
    fits = (upto <= CAPACITY) & (tl.arange(0, NUM_BINS) < NUM_BINS - 1)
    limit = ((FIRST_BIN + tl.sum(fits.to(tl.int32), 0)) << BIN_SHIFT) - 1
    count = tl.max(tl.where(fits, upto, 0), 0)
    return tl.sum(total, 0), tl.where(count > 0, limit, -1), count


@triton.jit
def _gather(z_ptr, near_ptr, ids_ptr, limit, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the tokens above the limit, in the order of their ids, to `near` and `ids`."""
    found = 0
    for begin in range(0, VOCAB, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
        is_near = _depth(z) <= limit
        place = found + tl.cumsum(is_near.to(tl.int32), 0) - 1
        tl.store(near_ptr + place, z, mask=is_near)
        tl.store(ids_ptr + place, ids, mask=is_near)
        found += tl.sum(is_near.to(tl.int32), 0)


@triton.jit
def _down_to(z_ptr, num, limit, BLOCK: tl.constexpr):
    """Return (number, sum of exp(z)) of the first `num` values that are above the limit."""
    counts = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + at, mask=at < num, other=float("-inf"))
        inside = (_depth(z) <= limit) & (at < num)
        counts += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(z), 0.0)
    return tl.sum(counts, 0), tl.sum(mass, 0)


@triton.jit
def _best(
    z_ptr,
    ids_ptr,
    num,
    border,
    room,
    min_z,
    seed,
    salt,
    noisy,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the token with the best score; the first of equal ones.

    Candidates are the tokens above the border, and the first `room` tokens exactly at it.
    """
    best = float("-inf")
    token = 0
    at_border = 0
    for begin in range(0, num, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + at, mask=at < num, other=float("-inf"))
        ids = tl.load(ids_ptr + at, mask=at < num, other=0) if HAS_IDS else at
        depth = _depth(z)
        equal = (depth == border) & (at < num)
        rank = at_border + tl.cumsum(equal.to(tl.int32), 0)
        kept = (at < num) & (z >= min_z) & ((depth < border) | (equal & (rank <= room)))
        at_border += tl.sum(equal.to(tl.int32), 0)
        scores = tl.where(kept, z + tl.where(noisy, _gumbel(ids, seed, salt), 0.0), float("-inf"))
        here = tl.max(scores, 0)
        first = tl.min(tl.where((scores == here) & kept, ids, 0x7FFFFFFF), 0)
        token = tl.where(here > best, first, token)
        best = tl.maximum(here, best)
    return token


@triton.jit
def _draw(
    z_ptr, ids_ptr, num, deepest, total, top_k, top_p, min_z, seed, salt, cuts_k, cuts_p,
    HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw from the tokens that top_k, top_p and min_p keep; `num` values contain both borders."""
    kth = deepest
    if cuts_k:
        low = 0
        while low < kth:
            middle = low + (kth - low) // 2
            count, _ = _down_to(z_ptr, num, middle, BLOCK)
            enough = count >= top_k
            kth = tl.where(enough, middle, kth)
            low = tl.where(enough, low, middle + 1)
        _, total = _down_to(z_ptr, num, kth, BLOCK)
    border = kth
    room = 0x7FFFFFFF
    if cuts_p:
        wanted = top_p * total
        border = tl.minimum(kth, NO_MASS_BITS)
        low = 0
        while low < border:
            middle = low + (border - low) // 2
            _, mass = _down_to(z_ptr, num, middle, BLOCK)
            enough = mass >= wanted
            border = tl.where(enough, middle, border)
            low = tl.where(enough, low, middle + 1)
        _, above = _down_to(z_ptr, num, border - 1, BLOCK)
        each = tl.exp(-border.to(tl.float32, bitcast=True))
        fitting = tl.ceil((wanted - above) / each)
        room = tl.maximum(tl.minimum(fitting, 1.0e9), 1.0).to(tl.int32)
    return _best(
        z_ptr=z_ptr,
        ids_ptr=ids_ptr,
        num=num,
        border=border,
        room=room,
        min_z=min_z,
        seed=seed,
        salt=salt,
        noisy=True,
        HAS_IDS=HAS_IDS,
        BLOCK=BLOCK,
    )


@triton.jit
def sample_kernel(
    z_ptr,
    seeds_ptr,
    top_k_ptr,
    top_p_ptr,
    min_z_ptr,
    tokens_ptr,
    near_ptr,
    ids_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Draw tokens [S] from z [S, VOCAB]; near and ids [S, CAPACITY] are scratch memory."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * VOCAB
    near_ptr += row * CAPACITY
    ids_ptr += row * CAPACITY
    seed = tl.load(seeds_ptr + 2 * row)
    salt = tl.load(seeds_ptr + 2 * row + 1)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_z = tl.load(min_z_ptr + row)
    cuts_k = (top_k < VOCAB) & (top_k > 1)
    cuts_p = (top_p < 1.0) & (top_k > 1)
    if cuts_k | cuts_p:
        total, limit, count = _survey(z_ptr, VOCAB, BLOCK, CAPACITY)
        _gather(z_ptr, near_ptr, ids_ptr, limit, VOCAB, BLOCK)
        tl.debug_barrier()  # threads load what other threads have stored
        _, mass = _down_to(near_ptr, count, limit, BLOCK)
        is_near = tl.where(cuts_k, count >= top_k, mass >= top_p * total)
        if is_near:
            token = _draw(
                z_ptr=near_ptr,
                ids_ptr=ids_ptr,
                num=count,
                deepest=limit,
                total=total,
                top_k=top_k,
                top_p=top_p,
                min_z=min_z,
                seed=seed,
                salt=salt,
                cuts_k=cuts_k,
                cuts_p=cuts_p,
                HAS_IDS=True,
                BLOCK=BLOCK,
            )
        else:
            token = _draw(
                z_ptr=z_ptr,
                ids_ptr=ids_ptr,
                num=VOCAB,
                deepest=INF_BITS,
                total=total,
                top_k=top_k,
                top_p=top_p,
                min_z=min_z,
                seed=seed,
                salt=salt,
                cuts_k=cuts_k,
                cuts_p=cuts_p,
                HAS_IDS=False,
                BLOCK=BLOCK,
            )
    else:
        token = _best(
            z_ptr=z_ptr,
            ids_ptr=ids_ptr,
            num=VOCAB,
            border=INF_BITS,
            room=0x7FFFFFFF,
            min_z=min_z,
            seed=seed,
            salt=salt,
            noisy=top_k > 1,
            HAS_IDS=False,
            BLOCK=BLOCK,
        )
    tl.store(tokens_ptr + row, token)
