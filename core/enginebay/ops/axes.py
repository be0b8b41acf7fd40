"""Axes of the ops: in what the problems of an op differ, one record per op. The kit makes its cases
from them.

A value of an axis is plain data. Where a number would depend on the kernel (its blocks, its pages)
the value is a word, which `enginebay_testing` resolves from the kernel's own configuration. The
first value of each axis is the ordinary one, which names of cases leave out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

Value = str | int | float | bool | None
Row = Mapping[str, Value]
"""A value for each axis."""


@dataclasses.dataclass(frozen=True)
class OpAxes:
    """The axes of one op, by name, and the pairs of values that no problem has.

    `never` lists (axis, value, other axis, other value).
    """

    op: str
    values: Mapping[str, tuple[Value, ...]]
    never: tuple[tuple[str, Value, str, Value], ...] = ()

    def within(self, claims: Mapping[str, Callable[[Value], bool]]) -> OpAxes:
        """The same with those values alone that `claims` allows, by axis; axes without a claim stay
        as they are.
        """
        kept = {
            axis: tuple(v for v in values if axis not in claims or claims[axis](v))
            for axis, values in self.values.items()
        }
        return dataclasses.replace(self, values=kept)

    def having(self, **values: tuple[Value, ...]) -> OpAxes:
        """The same with other values of some axes."""
        return dataclasses.replace(self, values={**self.values, **values})


DTYPES = ("float32", "bfloat16", "float16")
WINDOWS = ("none", "over_blocks", "in_page", "one", "over_pages", "beyond")
"""A window shorter than a page, of more than two pages, of more than a block of the kernel's,
longer than any context.
"""

ATTENTION = OpAxes(
    "attention",
    {
        "phase": ("decode", "mixed", "prefill"),
        "dtype": DTYPES,
        "head_dim": (64, 128, 80, 256),
        "group": (4, 1, 3, 16, 2),
        "kv_heads": (2, 1, 3),
        "page": (16, 64, "row", 32, 128),
        "layout": (),
        "window": WINDOWS,
        "softcap": (None, 2.0, 30.0),
        "sinks": (False, True),
        "scale": (None, 0.3),
        "lse": (False, True),
        "causal": (True, False),
        "kv_shared": (False, True),
        "deterministic": (False, True),
        "rows": ("few", "one", "many"),
        "context": ("blocks", "pages", "powers"),
        "config": ("default", "small", "large"),
        "scores": ("plain", "outlier", "low", "high"),
        "sharing": (False, True),
        "padding": ("some", "none", "holes"),
        "poison": ("nan", "1e30"),
    },
    never=(
        *(("window", window, "causal", False) for window in WINDOWS[1:]),
        ("phase", "decode", "causal", False),
        ("phase", "prefill", "sharing", True),
        ("page", "row", "sharing", True),
        ("rows", "one", "sharing", True),
    ),
)
"""phase: Bucket.mode. page: tokens of a page, or "row" where a page holds a whole row. kv_shared: a
layer that reads the cache of another. context: lengths around a page's borders; of at least three
blocks; one more than powers of two. config: the kernel's default, its candidates of the smallest
and of the largest numbers. scores: of about +200, of -200, one key of +200. sharing: rows whose
first pages are the same. padding: rows and tokens that are none, "holes" between rows of a decode
step.
"""

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
"""in_dims, out_dims: how many dimensions are contracted, and made. A cancelling bias leaves a small
sum of large terms. rows_apart: rows of very different size; nan_row: one of NaN, which no other may
feel.
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
"""size: entries so small that eps counts, so large that their squares leave float16, rows of zeros,
one large entry.
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
"""vocab: the largest one has ids that 16 bits do not hold, signed or not; its rows are short."""

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
    },
)
"""slots: scattered, none written, following each other over the border of a page, the last page's
last, half dropped.
"""

ROPE_KV_WRITE = OpAxes(
    "rope_kv_write",
    {
        **KV_WRITE.values,
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
"""logits: of several spreads, nearly equal, one far above the others, few different values, with
tokens of -inf.
"""

AXES: Mapping[str, OpAxes] = {
    axes.op: axes
    for axes in (
        ATTENTION,
        LINEAR,
        RMS_NORM,
        ADD_RMS_NORM,
        ROPE,
        EMBEDDING,
        KV_WRITE,
        ROPE_KV_WRITE,
        SAMPLE,
    )
}
"""Every op's axes."""
