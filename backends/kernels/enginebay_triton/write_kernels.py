"""Triton kernels that write the cache: kv_write, and rope_kv_write, which also rotates. They import
Triton only.

Constants describe a layout by strides in elements: TOKEN and HEAD within a page, PAGE between pages
of PAGE_SIZE tokens. In layout nhd keys and values share an array, and a value is V_OFFSET elements
behind its key. In layout hnd there are two arrays, and V_OFFSET is 0.
"""

import triton
import triton.language as tl


@triton.jit
def _place(slot, PAGE_SIZE: tl.constexpr, PAGE: tl.constexpr, TOKEN: tl.constexpr):
    """Return the offset of a slot in an array; the slot must not be negative."""
    slot = tl.maximum(slot, 0).to(tl.int64)
    return slot // PAGE_SIZE * PAGE + slot % PAGE_SIZE * TOKEN


@triton.jit
def _copy_heads(from_ptr, to_ptr, heads, inside, FROM_HEAD: tl.constexpr, TO_HEAD: tl.constexpr,
                FIRST: tl.constexpr,
                LAST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy features FIRST to LAST of some heads unchanged."""
    features = FIRST + tl.arange(0, BLOCK)
    mask = inside[:, None] & (features < LAST)[None, :]
    values = tl.load(
        from_ptr + heads[:, None] * FROM_HEAD + features[None, :], mask=mask, other=0.0
    )
    tl.store(
        to_ptr + heads[:, None].to(tl.int64) * TO_HEAD + features[None, :],
        values.to(to_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _rotate_heads(
    from_ptr,
    to_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    inside,
    FROM_HEAD: tl.constexpr,
    TO_HEAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Rotate some heads of a token by its cosines and sines [HALF].

    Features from 2 * HALF on are copied unchanged.
    """
    pairs = tl.arange(0, HALF_BLOCK)
    cos = tl.load(cos_ptr + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + pairs, mask=pairs < HALF, other=0.0)[None, :]
    mask = inside[:, None] & (pairs < HALF)[None, :]
    source = from_ptr + heads[:, None] * FROM_HEAD + pairs[None, :]
    target = to_ptr + heads[:, None].to(tl.int64) * TO_HEAD + pairs[None, :]
    narrow = from_ptr.dtype.element_ty
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = to_ptr.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(narrow).to(kind), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(narrow).to(kind), mask=mask)
    if REST_BLOCK > 0:
        _copy_heads(
            from_ptr=from_ptr,
            to_ptr=to_ptr,
            heads=heads,
            inside=inside,
            FROM_HEAD=FROM_HEAD,
            TO_HEAD=TO_HEAD,
            FIRST=2 * HALF,
            LAST=HEAD_DIM,
            BLOCK=REST_BLOCK,
        )


