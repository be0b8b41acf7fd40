"""The Triton kernel of flash prefill: packed rows without a prefix. Nothing but Triton is imported.

Online softmax in base 2 (Milakov and Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691).
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
"""The maximum of zero scores. It is finite, so that the difference of two is a number."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _capped(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP)."""
    return CAP * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / CAP))))


@triton.jit
def _attend(
    query,
    k_ptr,
    v_ptr,
    positions,
    num_keys,
    first,
    last,
    highest,
    total,
    out,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add keys `first` to `last` to the running (highest, total, out) and return these.

    `last` - `first` is a multiple of BLOCK_N. Without MASKED every query sees every key.
    """
    at = tl.arange(0, BLOCK_N)[:, None] * STRIDE + tl.arange(0, HEAD_DIM)[None, :]
    for begin in range(first, last, BLOCK_N):
        keys = begin + tl.arange(0, BLOCK_N)
        ahead = tl.cast(begin, tl.int64) * STRIDE
        if MASKED:
            inside = (keys < num_keys)[:, None]
            key = tl.load(k_ptr + ahead + at, mask=inside, other=0.0)
            value = tl.load(v_ptr + ahead + at, mask=inside, other=0.0)
        else:
            key = tl.load(k_ptr + ahead + at)
            value = tl.load(v_ptr + ahead + at)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if CAP > 0:
            scores = _capped(scores * SCALE, CAP) * LOG2_E
        else:
            scores = scores * (SCALE * LOG2_E)
        if MASKED:
            seen = (keys < num_keys)[None, :] & (positions >= 0)[:, None]
            if CAUSAL:
                seen = seen & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, LOWEST)
            now = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.where(seen, tl.exp2(scores - now[:, None]), 0.0)
        else:
            now = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - now[:, None])
        shrink = tl.exp2(highest - now)
        highest = now
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None], input_precision="ieee")
    return highest, total, out


@triton.jit
def flash_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    starts_ptr,
    block_rows_ptr,
    block_firsts_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    NUM_ROWS: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    RETURN_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each program computes BLOCK_M tokens of one row for one query head.

    starts [NUM_ROWS + 2] has the first packed token of each row, then that of the padding, then the
    number of tokens. Block b has the tokens from block_firsts[b] on of row block_rows[b]. Row
    NUM_ROWS is the padding, which sees no keys, so its output is 0. A block that begins after the
    end of its row does nothing.
    """
    head = tl.program_id(0)
    block = (
        tl.num_programs(1) - 1 - tl.program_id(1)
    )  # the last blocks of rows see the most keys, so they run first
    row = tl.load(block_rows_ptr + block)
    first = tl.load(block_firsts_ptr + block)
    start = tl.load(starts_ptr + row).to(tl.int64)
    length = (tl.load(starts_ptr + row + 1) - start).to(tl.int32)
    if first < length:
        tokens = first + tl.arange(0, BLOCK_M)
        features = tl.arange(0, HEAD_DIM)
        live = tokens < length
        num_keys = tl.where(row < NUM_ROWS, length, 0)
        at = (
            (start + tokens)[:, None] * (NUM_Q_HEADS * HEAD_DIM)
            + head * HEAD_DIM
            + features[None, :]
        )
        query = tl.load(q_ptr + at, mask=live[:, None] & (num_keys > 0), other=0.0)
        positions = tl.where(live, tokens, -1)

        stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
        kv_head = head // (NUM_Q_HEADS // NUM_KV_HEADS)
        k_row = k_ptr + start * stride + kv_head * HEAD_DIM
        v_row = v_ptr + start * stride + kv_head * HEAD_DIM

        # All tokens of the block see keys begin..full_last; some see full_last..last.
        begin = 0
        last = num_keys
        full_last = num_keys // BLOCK_N * BLOCK_N
        if CAUSAL:
            last = tl.minimum(num_keys, first + BLOCK_M)
            full_last = tl.minimum(full_last, (first + 1) // BLOCK_N * BLOCK_N)
        if first + BLOCK_M > length:  # tokens after the end of the row see no keys
            full_last = 0
        if WINDOW > 0:
            begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            full_last = begin  # one masked loop: three would not fit the registers

        highest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SINKS:
            highest = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head) * LOG2_E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
        out = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        if WINDOW == 0:
            highest, total, out = _attend(
                query=query,
                k_ptr=k_row,
                v_ptr=v_row,
                positions=positions,
                num_keys=num_keys,
                first=begin,
                last=full_last,
                highest=highest,
                total=total,
                out=out,
                STRIDE=stride,
                HEAD_DIM=HEAD_DIM,
                SCALE=SCALE,
                CAP=CAP,
                CAUSAL=CAUSAL,
                WINDOW=WINDOW,
                BLOCK_N=BLOCK_N,
                MASKED=False,
            )
        highest, total, out = _attend(
            query=query,
            k_ptr=k_row,
            v_ptr=v_row,
            positions=positions,
            num_keys=num_keys,
            first=full_last,
            last=last,
            highest=highest,
            total=total,
            out=out,
            STRIDE=stride,
            HEAD_DIM=HEAD_DIM,
            SCALE=SCALE,
            CAP=CAP,
            CAUSAL=CAUSAL,
            WINDOW=WINDOW,
            BLOCK_N=BLOCK_N,
            MASKED=True,
        )

        whole = tl.where(total == 0.0, 1.0, total)
        out = tl.where(num_keys > 0, out / whole[:, None], 0.0)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=live[:, None])
        if RETURN_LSE:
            lse = (highest + tl.log2(whole)) * LN_2
            tl.store(lse_ptr + (start + tokens) * NUM_Q_HEADS + head, lse, mask=live)
