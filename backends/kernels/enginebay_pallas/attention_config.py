"""Block sizes of paged attention: the defaults by TPU generation and shape, and the candidates to
time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from enginebay.contracts.cache import KVLayout
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay_pallas.generations import LANES, generation, round_up, sublanes

DECODE_BUFFER_BYTES = 8 << 20
"""Bytes of each of the two buffers of a decode step. They hide the latency of a DMA."""

CHUNK_BUFFER_BYTES = 2 << 20
"""Bytes of each of the two buffers of a step with several tokens per row. Such a step computes more
than it reads.
"""

SCORE_ROWS = 256
"""Query rows (tokens times query heads) per KV head in the scores of one chunk."""

SCORE_COLUMNS = 512
"""Keys per chunk of scores."""


@dataclasses.dataclass(frozen=True)
class PallasAttentionConfig:
    """Block sizes in tokens.

    A unit of work has `block_q` new tokens of a row, a power of two. A DMA buffer holds `block_kv`
    tokens where rows have several new tokens, and `decode_block_kv` where they have one. Scores are
    computed for `chunk_kv` keys at a time; `chunk_kv` divides both buffer sizes.
    """

    block_q: int
    block_kv: int
    decode_block_kv: int
    chunk_kv: int
    vmem_limit_bytes: int


def default_config(
    env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
) -> PallasAttentionConfig:
    """Return block sizes for the generation's memory and the bucket's lengths.

    They are small where the kernel will be interpreted.
    """
    budget = generation(env.arch if env.platform == "tpu" else "").vmem_limit_bytes
    if env.platform != "tpu":
        block = 2 * layout.page_size if layout.page_size <= 32 else layout.page_size
        return PallasAttentionConfig(16, block, block, block, budget)
    token_bytes = _token_bytes(layout)
    longest = round_up(bucket.max_kv_len, layout.page_size)
    chunk = _chunk(layout.page_size, min(SCORE_COLUMNS, longest))
    block_kv, decode_block_kv = (
        max(chunk, min(target // token_bytes, longest) // chunk * chunk)
        for target in (min(CHUNK_BUFFER_BYTES, budget // 8), min(DECODE_BUFFER_BYTES, budget // 4))
    )
    block_q = _power_below(SCORE_ROWS // spec.group)
    block_q = max(16, min(128, block_q, _power_below(2 * bucket.max_q_len - 1)))
    config = PallasAttentionConfig(block_q, block_kv, decode_block_kv, chunk, budget)
    while vmem_bytes(config, spec, layout) > budget and config.block_q > 16:
        config = dataclasses.replace(config, block_q=config.block_q // 2)
    return config


def attention_candidates(
    env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
) -> Sequence[PallasAttentionConfig]:
    """Return the default and its neighbours that fit the memory, for the tuner."""
    first = default_config(env, spec, bucket, layout)
    found = [first]
    if bucket.mode == "decode":
        tried = [
            dataclasses.replace(
                first, chunk_kv=chunk, decode_block_kv=chunk * blocks, block_kv=chunk
            )
            for chunk in (first.chunk_kv // 2, first.chunk_kv, 2 * first.chunk_kv)
            for blocks in (1, 2, 4, 8)
        ]
    else:
        tried = [
            dataclasses.replace(
                first, block_q=block_q, chunk_kv=chunk, block_kv=chunk, decode_block_kv=chunk
            )
            for block_q in (16, 32, 64, 128)
            for chunk in (first.chunk_kv // 2, first.chunk_kv, 2 * first.chunk_kv)
        ]
    for config in tried:
        whole_pages = (
            config.chunk_kv >= layout.page_size and config.chunk_kv % layout.page_size == 0
        )
        if (
            config not in found
            and whole_pages
            and vmem_bytes(config, spec, layout) <= first.vmem_limit_bytes
        ):
            found.append(config)
    return found


def vmem_bytes(config: PallasAttentionConfig, spec: AttnSpec, layout: KVLayout) -> int:
    """Estimate the VMEM, in bytes, of the larger of the two kernels of a configuration."""
    width = round_up(spec.head_dim, LANES)
    itemsize = jnp.dtype(spec.q_dtype).itemsize
    needs = []
    for rows, block_kv in (
        (round_up(spec.group, sublanes(spec.q_dtype)), config.decode_block_kv),
        (spec.group * config.block_q, config.block_kv),
    ):
        state = spec.num_kv_heads * rows * (width + 2 * LANES) * 4
        queries = 4 * spec.num_kv_heads * rows * width * itemsize
        scores = 4 * rows * config.chunk_kv * 4 + 4 * config.chunk_kv * width * 4
        needs.append(2 * block_kv * _token_bytes(layout) + state + queries + scores)
    return max(needs)


def _token_bytes(layout: KVLayout) -> int:
    return layout.num_bytes() // (layout.num_pages * layout.page_size)


def _chunk(page_size: int, most: int) -> int:
    """Return the tokens of the most whole pages that fit into `most` tokens; at least one page."""
    return max(1, most // page_size) * page_size


def _power_below(number: int) -> int:
    """Return the largest power of two that is at most `number`, which is at least 1."""
    return 1 << (max(1, number).bit_length() - 1)
