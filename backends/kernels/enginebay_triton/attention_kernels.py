"""Paged attention: one kernel for decode, prefill and mixed steps, and the reduction over splits of
the context.

A program computes one KV head, a block of a row's queries and one split of the row's context. It
goes through the split tile by tile, with a running maximum and sum (FlashAttention-2, arXiv
2307.08691). `reduce_kernel` then combines the splits (Flash-Decoding). The rows of a tile are pairs
(token, query head of the group), so that one read of K and V serves the group. In a latent cache
the values are the first columns of the keys: a tile is read once, and the value columns and the
other columns are multiplied separately.

A quantised cache has codes, and a scale and perhaps a zero point for each key and value. The kernel
multiplies codes. Scales of keys multiply the scores, and scales of values the weights.

This module imports Triton only, because the process of the interpreter loads it too.
"""

import triton
import triton.language as tl

from enginebay_triton.number_kernels import from_bf16, from_fp8

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
MASKED: tl.constexpr = tl.constexpr(-1.0e30)
"""Score of a masked key. It is finite, so that the difference of two is 0 and not NaN."""


@triton.jit
def find_row(
    cu_q_lens_ptr, block, NUM_ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, STEPS: tl.constexpr
):
    """Return the row of a block of queries.

    The blocks of row r begin at cu_q_lens[r] // BLOCK_Q + r.
    """
    low = 0
    high = NUM_ROWS
    for _ in range(STEPS):
        middle = (low + high + 1) // 2
        start = tl.load(cu_q_lens_ptr + middle) // BLOCK_Q + middle
        low = tl.where(start <= block, middle, low)
        high = tl.where(start <= block, high, middle - 1)
    return low


@triton.jit
def _share(start, stop, split, SPLITS: tl.constexpr, CHUNK: tl.constexpr, SHORTEST: tl.constexpr):
    """Return (first, end): the positions between `start` and `stop` that a split reads.

    The split is empty when first >= end. With CHUNK 0 the splits share the positions evenly, at
    least SHORTEST each; otherwise split i has the positions from i * CHUNK on.
    """
    if CHUNK > 0:
        first = tl.maximum(start, split * CHUNK)
        end = tl.minimum(stop, split * CHUNK + CHUNK)
    else:
        share = tl.maximum(tl.cdiv(tl.cdiv(stop - start, SPLITS), SHORTEST) * SHORTEST, SHORTEST)
        first = start + split * share
        end = tl.minimum(stop, first + share)
    return first, end


@triton.jit
def _is_part(start, stop, split, SPLITS: tl.constexpr, CHUNK: tl.constexpr, SHORTEST: tl.constexpr):
    """Return whether a split wrote a result: it is the first one, or it is not empty."""
    first, end = _share(start, stop, split, SPLITS, CHUNK, SHORTEST)
    return (split < SPLITS) & ((first < end) | (split == 0))


