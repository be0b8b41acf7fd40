"""The axes of attention: the properties in which its test cases differ, and their values."""

from __future__ import annotations

from enginebay.ops.head_inputs import HEAD_INPUTS
from enginebay_testing.covering import DTYPES, OpAxes
from enginebay_testing.quantized import STORAGES

WINDOWS = ("none", "over_blocks", "in_page", "one", "over_pages")
"""Kinds of windows: shorter than a page, longer than two pages, and longer than a block of the
kernel.
"""
BEYOND = "beyond"
"""A window that is longer than any context."""

SEVERAL_HEADS, MANY_HEADS = (2, 3, 4, 5, 6, 7, 8, 16), (5, 6, 7, 8, 16)
"""Numbers of KV heads that latent caches do not have, and that make large caches."""

ATTENTION = OpAxes(
    "attention",
    {
        "phase": ("decode", "mixed", "prefill"),
        "dtype": DTYPES,
        "head_dim": (64, 128, 80, 256, 576),
        "group": (4, 1, 5, 16, 6, 12),
        "kv_heads": (2, 1, 5, 8),
        "page": (16, 64, "row", 128),
        "layout": (),
        "storage": (None, *STORAGES),
        "q_dtype": ("same", "wider"),
        "window": WINDOWS,
        "softcap": (None, 2.0, 30.0),
        **{one.feature: (False, True) for one in HEAD_INPUTS.values()},
        "scale": (None, 0.3),
        "lse": (False, True),
        "causal": (True, False),
        "kv_shared": (False, True),
        "latent": (False, True),
        "deterministic": (False, True),
        "rows": ("few", "one", "many"),
        "context": ("blocks", "pages", "powers", "long"),
        "values": ("plain", "one_sign"),
        "config": ("default", "small", "large"),
        "scores": ("plain", "outlier", "low", "high"),
        "sharing": (False, True),
        "padding": ("some", "none", "holes"),
        "poison": ("nan", "1e30"),
    },
    never=(
        *(("window", window, "causal", False) for window in (*WINDOWS[1:], BEYOND)),
        ("head_dim", 576, "latent", False),
        *(("kv_heads", heads, "latent", True) for heads in SEVERAL_HEADS),
        *(("head_dim", 576, "kv_heads", heads) for heads in SEVERAL_HEADS),
        *(("head_dim", width, "kv_heads", heads) for width in (256, 512) for heads in MANY_HEADS),
        *(("group", group, "kv_heads", heads) for group in (12, 16, 32) for heads in MANY_HEADS),
        *(("kv_heads", heads, "context", "long") for heads in MANY_HEADS),
        *(("head_dim", width, "context", "long") for width in (256, 512, 576)),
        *(("group", group, "context", "long") for group in (12, 16, 32)),
        ("rows", "many", "context", "long"),
        ("phase", "prefill", "context", "long"),
        *(
            ("storage", storage, "q_dtype", q)
            for storage in STORAGES
            for q in ("wider", "narrower")
        ),
        ("dtype", "float32", "q_dtype", "wider"),
        ("dtype", "float16", "q_dtype", "narrower"),
        ("phase", "decode", "causal", False),
        ("phase", "prefill", "sharing", True),
        ("page", "row", "sharing", True),
        ("rows", "one", "sharing", True),
    ),
    more={
        "window": (BEYOND,),
        "q_dtype": ("narrower",),
        "group": (2, 3, 7, 8, 9, 32),
        "kv_heads": (3, 4, 6, 7, 16),
        "head_dim": (32, 96, 112, 160, 192, 512),
        "page": (8, 32, 256),
    },
)
"""Meaning of the axes.

phase: Bucket.mode. storage: how the cache is quantised. page: tokens per page, or "row" where one
page holds a whole row. kv_shared: a layer that reads the cache of another layer. latent: values are
a prefix of the keys, eight ninths of their width. context: lengths near page borders; of at least
three blocks; powers of two plus one; "long": more than 4,096 tokens in one row. values: "one_sign"
values add up, so that a narrow accumulator loses them. q_dtype: queries in another dtype than keys
and values. config: the kernel's default, or its candidates with the smallest or largest numbers.
scores: about +200, about -200, or one key at +200 (and see `EXTREME_SCORES`). sharing: rows whose
first pages are the same. padding: unused rows and tokens; "holes" lie between the rows of a decode
step.
"""