@triton.jit
def _rope_kv_write(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Each program handles HEADS heads of one token.

    The first programs of a token rotate queries, the others write keys and values.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS
    cos_ptr += token * HALF
    sin_ptr += token * HALF
    if block < q_blocks:
        heads = block * HEADS + tl.arange(0, HEADS)
        start = token * NUM_Q_HEADS * HEAD_DIM
        _rotate_heads(
            from_ptr=q_ptr + start,
            to_ptr=out_ptr + start,
            cos_ptr=cos_ptr,
            sin_ptr=sin_ptr,
            heads=heads,
            inside=heads < NUM_Q_HEADS,
            FROM_HEAD=HEAD_DIM,
            TO_HEAD=HEAD_DIM,
            HALF=HALF,
            HALF_BLOCK=HALF_BLOCK,
            HEAD_DIM=HEAD_DIM,
            REST_BLOCK=REST_BLOCK,
        )
    else:
        heads = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        slot = tl.load(slots_ptr + token)
        inside = (heads < NUM_KV_HEADS) & (slot >= 0)
        start = token * NUM_KV_HEADS * HEAD_DIM
        place = _place(slot, PAGE_SIZE, PAGE, TOKEN)
        _rotate_heads(
            from_ptr=k_ptr + start,
            to_ptr=k_cache_ptr + place,
            cos_ptr=cos_ptr,
            sin_ptr=sin_ptr,
            heads=heads,
            inside=inside,
            FROM_HEAD=HEAD_DIM,
            TO_HEAD=HEAD,
            HALF=HALF,
            HALF_BLOCK=HALF_BLOCK,
            HEAD_DIM=HEAD_DIM,
            REST_BLOCK=REST_BLOCK,
        )
        _copy_heads(
            from_ptr=v_ptr + start,
            to_ptr=v_cache_ptr + place,
            heads=heads,
            inside=inside,
            FROM_HEAD=HEAD_DIM,
            TO_HEAD=HEAD,
            FIRST=0,
            LAST=HEAD_DIM,
            BLOCK=DIM_BLOCK,
        )


@triton.jit
def rope_kv_write_nhd(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    kv_cache_ptr,
    _kv_cache,
    out_ptr,
    V_OFFSET: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Keys and values in one array."""
    _rope_kv_write(
        q_ptr=q_ptr,
        k_ptr=k_ptr,
        v_ptr=v_ptr,
        cos_ptr=cos_ptr,
        sin_ptr=sin_ptr,
        slots_ptr=slots_ptr,
        k_cache_ptr=kv_cache_ptr,
        v_cache_ptr=kv_cache_ptr + V_OFFSET,
        out_ptr=out_ptr,
        NUM_Q_HEADS=NUM_Q_HEADS,
        NUM_KV_HEADS=NUM_KV_HEADS,
        HEAD_DIM=HEAD_DIM,
        HALF=HALF,
        PAGE_SIZE=PAGE_SIZE,
        PAGE=PAGE,
        TOKEN=TOKEN,
        HEAD=HEAD,
        HEADS=HEADS,
        HALF_BLOCK=HALF_BLOCK,
        REST_BLOCK=REST_BLOCK,
        DIM_BLOCK=DIM_BLOCK,
    )


@triton.jit
def rope_kv_write_hnd(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    _k_cache,
    _v_cache,
    out_ptr,
    V_OFFSET: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Keys and values in two arrays; V_OFFSET is 0."""
    _rope_kv_write(
        q_ptr=q_ptr,
        k_ptr=k_ptr,
        v_ptr=v_ptr,
        cos_ptr=cos_ptr,
        sin_ptr=sin_ptr,
        slots_ptr=slots_ptr,
        k_cache_ptr=k_cache_ptr,
        v_cache_ptr=v_cache_ptr + V_OFFSET,
        out_ptr=out_ptr,
        NUM_Q_HEADS=NUM_Q_HEADS,
        NUM_KV_HEADS=NUM_KV_HEADS,
        HEAD_DIM=HEAD_DIM,
        HALF=HALF,
        PAGE_SIZE=PAGE_SIZE,
        PAGE=PAGE,
        TOKEN=TOKEN,
        HEAD=HEAD,
        HEADS=HEADS,
        HALF_BLOCK=HALF_BLOCK,
        REST_BLOCK=REST_BLOCK,
        DIM_BLOCK=DIM_BLOCK,
    )


@triton.jit
def _kv_write(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Each program writes HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots_ptr + token)
    inside = (heads < NUM_KV_HEADS) & (slot >= 0)
    start = token * NUM_KV_HEADS * HEAD_DIM
    place = _place(slot, PAGE_SIZE, PAGE, TOKEN)
    _copy_heads(
        from_ptr=k_ptr + start,
        to_ptr=k_cache_ptr + place,
        heads=heads,
        inside=inside,
        FROM_HEAD=HEAD_DIM,
        TO_HEAD=HEAD,
        FIRST=0,
        LAST=HEAD_DIM,
        BLOCK=DIM_BLOCK,
    )
    _copy_heads(
        from_ptr=v_ptr + start,
        to_ptr=v_cache_ptr + place,
        heads=heads,
        inside=inside,
        FROM_HEAD=HEAD_DIM,
        TO_HEAD=HEAD,
        FIRST=0,
        LAST=HEAD_DIM,
        BLOCK=DIM_BLOCK,
    )


@triton.jit
def kv_write_nhd(
    k_ptr,
    v_ptr,
    slots_ptr,
    kv_cache_ptr,
    _kv_cache,
    V_OFFSET: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Keys and values in one array."""
    _kv_write(
        k_ptr=k_ptr,
        v_ptr=v_ptr,
        slots_ptr=slots_ptr,
        k_cache_ptr=kv_cache_ptr,
        v_cache_ptr=kv_cache_ptr + V_OFFSET,
        NUM_KV_HEADS=NUM_KV_HEADS,
        HEAD_DIM=HEAD_DIM,
        PAGE_SIZE=PAGE_SIZE,
        PAGE=PAGE,
        TOKEN=TOKEN,
        HEAD=HEAD,
        HEADS=HEADS,
        DIM_BLOCK=DIM_BLOCK,
    )


@triton.jit
def kv_write_hnd(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    _k_cache,
    _v_cache,
    V_OFFSET: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Keys and values in two arrays; V_OFFSET is 0."""
    _kv_write(
        k_ptr=k_ptr,
        v_ptr=v_ptr,
        slots_ptr=slots_ptr,
        k_cache_ptr=k_cache_ptr,
        v_cache_ptr=v_cache_ptr + V_OFFSET,
        NUM_KV_HEADS=NUM_KV_HEADS,
        HEAD_DIM=HEAD_DIM,
        PAGE_SIZE=PAGE_SIZE,
        PAGE=PAGE,
        TOKEN=TOKEN,
        HEAD=HEAD,
        HEADS=HEADS,
        DIM_BLOCK=DIM_BLOCK,
    )


@triton.jit
def write_keys(
    k_ptr,
    slots_ptr,
    k_cache_ptr,
    _k_cache,
    V_OFFSET: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Write keys only, for caches whose values are a prefix of the keys."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots_ptr + token)
    inside = (heads < NUM_KV_HEADS) & (slot >= 0)
    place = _place(slot, PAGE_SIZE, PAGE, TOKEN)
    start = k_ptr + token * NUM_KV_HEADS * HEAD_DIM
    _copy_heads(
        from_ptr=start,
        to_ptr=k_cache_ptr + place,
        heads=heads,
        inside=inside,
        FROM_HEAD=HEAD_DIM,
        TO_HEAD=HEAD,
        FIRST=0,
        LAST=HEAD_DIM,
        BLOCK=DIM_BLOCK,
    )
