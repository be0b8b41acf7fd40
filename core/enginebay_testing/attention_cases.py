"""Attention problems for the checks: the rows of a step, and the named cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from enginebay.contracts.cache import KVLayout
from enginebay.ops.caps import FEATURE_OF
from enginebay.ops.spec import AttnSpec, Bucket, Mode

SPARE_PAGES = 2

MANY_PAGES = 66
"""A cache with more pages has no spare page for the unused entries of the page tables."""

HEAD_DIMS = (16, 32, 64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128, 256)
GROUPS, ROWS = (1, 2, 3, 4, 8, 16), (260, 130, 65, 33, 17, 8)
"""Sizes that a case may be rounded up to, or numbers of rows that it may be cut to, for a kernel
that does not claim the case's own sizes.
"""

REPRESENTATIVE = frozenset(
    {
        "decode_paged_float32",
        "prefill_paged_float32",
        "mixed_paged_float32",
        "decode_paged_bfloat16",
        "mixed_paged_bfloat16",
        "prefill_contiguous_float32",
        "decode_rows_are_pages_float32",
        "decode_group_8_dim_64_float32",
        "mixed_group_4_dim_128_float32",
        "mixed_window",
        "decode_window",
        "prefill_window",
        "mixed_softcap",
        "decode_softcap",
        "mixed_all",
        "decode_all",
        "decode_constant_v_bfloat16",
        "mixed_finite_poison",
    }
)
"""Representative cases for a quick check: each mode, cache and narrow dtype once, large heads and
groups, and each feature both in decode steps, which some kernels support alone, and in another
mode.
"""


IN_THE_DEFAULT_CHECK = frozenset(
    {
        "decode_mla",
        "decode_kv_shared",
        "decode_rows_are_pages_float32",
        "decode_holes",
        "decode_window",
        "decode_many_rows",
        "decode_long_rows_are_pages",
        "decode_alibi_far",
        "mixed_odd_capacity",
        *(f"decode_{feature}" for feature in FEATURE_OF.values()),
    }
)
"""Named cases that every check runs: each has three values together, such as a decode step in rows
that are pages with slopes, and pairs of values do not promise three; or sizes that 8 or 16 bits do
not number.
"""


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """The rows of one step for one kind of layer, sorted as derive_batch requires.

    With `contiguous`, each row has one page of `capacity` tokens; with `rows_are_pages`, row i has
    page i. `poison` fills every place without a key or value. `max_kv_len` 0 means the capacity.
    `scores`, `values` and `config` are values of these axes (see `attention_axes`). With
    `shares_pages`, rows begin with the same full pages, as many as possible.
    """

    name: str
    mode: Mode
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    spec: AttnSpec
    page_size: int = 16
    capacity: int = 64
    contiguous: bool = False
    rows_are_pages: bool = False
    padding_tokens: int = 3
    padding_rows: int = 1
    max_kv_len: int = 0
    constant_v: bool = False
    poison: float = float("nan")
    scores: str = "plain"
    values: str = "plain"
    shares_pages: bool = False
    config: str = "default"

    @property
    def bucket(self) -> Bucket:
        """Return the static shapes of the step."""
        seqs = len(self.q_lens) + self.padding_rows
        decode = self.mode == "decode"
        return Bucket(
            tokens=seqs if decode else sum(self.q_lens) + self.padding_tokens,
            seqs=seqs,
            pages_per_seq=self.capacity // self.actual_page_size,
            max_q_len=1 if decode else max(self.q_lens),
            max_kv_len=self.max_kv_len or self.capacity,
            mode=self.mode,
            rows_are_pages=self.rows_are_pages,
        )

    @property
    def actual_page_size(self) -> int:
        """Return the number of tokens per page of the layout."""
        return self.capacity if self.contiguous or self.rows_are_pages else self.page_size

    def layout(self, layout_type: type[KVLayout]) -> KVLayout:
        """Return the cache layout of this case, with spare pages unless rows are pages."""
        bucket, size = self.bucket, self.actual_page_size
        num_pages = (
            bucket.seqs if self.rows_are_pages else bucket.seqs * bucket.pages_per_seq + SPARE_PAGES
        )
        if not self.rows_are_pages and num_pages > MANY_PAGES:
            num_pages = sum(-(-total // size) for total in self.kv_lens) + SPARE_PAGES
        return self.spec.make_layout(layout_type, num_pages, size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedCase(AttentionCase):
    """The rows of a step that was captured, with its bucket, the size of its cache, and its page
    table of every row [S, P]. Rows may share pages, and entries before a window may be old.
    """

    shapes: Bucket
    num_pages: int
    table: tuple[tuple[int, ...], ...]

    @property
    def bucket(self) -> Bucket:
        """Return the static shapes of the step."""
        return self.shapes

    @property
    def actual_page_size(self) -> int:
        """Return the number of tokens per page of the layout."""
        return self.page_size

    def layout(self, layout_type: type[KVLayout]) -> KVLayout:
        """Return the layout of the whole cache."""
        return self.spec.make_layout(layout_type, self.num_pages, self.page_size)


def _spec(
    heads: int = 2, group: int = 2, head_dim: int = 16, dtype: str = "float32", **fields: Any
) -> AttnSpec:
    base = AttnSpec(heads * group, heads, head_dim, q_dtype=dtype, kv_dtype=dtype)
    return dataclasses.replace(base, **fields)


def attention_cases() -> Iterator[AttentionCase]:
    """Yield every case of the suite; names are unique and stable."""
    yield from _mode_cases()
    yield from _shape_cases()
    yield from _feature_cases()
    yield from _extreme_cases()


def _mode_cases() -> Iterator[AttentionCase]:
    """Yield the modes with paged, contiguous and row-is-page caches; lengths near page borders."""
    border = (1, 15, 16, 17, 64)
    ones = (1,) * len(border)
    homes: dict[str, dict[str, Any]] = {
        "paged": {},
        "page_64": {"page_size": 64},
        "contiguous": {"contiguous": True},
        "rows_are_pages": {"rows_are_pages": True},
    }
    for dtype in ("float32", "bfloat16", "float16"):
        spec = _spec(dtype=dtype)
        for home, fields in homes.items():
            if dtype != "float32" and home not in ("paged", "rows_are_pages"):
                continue
            yield AttentionCase(f"decode_{home}_{dtype}", "decode", ones, border, spec, **fields)
            yield AttentionCase(
                f"prefill_{home}_{dtype}", "prefill", border, border, spec, **fields
            )
            mixed = ((1, 1, 9, 17, 5, 30), (17, 64, 9, 17, 40, 64))
            yield AttentionCase(f"mixed_{home}_{dtype}", "mixed", *mixed, spec, **fields)
    spec = _spec()
    yield AttentionCase(
        "decode_holes", "decode", (1, 0, 1, 0), (5, 0, 33, 0), spec, rows_are_pages=True
    )
    yield AttentionCase(
        "decode_bounded", "decode", (1, 1), (5, 33), spec, rows_are_pages=True, max_kv_len=40
    )
    yield AttentionCase(
        "decode_one_row", "decode", (1,), (33,), spec, rows_are_pages=True, padding_rows=0
    )
    yield AttentionCase(
        "mixed_bounded", "mixed", (1, 7), (5, 33), spec, contiguous=True, max_kv_len=40
    )
    alone: dict[str, Any] = {"padding_rows": 0, "capacity": 640, "padding_tokens": 20}
    yield AttentionCase(
        "prefill_one_row", "prefill", (300,), (300,), spec, **alone, contiguous=True
    )
    yield AttentionCase("mixed_one_row", "mixed", (290,), (610,), spec, **alone, contiguous=True)
    yield AttentionCase("mixed_one_row_paged", "mixed", (290,), (610,), spec, **alone)
    yield AttentionCase(
        "mixed_odd_capacity", "mixed", (1, 20), (333, 301), spec, contiguous=True, capacity=333
    )
    rows = (130, 5, 300, 1), (130, 5, 300, 1)
    yield AttentionCase("prefill_long_ragged", "prefill", *rows, spec, capacity=320)


def _shape_cases() -> Iterator[AttentionCase]:
    """Yield query groups of 1 to 16, usual and small heads, in f32 and bf16."""
    shapes = {1: (3, 64), 3: (4, 64), 4: (1, 128), 7: (2, 8), 8: (1, 64), 16: (1, 16)}
    for group, (heads, head_dim) in shapes.items():
        for dtype in ("float32", "bfloat16"):
            spec = _spec(heads, group, head_dim, dtype)
            name = f"group_{group}_dim_{head_dim}_{dtype}"
            if dtype == "float32":
                yield AttentionCase(f"mixed_{name}", "mixed", (1, 6, 20), (33, 6, 40), spec)
            yield AttentionCase(
                f"decode_{name}", "decode", (1, 1), (33, 6), spec, rows_are_pages=True
            )


def _feature_cases() -> Iterator[AttentionCase]:
    """Yield features of some layers: windows, soft caps, sinks, shared caches, lse, constants."""
    features: dict[str, dict[str, Any]] = {
        "window": {"window": 9},
        "softcap": {"softcap": 2.0},
        **{f: {"inputs": (name,), "return_lse": True} for name, f in FEATURE_OF.items()},
        "lse": {"return_lse": True},
        "scale": {"scale": 0.3},
        "not_causal": {"causal": False},
        "kv_shared": {"kv_shared": True},
        "mla": {"heads": 1, "group": 4, "head_dim": 32, "v_head_dim": 24, "v_is_k_prefix": True},
        "all": {"window": 20, "softcap": 5.0, "inputs": ("sinks",), "return_lse": True},
    }
    mixed, fresh = ((1, 9, 30), (40, 9, 64)), ((9, 30), (9, 30))
    for name, fields in features.items():
        spec = _spec(**fields)
        yield AttentionCase(f"mixed_{name}", "mixed", *mixed, spec)
        yield AttentionCase(f"prefill_{name}", "prefill", *fresh, spec)
        yield AttentionCase(f"decode_{name}", "decode", (1, 1), (40, 9), spec, rows_are_pages=True)
    window: dict[str, Any] = {"capacity": 640, "padding_rows": 0, "contiguous": True}
    yield AttentionCase("mixed_long_window", "mixed", (290,), (610,), _spec(window=100), **window)
    for dtype in ("float32", "bfloat16"):
        constant: dict[str, Any] = {"spec": _spec(dtype=dtype), "constant_v": True}
        yield AttentionCase(f"mixed_constant_v_{dtype}", "mixed", *mixed, **constant)
        yield AttentionCase(
            f"decode_constant_v_{dtype}", "decode", (1, 1), (40, 9), **constant, rows_are_pages=True
        )
    finite: dict[str, Any] = {"spec": _spec(), "poison": 1e30}
    yield AttentionCase(
        "decode_finite_poison", "decode", (1, 1), (40, 9), **finite, rows_are_pages=True
    )
    yield AttentionCase("mixed_finite_poison", "mixed", *mixed, **finite)


MANY_ROWS, LARGE_PAGE = 260, 256
"""Rows that 8 bits do not number, and tokens of a page with which each of them has a page: then 8
bits do not number the pages, and 16 bits do not number the slots.
"""


def _extreme_cases() -> Iterator[AttentionCase]:
    """Yield cases with many rows, whose second one fills its pages, with long rows that are pages,
    and with slopes over distances that bfloat16 does not hold.
    """
    lens = (5, 2 * LARGE_PAGE, *(1 + 11 * i % 251 for i in range(MANY_ROWS - 2)))
    ones = (1,) * MANY_ROWS
    sizes: dict[str, Any] = {"page_size": LARGE_PAGE, "capacity": 2 * LARGE_PAGE}
    spec = _spec(1, 3)
    yield AttentionCase("decode_many_rows", "decode", ones, lens, spec, **sizes)
    rows = tuple(sorted(lens, reverse=True))  # the last ones have one token, which is new
    yield AttentionCase("mixed_many_rows", "mixed", ones, rows, spec, **sizes)
    for name, long in (("long", 4137), ("longer", 8200), ("very_long", 65_600)):
        yield AttentionCase(
            f"decode_{name}_rows_are_pages",
            "decode",
            (1, 1),
            (9, long),
            _spec(1),
            capacity=long + 24,
            rows_are_pages=True,
            scores="outlier",
        )
    slopes = _spec(inputs=("slopes",))
    yield AttentionCase(
        "decode_alibi_far", "decode", (1, 1), (700, 9), slopes, page_size=64, capacity=704
    )
