"""Axes of the built-in ops without phases. An axis is a property in which test cases differ.

The values of an axis are plain data. Where a number would depend on the kernel (on its blocks), the
value is a word. The first value of each axis is the ordinary one; names of cases omit it.
"""

from __future__ import annotations

import dataclasses

from enginebay_testing.covering import DTYPES, OpAxes, Value

BORDERS = (16, 31, 32, 33, 64, 65, 127, 128, 255, 256, 257, 511, 512, 513, 1024, 1025, 2048, 2049)
"""Powers of two, at which blocks end, and numbers beside them."""


def further(values: tuple[Value, ...], *sizes: int) -> tuple[int, ...]:
    """Return the sizes that an axis with `values` does not have yet."""
    return tuple(size for size in sizes if size not in values)


def never_both(
    one: str, sizes: tuple[int, ...], other: str, others: tuple[int, ...]
) -> tuple[tuple[str, Value, str, Value], ...]:
    """Return the pairs of values of two axes that would take too long together."""
    return tuple((one, size, other, second) for size in sizes for second in others)


MIDDLE, LARGE = (511, 512, 513, 1024, 1025), (2048, 2049, 4096, 4097, 8193)

LINEAR = OpAxes(
    "linear",
    {
        "dtype": DTYPES,
        "rows": (3, 1, 2, 8, 17, 129, 513, 0),
        "inputs": (40, 64, 129, 1025, 4097, 7),
        "outputs": (48, 1, 65, 257, 1025, 30),
        "in_dims": (1, 2),
        "out_dims": (1, 2),
        "bias": ("none", "plain", "cancelling"),
        "out_dtype": (None, "float32"),
        "data": (
            "plain",
            "one_sign",
            "outlier",
            "rows_apart",
            "nan_row",
            "special_rows",
            "largest",
        ),
        "config": ("default", "small", "large"),
    },
    never=(
        *never_both("rows", MIDDLE, "inputs", LARGE),
        *never_both("rows", MIDDLE, "outputs", LARGE),
        *never_both("rows", LARGE, "inputs", (*MIDDLE, *LARGE)),
        *never_both("rows", LARGE, "outputs", (*MIDDLE, *LARGE)),
        *never_both("inputs", LARGE, "outputs", (*MIDDLE, *LARGE)),
        *never_both("inputs", MIDDLE, "outputs", LARGE),
    ),
    more={
        "rows": further((8, 513), *BORDERS, 4097),
        "inputs": further((64, 1025, 4097), *BORDERS, 4096, 8193),
        "outputs": further((65, 257, 1025), *BORDERS, 4096, 8193),
    },
    blocks=("rows", "inputs", "outputs"),
    extremes=({"rows": 65_609}, {"inputs": 65_609}, {"outputs": 65_609}),
)
"""in_dims, out_dims: numbers of contracted dimensions and of dimensions of the result. bias
"cancelling": the sum of large terms is small. data "rows_apart": rows of very different magnitude;
"nan_row": one row is NaN, another has an infinity, and they must not change the others;
"special_rows": rows of zeros, of equal or very small numbers, or with their largest number last;
"largest": one number of each row is close to the largest of the dtype.
"""