@triton.jit
def _first_key(query, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the position where the tiles of a query begin.

    It is a multiple of BLOCK_N, so that a tile lies in one page if pages are multiples of BLOCK_N.
    """
    first = 0
    if WINDOW > 0:
        first = tl.maximum(query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _pages(table, tile, stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page numbers of a tile.

    The result is one number, or [BLOCK_N / PAGE_SIZE] numbers, or [BLOCK_N] where neither size
    divides the other.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table + tile // PAGE_SIZE, mask=tile < stop, other=0)
    elif BLOCK_N % PAGE_SIZE == 0:
        first = tile + PAGE_SIZE * tl.arange(0, BLOCK_N // PAGE_SIZE)
        return tl.load(table + first // PAGE_SIZE, mask=first < stop, other=0)
    else:
        at = tile + tl.arange(0, BLOCK_N)
        return tl.load(table + at // PAGE_SIZE, mask=at < stop, other=0)


@triton.jit
def _offsets(
    pages,
    tile,
    kv_head,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the offset of each key of a tile in the cache: [BLOCK_N], in elements."""
    if PAGE_SIZE % BLOCK_N != 0 and BLOCK_N % PAGE_SIZE == 0:
        inside = tl.arange(0, PAGE_SIZE)[None, :]
        pages = pages[:, None]
    else:
        inside = (tile + tl.arange(0, BLOCK_N)) % PAGE_SIZE
    if PAGE_STRIDE >= 2**31:  # the offset of a page may need more than 32 bits
        inside = inside.to(tl.int64)
        kv_head = kv_head.to(tl.int64)
    offset = pages.to(tl.int64) * PAGE_STRIDE + inside * TOKEN_STRIDE + kv_head * HEAD_STRIDE
    if PAGE_SIZE % BLOCK_N != 0 and BLOCK_N % PAGE_SIZE == 0:
        offset = tl.reshape(offset, [BLOCK_N])
    return offset


@triton.jit
def _load(start_ptr, rows, columns, is_row, is_column):
    """Load a tile at the offsets `rows` + `columns`; 0 where `is_row` or `is_column` is false."""
    return tl.load(
        start_ptr + rows[:, None] + columns[None, :],
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    )


@triton.jit
def _load_keys(
    k_ptr, features, offset, is_feature, is_key, HALF: tl.constexpr, STORAGE: tl.constexpr
):
    """Load features of keys: a tile [features, BLOCK_N] of numbers or codes, 0 where masked."""
    if STORAGE == "halves":
        k = _load(k_ptr, features % HALF, offset, is_feature, is_key)
        k = ((k >> (features // HALF * 4).to(tl.uint8)[:, None]) & 15).to(tl.int8)
    else:
        k = _load(k_ptr, features, offset, is_feature, is_key)
        if STORAGE == "fp8":
            k = from_fp8(k)
    return k


@triton.jit
def _keys_and_values(
    k_ptr,
    v_ptr,
    features,
    offset,
    is_feature,
    is_key,
    HALF: tl.constexpr,
    STORAGE: tl.constexpr,
    V_IS_K_PREFIX: tl.constexpr,
):
    """Load keys [features, BLOCK_N] and values [BLOCK_N, features]."""
    k = _load_keys(
        k_ptr=k_ptr,
        features=features,
        offset=offset,
        is_feature=is_feature,
        is_key=is_key,
        HALF=HALF,
        STORAGE=STORAGE,
    )
    # A stale value may be NaN, and 0 * NaN is NaN. So masked values are loaded as 0.
    if V_IS_K_PREFIX:
        v = tl.trans(k)
    elif STORAGE == "halves":
        v = _load(v_ptr, offset, features % HALF, is_key, is_feature)
        v = ((v >> (features // HALF * 4).to(tl.uint8)[None, :]) & 15).to(tl.int8)
    else:
        v = _load(v_ptr, offset, features, is_key, is_feature)
        if STORAGE == "nibbles":
            # The bytes are loaded twice, the second time from the cache of the GPU: the compiler
            # starts no copies ahead for a load that is used in two ways.
            k, v = (k & 15).to(tl.int8), (v >> 4).to(tl.int8)
        elif STORAGE == "fp8":
            v = from_fp8(v)
    return k, v


@triton.jit
def _factors(scales_ptr, zeros_ptr, at, is_key, STORAGE: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Load scales and zero points [BLOCK_N] in f32, 0 for masked keys; a cache of numbers has
    none.
    """
    scales = tl.zeros(at.shape, tl.float32)
    zeros = scales
    if STORAGE != "plain":
        scales = from_bf16(tl.load(scales_ptr + at, mask=is_key, other=0))
    if HAS_ZEROS:
        zeros = tl.load(zeros_ptr + at, mask=is_key, other=0).to(tl.float32)
    return scales, zeros


@triton.jit
def _sums(q, HAS_ZEROS: tl.constexpr):
    """Return the sum of each query in f32, 0 where no zero point is multiplied by it."""
    return tl.sum(q.to(tl.float32), 1) if HAS_ZEROS else tl.zeros([q.shape[0]], tl.float32)


@triton.jit
def _scores(
    products,
    q_sum,
    scales,
    zeros,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORAGE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """Return the scores of products [BLOCK_M, BLOCK_N] of queries and keys, times log2 e."""
    score = products
    if HAS_ZEROS:
        score -= q_sum[:, None] * zeros[None, :]
    if STORAGE != "plain":
        score *= scales[None, :]
    score = score * SCALE
    if SOFTCAP > 0.0:
        # tanh x = 1 - 2 / (exp 2x + 1)
        score = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(score * (2.0 * LOG2_E / SOFTCAP)) + 1.0)
    return score * LOG2_E


@triton.jit
def _add_values(
    acc, total, weight, v, scales, zeros, STORAGE: tl.constexpr, HAS_ZEROS: tl.constexpr
):
    """Return acc [BLOCK_M, BLOCK_D] plus the product of weights and values [BLOCK_N, BLOCK_D], and
    total [BLOCK_M] plus the sum of the weights.
    """
    if STORAGE == "plain":
        # The sum adds the rounded weights: the ones that V is multiplied with.
        rounded = weight.to(v.dtype)
        acc = tl.dot(rounded, v, acc, input_precision="ieee")
        total += tl.sum(rounded.to(tl.float32), 1)
    else:
        # Weights times small scales would be subnormal in float16. So scales are divided by the
        # largest one.
        largest = 1.0
        if v.dtype == tl.float16:
            largest = tl.max(scales, 0)
            scales = scales / tl.where(largest > 0.0, largest, 1.0)
        rounded = (weight * scales[None, :]).to(v.dtype)
        part = tl.dot(rounded, v, input_precision="ieee")
        if HAS_ZEROS:
            part -= tl.sum(rounded.to(tl.float32) * zeros[None, :], 1)[:, None]
        acc += part * largest
        total += tl.sum(weight, 1)
    return acc, total


@triton.jit
def _seen(seen, key, query, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return `seen` [BLOCK_M, BLOCK_N] restricted by the causal mask and the window."""
    if CAUSAL:
        seen = seen & (key[None, :] <= query[:, None])
    if WINDOW > 0:
        seen = seen & (key[None, :] > query[:, None] - WINDOW)
    return seen


@triton.jit
def attention_kernel(
    q_ptr,  # [tokens, NUM_KV_HEADS * GROUP, HEAD_DIM]
    k_ptr,
    v_ptr,
    page_table_ptr,  # [NUM_ROWS, PAGES_PER_ROW]
    kv_lens_ptr,  # [NUM_ROWS]
    cu_q_lens_ptr,  # [NUM_ROWS + 1]
    sinks_ptr,  # [query heads]; not read without sinks
    k_scales_ptr,  # bits of bfloat16; they and the zero points int16 are read in a quantised cache
    v_scales_ptr,
    k_zeros_ptr,
    v_zeros_ptr,
    # [tokens, query heads, V_DIM], of splits [tokens, SPLITS, query heads, BLOCK_D] f32
    out_ptr,
    max_ptr,  # f32 [tokens, SPLITS, query heads]
    sum_ptr,  # the same; of one split the log-sum-exp
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_DECODE: tl.constexpr, NUM_TOKENS: tl.constexpr,
    NUM_ROWS: tl.constexpr, PAGES_PER_ROW: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    V_IS_K_PREFIX: tl.constexpr, PAGE_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, V_OFFSET: tl.constexpr, STORAGE: tl.constexpr, HALF: tl.constexpr,
    HAS_ZEROS: tl.constexpr, SCALES_PAGE: tl.constexpr, SCALES_TOKEN: tl.constexpr,
    SCALES_HEAD: tl.constexpr, V_SCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, SHORTEST: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute one split of one block of queries; the module docstring describes the algorithm.

    `_share` describes SPLITS, CHUNK and SHORTEST. An empty split writes nothing, unless it is the
    first. BLOCK_REST is the block of key columns after the first V_DIM.

    STORAGE is "plain" for a cache of numbers, "int8" for codes of a byte, "fp8" for the bits of
    float8_e4m3fn, "nibbles" for bytes with a key's code in the low and a value's code in the high
    four bits, and "halves" for bytes with the codes of the features i and HALF + i. V_SCALE is the
    distance of a value's scale from that of its key.
    """
    NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if IS_DECODE:
        row = block
        kv_len = tl.load(kv_lens_ptr + row)
        first_token = row
        q_len = 1
        first_query = 0
    else:
        row = find_row(cu_q_lens_ptr, block, NUM_ROWS, BLOCK_Q, STEPS)
        begin = tl.load(cu_q_lens_ptr + row)
        is_row = row < NUM_ROWS  # tokens after the last row are padding; their outputs are zeros
        end = tl.load(cu_q_lens_ptr + row + 1, mask=is_row, other=NUM_TOKENS)
        kv_len = tl.load(kv_lens_ptr + row, mask=is_row, other=0)
        q_len = end - begin
        first_query = (block - begin // BLOCK_Q - row) * BLOCK_Q
        if first_query >= q_len:
            return
        first_token = begin + first_query
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    head = kv_head * GROUP + m % GROUP
    query = first_query + m // GROUP
    is_query = (m < BLOCK_Q * GROUP) & (query < q_len)
    is_feature = d < V_DIM
    place = ((first_token + m // GROUP) * NUM_Q_HEADS + head).to(tl.int64)
    q = _load(q_ptr, place * HEAD_DIM, d, is_query, is_feature)
    if BLOCK_REST > 0:
        rest = V_DIM + tl.arange(0, BLOCK_REST)
        is_rest = rest < HEAD_DIM
        q_rest = _load(q_ptr, place * HEAD_DIM, rest, is_query, is_rest)
    position = kv_len - q_len + query
    q_sum = _sums(q, HAS_ZEROS)
    if BLOCK_REST > 0:
        q_sum += _sums(q_rest, HAS_ZEROS)  # type: ignore[possibly-undefined]
    if CAUSAL:
        stop = tl.minimum(kv_len, kv_len - q_len + first_query + BLOCK_Q)
    else:
        stop = kv_len
    start = _first_key(kv_len - q_len + first_query, WINDOW, BLOCK_N)
    if SPLITS > 1:
        start, stop = _share(start, stop, split, SPLITS, CHUNK, SHORTEST)
        if (start >= stop) & (split > 0):
            return

    largest = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_SINKS:
        if split == 0:
            largest = tl.load(sinks_ptr + head, mask=is_query, other=MASKED) * LOG2_E
            total = total + 1.0
    table = page_table_ptr + row.to(tl.int64) * PAGES_PER_ROW
    # Page numbers are read one tile ahead. The compiler overlaps loads of keys only when their
    # addresses are known already.
    pages = _pages(table, start, stop, PAGE_SIZE, BLOCK_N)
    for tile in range(start, stop, BLOCK_N):
        at = tile + n
        is_key = at < stop
        offset = _offsets(
            pages=pages, tile=tile, kv_head=kv_head, PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=PAGE_STRIDE,
            TOKEN_STRIDE=TOKEN_STRIDE, HEAD_STRIDE=HEAD_STRIDE, BLOCK_N=BLOCK_N,
        )  # fmt: skip
        at_scales = _offsets(
            pages=pages, tile=tile, kv_head=kv_head, PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=SCALES_PAGE,
            TOKEN_STRIDE=SCALES_TOKEN, HEAD_STRIDE=SCALES_HEAD, BLOCK_N=BLOCK_N,
        )  # fmt: skip
        pages = _pages(table, tile + BLOCK_N, stop, PAGE_SIZE, BLOCK_N)
        k, v = _keys_and_values(
            k_ptr=k_ptr, v_ptr=v_ptr + V_OFFSET, features=d, offset=offset, is_feature=is_feature,
            is_key=is_key, HALF=HALF, STORAGE=STORAGE, V_IS_K_PREFIX=V_IS_K_PREFIX,
        )  # fmt: skip
        score = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if BLOCK_REST > 0:
            k_rest = _load_keys(
                features=rest, is_feature=is_rest,  # type: ignore[possibly-undefined]
                k_ptr=k_ptr, offset=offset, is_key=is_key, HALF=HALF, STORAGE=STORAGE,
            )  # fmt: skip
            score = tl.dot(q_rest, k_rest.to(q.dtype), score, input_precision="ieee")  # type: ignore[possibly-undefined]
        scales, zeros = _factors(k_scales_ptr, k_zeros_ptr, at_scales, is_key, STORAGE, HAS_ZEROS)
        score = _scores(
            products=score, q_sum=q_sum, scales=scales, zeros=zeros, SCALE=SCALE, SOFTCAP=SOFTCAP,
            STORAGE=STORAGE, HAS_ZEROS=HAS_ZEROS)  # fmt: skip
        seen = _seen(is_key[None, :] & is_query[:, None], at, position, CAUSAL, WINDOW)
        score = tl.where(seen, score, MASKED)
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.where(seen, tl.exp2(score - new_largest[:, None]), 0.0)
        shrink = tl.exp2(largest - new_largest)
        at_scales += V_SCALE
        scales, zeros = _factors(v_scales_ptr, v_zeros_ptr, at_scales, is_key, STORAGE, HAS_ZEROS)
        acc, total = _add_values(
            acc=acc * shrink[:, None], total=total * shrink, weight=weight, v=v.to(q.dtype),
            scales=scales, zeros=zeros, STORAGE=STORAGE, HAS_ZEROS=HAS_ZEROS,
        )  # fmt: skip
        largest = new_largest
    if SPLITS == 1:
        is_empty = total == 0.0
        out = acc / tl.where(is_empty, 1.0, total)[:, None]
        tl.store(
            out_ptr + place[:, None] * V_DIM + d[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=is_query[:, None] & is_feature[None, :],
        )
        lse = (largest + tl.log2(tl.where(is_empty, 1.0, total))) * LN_2
        tl.store(sum_ptr + place, lse, mask=is_query)
    else:
        part = ((row * SPLITS + split) * NUM_Q_HEADS + head).to(tl.int64)
        tl.store(out_ptr + part[:, None] * BLOCK_D + d[None, :], acc, mask=is_query[:, None])
        tl.store(max_ptr + part, largest, mask=is_query)
        tl.store(sum_ptr + part, total, mask=is_query)


@triton.jit
def reduce_kernel(
    parts_ptr,  # f32 [rows, SPLITS, NUM_Q_HEADS, BLOCK_D]
    max_ptr,  # f32 [rows, SPLITS, NUM_Q_HEADS]
    sum_ptr,
    kv_lens_ptr,  # [rows]
    out_ptr,  # [rows, NUM_Q_HEADS, V_DIM]
    lse_ptr,  # f32 [rows, NUM_Q_HEADS]
    NUM_Q_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
):
    """Combine the non-empty splits of a row and head, BLOCK_S at a time.

    Empty splits are not read. ALL_SPLITS is SPLITS rounded up to a power of two.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    stop = tl.load(kv_lens_ptr + row)
    start = _first_key(stop - 1, WINDOW, BLOCK_N)
    base = row.to(tl.int64) * SPLITS * NUM_Q_HEADS + head
    every = tl.arange(0, ALL_SPLITS)
    is_written = _is_part(start, stop, every, SPLITS, CHUNK, SHORTEST)
    largest = tl.max(
        tl.load(max_ptr + base + every * NUM_Q_HEADS, mask=is_written, other=MASKED), 0
    )
    num_written = tl.max(tl.where(is_written, every + 1, 0), 0)
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for block in range(0, num_written, BLOCK_S):
        split = block + tl.arange(0, BLOCK_S)
        is_part = _is_part(start, stop, split, SPLITS, CHUNK, SHORTEST)
        at = base + split * NUM_Q_HEADS
        weight = tl.exp2(tl.load(max_ptr + at, mask=is_part, other=MASKED) - largest)
        weight = tl.where(is_part, weight, 0.0)
        total += tl.sum(tl.load(sum_ptr + at, mask=is_part, other=0.0) * weight, 0)
        parts = tl.load(
            parts_ptr + at[:, None] * BLOCK_D + d[None, :], mask=is_part[:, None], other=0.0
        )
        acc += tl.sum(parts * weight[:, None], 0)
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    place = (row * NUM_Q_HEADS + head).to(tl.int64)
    tl.store(
        out_ptr + place * V_DIM + d,
        (acc / total).to(out_ptr.dtype.element_ty),
        mask=d < V_DIM,
    )
    tl.store(lse_ptr + place, (largest + tl.log2(total)) * LN_2)
