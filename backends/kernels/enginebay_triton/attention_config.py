"""Block sizes of paged attention: the default for a problem, and the candidates to time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from enginebay.contracts.cache import KVLayout
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay_triton.targets import TARGETS, shared_bytes_per_block

DETERMINISTIC_CHUNK = 512
"""Positions per split in deterministic mode. The number does not depend on the batch, so that a
row's sums are the same in every bucket.
"""

SHORTEST_SPLIT = 128
"""Positions per split, at least. A shorter split saves less time than its reduction costs."""

LONGEST_SPLIT = 4096
"""Positions per split, at most. With longer splits the whole batch would wait for one long row.
Splits that a shorter row leaves empty cost almost nothing.
"""


@dataclasses.dataclass(frozen=True)
class TritonAttentionConfig:
    """Tile sizes, the number of splits of the context, and options of the compiler.

    A tile has rows (one per token and query head) and keys. With `chunk` 0 the splits share each
    row's context evenly, at least SHORTEST_SPLIT positions each; otherwise each split has `chunk`
    positions. Page numbers take one pipeline stage, so loads overlap with arithmetic only from
    three stages on.
    """

    block_m: int
    block_n: int
    splits: int = 1
    chunk: int = 0
    num_warps: int = 4
    num_stages: int = 3


def next_power(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def column_blocks(spec: AttnSpec) -> tuple[int, int]:
    """Return the columns of a key tile: those as wide as the values, and the remaining ones."""
    rest = spec.head_dim - spec.v_dim
    return max(16, next_power(spec.v_dim)), max(16, next_power(rest)) if rest else 0


def default_config(
    env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
) -> TritonAttentionConfig:
    """Return tiles for the head size and dtype.

    The number of splits lets a small batch fill the device. The number of stages is the largest
    that shared memory holds.
    """
    config, room = _preferred(env, spec, bucket), shared_bytes_per_block(env.arch)
    while config.num_stages > 1 and _shared_bytes(config, spec, bucket) > room:
        config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    return config


def _preferred(env: Env, spec: AttnSpec, bucket: Bucket) -> TritonAttentionConfig:
    width = sum(column_blocks(spec))
    # Full-precision f32 products use no tensor cores and many registers.
    wide = spec.kv_dtype == "float32"
    group = max(16, next_power(spec.group))
    if bucket.mode == "decode":
        block_n = (16 if width > 64 else 32) if wide else (64 if width <= 128 else 32)
        chunk = DETERMINISTIC_CHUNK if spec.deterministic else 0
        return TritonAttentionConfig(group, block_n, _splits(env, spec, bucket), chunk)
    # The largest tile of f32 products that does not spill differs between architectures.
    tight = wide and env.arch == "sm_90"
    most = (32 if tight else 16) if wide else (128 if width <= 128 else 64 if width <= 256 else 32)
    block_m = max(group, min(most, next_power(bucket.tokens * spec.group)))
    # Older architectures keep the operands of products in registers, and unpacked codes need more.
    roomy = width <= 128 and env.arch in {"sm_90", "sm_100"} and spec.kv_storage != "uint4"
    block_n = 16 if wide else (64 if roomy else 32)
    many = wide or width > 128 or block_m >= 128
    return TritonAttentionConfig(
        block_m, block_n, num_warps=8 if many else 4, num_stages=2 if tight else 3
    )


def _splits(env: Env, spec: AttnSpec, bucket: Bucket) -> int:
    if spec.deterministic:
        return -(-bucket.max_kv_len // DETERMINISTIC_CHUNK)
    seen = bucket.max_kv_len if spec.window is None else min(spec.window, bucket.max_kv_len)
    num_cores = TARGETS[env.arch].num_cores if env.arch in TARGETS else TARGETS["sm_90"].num_cores
    wanted = next_power(-(-2 * num_cores // (bucket.seqs * spec.num_kv_heads)))
    return max(1, min(wanted, -(-seen // SHORTEST_SPLIT)), -(-seen // LONGEST_SPLIT))


def attention_candidates(
    env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
) -> Sequence[TritonAttentionConfig]:
    """Return the default, then its variants that fit the shared memory of the architecture."""
    first = default_config(env, spec, bucket, layout)
    decode = bucket.mode == "decode"
    rows = (
        {first.block_m}
        if decode
        else {first.block_m, max(first.block_m // 2, 16, next_power(spec.group))}
    )
    keys = {first.block_n // 2, first.block_n, first.block_n * 2} - {8}
    free = decode and not spec.deterministic
    splits = {first.splits, max(first.splits // 2, 1), first.splits * 2} if free else {first.splits}
    found = [
        dataclasses.replace(
            first, block_m=m, block_n=n, splits=split, num_warps=warps, num_stages=stages
        )
        for m in sorted(rows)
        for n in sorted(keys)
        for split in sorted(splits)
        for warps in (2, 4, 8)
        for stages in (2, 3, 4, 5)
    ]
    room = shared_bytes_per_block(env.arch)
    able = [config for config in found if _shared_bytes(config, spec, bucket) <= room]
    return [first, *(config for config in able if config != first)]


def _shared_bytes(config: TritonAttentionConfig, spec: AttnSpec, bucket: Bucket) -> int:
    """Return an upper estimate: queries, scores, and a tile of keys and values per stage.

    In a decode, one stage holds page numbers only. With more queries that stage keeps a tile too.
    """
    width = sum(column_blocks(spec))
    size = 4 if spec.kv_dtype == "float32" else 2
    tiles = max(1, config.num_stages - (bucket.mode == "decode"))
    scores = 4 * config.block_m * config.block_n + 1024
    arrays = 1 if spec.v_is_k_prefix else 2
    return width * size * (config.block_m + arrays * config.block_n * tiles) + scores
