"""Axes of the built-in ops without phases. An axis is a property in which test cases differ.

The values of an axis are plain data. Where a number would depend on the kernel (on its blocks), the
value is a word. The first value of each axis is the ordinary one; names of cases omit it.
"""

from __future__ import annotations

import dataclasses

from enginebay_testing.covering import DTYPES, OpAxes

LINEAR = OpAxes(
    "linear",
    {
        "dtype": DTYPES,
        "rows": (3, 1, 2, 8, 17, 129, 5, 0),
        "inputs": (40, 64, 129, 1025, 300, 7),
        "outputs": (48, 1, 65, 257, 1030, 30),
        "in_dims": (1, 2),
        "out_dims": (1, 2),
        "bias": ("none", "plain", "cancelling"),
        "out_dtype": (None, "float32"),
        "data": ("plain", "one_sign", "outlier", "rows_apart", "nan_row"),
        "config": ("default", "small", "large"),
    },
)
"""in_dims, out_dims: numbers of contracted dimensions and of dimensions of the result. bias
"cancelling": the sum of large terms is small. data "rows_apart": rows of very different magnitude;
"nan_row": one row is NaN and must not change the others.
"""

GROUPED_LINEAR = OpAxes(
    "grouped_linear",
    {
        "dtype": DTYPES,
        "groups": (4, 1, 2, 9, 33),
        "sizes": ("mixed", "one_each", "one_has_all", "empty_ends", "even", "none"),
        "past": (2, 0, 40),
        "inputs": (40, 64, 129, 300, 7),
        "outputs": (48, 1, 65, 257, 30),
        "out_dtype": (None, "float32"),
        "data": ("plain", "one_sign", "outlier", "rows_apart", "nan_row"),
        "unused": ("plain", "nan"),
    },
)
"""sizes: how the rows are divided into groups; "empty_ends": the first and the last group have
none. past: rows after the last group. unused: values of the weights of groups without rows.
"""

SHORT_CONV = OpAxes(
    "short_conv",
    {
        "dtype": DTYPES,
        "taps": (3, 2, 4, 9),
        "channels": (24, 1, 64, 130),
        "rows": (5, 1, 2, 17),
        "lengths": ("mixed", "one_each", "begin", "go_on", "padded"),
        "bias": ("none", "plain"),
        "data": ("plain", "outlier", "nan_row"),
    },
)
"""lengths: first chunks, later chunks, rows of one token, and a row of padding. A row may have
fewer tokens than taps. data "nan_row": the last token, which is padding, is NaN.
"""

RMS_NORM = OpAxes(
    "rms_norm",
    {
        "dtype": DTYPES,
        "rows": (5, 1, 2, 17, 129, 8),
        "features": (64, 40, 128, 1, 257, 1025, 4096),
        "dims": (2, 3),
        "eps": (1e-5, 1e-6, 1e-2),
        "size": ("plain", "tiny", "large", "zero", "outlier", "nan_row"),
        "weight": ("plain", "signed_and_zero"),
    },
)
"""size: entries so small that eps matters, so large that their squares overflow float16, rows of
zeros, and one large entry.
"""

ADD_RMS_NORM = dataclasses.replace(RMS_NORM, op="add_rms_norm")

ROPE = OpAxes(
    "rope",
    {
        "dtype": DTYPES,
        "tokens": (6, 1, 17, 129, 2),
        "heads": (3, 1, 8),
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
)

EMBEDDING = OpAxes(
    "embedding",
    {
        "dtype": DTYPES,
        "vocab": (11, 1, 257, 1000, 70_000),
        "features": (8, 1, 64, 129),
        "tokens": (4, 1, 17, 129),
        "ids": ("mixed", "last", "equal", "all"),
    },
    never=(
        ("vocab", 70_000, "features", 64),
        ("vocab", 70_000, "features", 129),
    ),
)
"""vocab: ids of the largest one do not fit 16 bits; its rows are short."""

KV_WRITE = OpAxes(
    "kv_write",
    {
        "dtype": DTYPES,
        "layout": (),
        "tokens": (4, 1, 17, 65, 2),
        "kv_heads": (2, 1, 3, 8),
        "head_dim": (16, 64, 128, 80),
        "page": (8, 16, 64, 24),
        "slots": ("mixed", "dropped", "run", "last", "some_dropped"),
        "latent": (False, True),
    },
    never=tuple(("kv_heads", heads, "latent", True) for heads in (2, 3, 8)),
)
"""slots: scattered, all dropped, consecutive over the border of a page, the last slot of the last
page, half of them dropped. latent: values are a prefix of the keys, in layouts that support it.
"""

ROPE_KV_WRITE = OpAxes(
    "rope_kv_write",
    {
        **KV_WRITE.values,
        "latent": (False,),
        "group": (3, 1, 4),
        "rotary": ROPE.values["rotary"],
        "rule": ROPE.values["rule"],
        "positions": ROPE.values["positions"],
    },
)

SAMPLE = OpAxes(
    "sample",
    {
        "vocab": (700, 40, 257, 1025, 2),
        "rows": (16, 1, 3),
        "top_k": ("all", "few", "one", "most", "all_but_one"),
        "top_p": ("all", "most", "some", "least"),
        "min_p": ("none", "some", "one"),
        "logits": ("spread", "flat", "peaked", "equals", "holes"),
    },
)
"""logits: several spreads, nearly equal ones, one far above the others, few different values, and
some of -inf.
"""