GROUPED_LINEAR = OpAxes(
    "grouped_linear",
    {
        "dtype": DTYPES,
        "groups": (4, 1, 9, 33),
        "sizes": ("mixed", "one_has_all", "empty_ends", "none"),
        "past": (2, 0, 40),
        "inputs": (40, 129, 1025, 7),
        "outputs": (48, 1, 65, 257),
        "out_dtype": (None, "float32"),
        "data": ("plain", "one_sign", "nan_row", "special_rows"),
        "unused": ("plain", "nan"),
    },
    never=(
        *never_both("groups", (33, 60, 64, 128), "inputs", (*MIDDLE, *LARGE)),
        *never_both("groups", (33, 60, 64, 128), "outputs", (*MIDDLE, *LARGE)),
        *never_both("inputs", (*MIDDLE, *LARGE), "outputs", (*MIDDLE, *LARGE)),
    ),
    more={
        "groups": (2, 8, 16, 60, 64, 128),
        "inputs": further((1025,), *BORDERS, 300),
        "outputs": further((65, 257), *BORDERS, 30),
        "past": (300,),
        "sizes": ("one_each", "even"),
        "data": ("outlier", "rows_apart", "largest"),
    },
    blocks=("inputs", "outputs"),
    extremes=(
        {"groups": 300, "sizes": "one_each"},
        {"past": 65_609, "inputs": 7, "outputs": 1},
        {"inputs": 16_411},
        {"outputs": 16_411},
    ),
)
"""sizes: how the rows are divided into groups; "one_has_all": over 512 rows; "empty_ends": the
first and the last group have none. past: rows after the last group. unused: values of the weights
of groups without rows.
"""

SHORT_CONV = OpAxes(
    "short_conv",
    {
        "dtype": DTYPES,
        "taps": (3, 2, 4, 9),
        "channels": (24, 1, 130, 1025),
        "rows": (5, 1, 2, 33),
        "lengths": ("mixed", "one_each", "begin", "go_on", "padded", "long"),
        "bias": ("none", "plain"),
        "data": ("plain", "outlier", "nan_row"),
    },
    never=never_both("rows", (33, 64, 129), "channels", (1024, 1025, 2048, 4097)),
    more={
        "channels": further((1025,), *BORDERS, 4097),
        "rows": (17, 64, 129),
        "taps": (5, 8),
    },
    extremes=({"rows": 300}, {"channels": 65_609}),
)
"""lengths: first chunks, later chunks, rows of one token, a row of padding, and a long row. A row
may have fewer tokens than taps. data "nan_row": the last token, which is padding, is NaN.
"""

SSD_SCAN = OpAxes(
    "ssd_scan",
    {
        "dtype": DTYPES,
        "groups": (1, 2, 3),
        "heads_each": (4, 1, 3),
        "head_dim": (16, 1, 65),
        "state_size": (16, 1, 129),
        "rows": (5, 1, 2, 33),
        "lengths": ("mixed", "one_each", "begin", "go_on", "padded", "long"),
        "decay": ("plain", "steep", "none"),
        "skip": ("none", "plain"),
        "data": ("plain", "outlier", "nan_row"),
    },
    more={
        "groups": (8,),
        "heads_each": (16, 33),
        "head_dim": (8, 32, 64, 128),
        "state_size": (8, 64, 128, 256),
        "rows": (17, 64),
    },
    extremes=({"rows": 300}, {"heads_each": 1025}),
)
"""heads_each: heads that share the projections of a group. lengths: as of short_conv. decay
"steep": some tokens leave nothing of the state, and others nearly all; "none": all is left. data
"nan_row": the last token, which is padding, is NaN.
"""

RMS_NORM = OpAxes(
    "rms_norm",
    {
        "dtype": DTYPES,
        "rows": (5, 1, 2, 17, 129, 513, 0),
        "features": (64, 40, 1, 257, 1025, 4097),
        "dims": (2, 3),
        "eps": (1e-5, 1e-6, 1e-2),
        "size": ("plain", "tiny", "large", "zero", "outlier", "nan_row", "special_rows"),
        "weight": ("plain", "signed_and_zero"),
    },
    never=(
        *never_both("rows", (511, 512, 513, 1024, 1025), "features", LARGE),
        *never_both("rows", LARGE, "features", (*MIDDLE, *LARGE)),
    ),
    more={
        "rows": further((513,), 8, *BORDERS, 4097),
        "features": further((64, 257, 1025), 128, *BORDERS, 4096, 8193),
    },
    blocks=("rows", "features"),
    extremes=({"rows": 65_609}, {"features": 65_609}),
)
"""size: entries so small that eps matters, so large that their squares overflow float16, rows of
zeros, one large entry, and rows such as those of linear.
"""

