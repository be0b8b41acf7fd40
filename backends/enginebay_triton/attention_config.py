"""Block sizes of paged attention: the default for a problem, and those worth timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from enginebay.cache import KVLayout
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay_triton.targets import TARGETS, shared_bytes_per_block

DETERMINISTIC_CHUNK = 512
"""Positions of a split in deterministic mode, whatever the batch: a row's sums are then the same in
every bucket.
"""

SHORTEST_SPLIT = 128
"""A shorter share of the context does not pay for its reduction."""

LONGEST_SPLIT = 4096
"""A longer one lets all wait for a lone long row. Rows that are shorter leave splits empty, which
cost next to nothing.
"""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Rows (query heads of tokens) and keys of a tile, splits of the context, and the compiler's
    choices.

    `chunk` 0 shares each row's context out evenly over the splits, not below SHORTEST_SPLIT;
    otherwise a split is that many positions. Below three stages no load is in flight while another
    tile is computed: page numbers take a stage of their own.
    """

    block_m: int
    block_n: int
    splits: int = 1
    chunk: int = 0
    num_warps: int = 4
    num_stages: int = 3


def next_power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(number - 1, 0).bit_length()


def column_blocks(spec: AttnSpec) -> tuple[int, int]:
    """Columns that a tile has of keys that are as wide as values, and of what is behind them."""
    rest = spec.head_dim - spec.v_dim
    return max(16, next_power(spec.v_dim)), max(16, next_power(rest)) if rest else 0


def default_config(env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> AttentionConfig:
    """Tiles by head size and dtype; splits so that a small batch fills the device; as many stages
    as shared memory holds.
    """
    config, room = _preferred(env, spec, bucket), shared_bytes_per_block(env.arch)
    while config.num_stages > 1 and _shared_bytes(config, spec, bucket) > room:
        config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    return config


def _preferred(env: Env, spec: AttnSpec, bucket: Bucket) -> AttentionConfig:
    width = sum(column_blocks(spec))
    wide = spec.kv_dtype == "float32"  # true f32 products take no tensor cores, and many registers
    group = max(16, next_power(spec.group))
    if bucket.mode == "decode":
        block_n = (16 if width > 64 else 32) if wide else (64 if width <= 128 else 32)
        chunk = DETERMINISTIC_CHUNK if spec.deterministic else 0
        return AttentionConfig(group, block_n, _splits(env, spec, bucket), chunk)
    # True f32 products take many registers, and what does not spill differs from one architecture
    # to the next.
    tight = wide and env.arch == "sm_90"
    most = (32 if tight else 16) if wide else (128 if width <= 128 else 64 if width <= 256 else 32)
    block_m = max(group, min(most, next_power(bucket.tokens * spec.group)))
    roomy = width <= 128 and env.arch in {
        "sm_90",
        "sm_100",
    }  # others keep the products' operands in registers
    block_n = 16 if wide else (64 if roomy else 32)
    many = wide or width > 128 or block_m >= 128
    return AttentionConfig(
        block_m, block_n, num_warps=8 if many else 4, num_stages=2 if tight else 3
    )


def _splits(env: Env, spec: AttnSpec, bucket: Bucket) -> int:
    if spec.deterministic:
        return -(-bucket.max_kv_len // DETERMINISTIC_CHUNK)
    seen = bucket.max_kv_len if spec.window is None else min(spec.window, bucket.max_kv_len)
    num_cores = TARGETS[env.arch].num_cores if env.arch in TARGETS else TARGETS["sm_90"].num_cores
    wanted = next_power(-(-2 * num_cores // (bucket.seqs * spec.num_kv_heads)))
    return max(1, min(wanted, -(-seen // SHORTEST_SPLIT)), -(-seen // LONGEST_SPLIT))


def candidates(
    env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
) -> Sequence[AttentionConfig]:
    """The default first, then others of its kind that fit into the architecture's shared memory."""
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


def _shared_bytes(config: AttentionConfig, spec: AttnSpec, bucket: Bucket) -> int:
    """An estimate from above: queries, scores, and a tile of keys and values for every stage.

    One of a decode's stages holds page numbers alone; products of more queries keep a tile for that
    one too.
    """
    width = sum(column_blocks(spec))
    size = 4 if spec.kv_dtype == "float32" else 2
    tiles = max(1, config.num_stages - (bucket.mode == "decode"))
    scores = 4 * config.block_m * config.block_n + 1024
    arrays = 1 if spec.v_is_k_prefix else 2
    return width * size * (config.block_m + arrays * config.block_n * tiles) + scores