ADD_RMS_NORM = dataclasses.replace(
    RMS_NORM,
    op="add_rms_norm",
    values={**RMS_NORM.values, "size": (*RMS_NORM.values["size"], "halves")},
)
"""size "halves": sums half-way between two numbers of the dtype, whose rounding moves the norm."""

ROPE = OpAxes(
    "rope",
    {
        "dtype": DTYPES,
        "tokens": (6, 1, 17, 129, 2, 513),
        "heads": (3, 1, 8, 12, 32),
        "head_dim": (64, 128, 80, 16),
        "rotary": ("whole", "half"),
        "rule": (
            "default",
            "linear",
            "llama3",
            "yarn",
            "yarn_untruncated",
            "yarn_mscale",
            "yarn_attention_factor",
        ),
        "positions": ("mixed", "far", "descending", "equal"),
    },
    never=(
        *never_both("tokens", (513, 1024, 1025, 2048, 2049), "heads", (33, 64)),
        *never_both("heads", (32, 33, 64), "head_dim", (256, 576)),
        *never_both("tokens", (511, 512, 513, 1024, 1025, 2048, 2049), "head_dim", (256, 576)),
    ),
    more={
        "tokens": further((513,), *BORDERS),
        "heads": (2, 4, 5, 6, 7, 9, 16, 33, 64),
        "head_dim": (8, 32, 96, 256, 576),
    },
    blocks=("tokens", "heads"),
    extremes=({"tokens": 65_609, "heads": 1, "head_dim": 16}, {"heads": 129}),
)

LARGE_VOCAB = (65_536, 65_537, 70_000, 131_073)

EMBEDDING = OpAxes(
    "embedding",
    {
        "dtype": DTYPES,
        "vocab": (11, 1, 257, 1000, 70_000),
        "features": (8, 1, 64, 129, 4097),
        "tokens": (4, 1, 17, 129, 513, 0),
        "ids": ("mixed", "last", "equal", "all"),
    },
    never=(
        *never_both("vocab", LARGE_VOCAB, "features", (64, 129, *BORDERS, 4096, 4097, 8193)),
        *never_both("vocab", (1000, 1024, 2048), "features", (4096, 4097, 8193)),
        *never_both("tokens", (513, *LARGE), "features", LARGE),
    ),
    more={
        "vocab": (*further((257,), *BORDERS), 65_536, 65_537, 131_073),
        "features": further((64,), *BORDERS, 4096, 8193),
        "tokens": further((513,), *BORDERS, 4097),
    },
    blocks=("features", "tokens"),
    extremes=(
        {"vocab": 131_073, "ids": "last"},
        {"features": 65_609},
        {"tokens": 65_609},
    ),
)
"""vocab: ids of the largest one do not fit 16 bits; its rows are short."""

KV_WRITE = OpAxes(
    "kv_write",
    {
        "dtype": DTYPES,
        "layout": (),
        "storage": (None,),
        "tokens": (4, 1, 17, 65, 300),
        "kv_heads": (2, 1, 5, 12, 16),
        "head_dim": (16, 64, 128, 80),
        "page": (8, 16, 64, 24),
        "pages": ("few", "many"),
        "slots": ("mixed", "dropped", "run", "last", "some_dropped"),
        "latent": (False, True),
        "donated": (False, True),
    },
    never=(
        *(("kv_heads", n, "latent", True) for n in (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 32, 64)),
        *(("pages", "many", "page", n) for n in (16, 24, 31, 32, 33, 64, 128, 256)),
        *(("pages", "many", "kv_heads", n) for n in (8, 9, 10, 12, 16, 32, 64)),
        *(("pages", "many", "head_dim", n) for n in (80, 96, 128, 256, 576)),
        *never_both("tokens", (300, 511, 512, 513, 1025, 2049), "kv_heads", (32, 64)),
        *never_both("tokens", (511, 512, 513, 1025, 2049), "head_dim", (256, 576)),
        *never_both("page", (64, 128, 256), "kv_heads", (16, 32, 64)),
        *never_both("page", (128, 256), "head_dim", (256, 576)),
        *never_both("kv_heads", (16, 32, 64), "head_dim", (256, 576)),
    ),
    more={
        "tokens": (2, 16, 31, 32, 33, 64, 127, 128, 255, 256, 257, 511, 512, 513, 1025, 2049),
        "kv_heads": (3, 4, 6, 7, 8, 9, 10, 32, 64),
        "head_dim": (8, 40, 96, 256, 576),
        "page": (1, 31, 32, 33, 128, 256),
    },
    blocks=("tokens", "kv_heads"),
    extremes=({"tokens": 65_609, "kv_heads": 1, "page": 16},),
    each=("layout", "storage"),
)
"""storage: None, and the quantised caches that the kernel declares. pages: with "many", more ids
than 8 bits hold. slots: scattered, all dropped, consecutive over the border of a page, the last
slot of the last page, half of them dropped. latent: values are a prefix of the keys, in layouts
that support it. donated: the call takes the memory of the cache, as in serving.
"""

ROPE_KV_WRITE = OpAxes(
    "rope_kv_write",
    {
        **KV_WRITE.values,
        "tokens": (4, 1, 17, 300),
        "kv_heads": (2, 1, 5, 8),
        "latent": (False,),
        "group": (3, 1, 5, 6, 12),
        "rotary": ROPE.values["rotary"],
        "rule": ("default", "linear", "llama3", "yarn", "yarn_mscale"),
        "positions": ROPE.values["positions"],
    },
    never=(
        *KV_WRITE.never,
        *never_both("kv_heads", (12, 16, 32), "group", (6, 7, 8, 12, 16)),
        *never_both("tokens", (511, 512, 513, 1025, 2049), "group", (7, 8, 12, 16)),
    ),
    more={
        **KV_WRITE.more,
        "tokens": (65, *KV_WRITE.more["tokens"]),
        "kv_heads": (3, 4, 6, 7, 12, 16, 32),
        "group": (2, 4, 7, 8, 16),
        "rule": ("yarn_untruncated", "yarn_attention_factor"),
    },
    blocks=KV_WRITE.blocks,
    extremes=({"tokens": 65_609, "kv_heads": 1, "group": 1, "page": 16},),
)

SAMPLE = OpAxes(
    "sample",
    {
        "vocab": (700, 40, 257, 2, 5003),
        "rows": (16, 1, 33),
        "top_k": ("all", "few", "one", "most", "all_but_one"),
        "top_p": ("all", "most", "some", "least"),
        "min_p": ("none", "some", "one"),
        "logits": (
            "spread",
            "flat",
            "peaked",
            "equals",
            "holes",
            "best_last",
            "best_first",
            "one_finite",
        ),
    },
    never=(
        *never_both("rows", (16, 33, 64), "vocab", (4097, 5003)),
        *never_both("rows", (16, 33), "vocab", (32_769, 65_537, 128_257)),
    ),
    more={"vocab": (1025, 4097, 32_769, 65_537, 128_257), "rows": (3, 64)},
    extremes=(
        {"vocab": 131_073, "rows": 1, "logits": "late"},
        {"vocab": 70_001, "rows": 3, "top_k": "few", "logits": "late"},
        {"vocab": 5003, "rows": 3, "top_k": "few", "top_p": "some", "logits": "two_values"},
        {"vocab": 257, "rows": 129, "logits": "flat"},
    ),
)
"""logits: several spreads, nearly equal ones, one far above the others, few different values, some
of -inf, the best token is the last or the first of the vocabulary, and a single possible token. In
extremes: the tokens of the last eighth are the best ones, and half of the tokens are equally best.
"""
