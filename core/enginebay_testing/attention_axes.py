"""Builds attention cases: a covering array of the values that a kernel declares, with lengths that
suit the kernel's own configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from enginebay.contracts.cache import KVLayout
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import FEATURE_OF, Caps, Env
from enginebay.ops.spec import AttnSpec, Mode
from enginebay.ops.tunable import candidates_of
from enginebay_testing.attention_cases import AttentionCase
from enginebay_testing.attention_program import chosen_config
from enginebay_testing.attention_values import ATTENTION
from enginebay_testing.covering import (
    TRIPLES,
    Combination,
    OpAxes,
    Value,
    added_rows,
    covering_rows,
)
from enginebay_testing.op_kit import numbers_of

OTHER_SIZES = (96, 112, 192, 48, 32, 16, 8, 160, 512, 576, 1024)
"""Sizes for a kernel that claims none of the sizes of an axis."""

FEATURES = {
    "window": "window",
    "softcap": "softcap",
    **{feature: feature for feature in FEATURE_OF.values()},
    "lse": "lse",
    "kv_shared": "kv_share",
    "latent": "mla",
    "deterministic": "deterministic",
    "q_dtype": "mixed_dtypes",
}
"""Axes on which a kernel claims the values after the first one by a feature."""

SHORTER_CONTEXTS = (2048, 1024, 512, 256, 128, 64)
"""Contexts to try, longest first, for a kernel that limits the context length."""

SMALLEST_SIZE, MANY_ROWS = 8, 17


@dataclasses.dataclass(frozen=True)
class RowBounds:
    """Bounds on the rows of cases: an interpreted kernel takes time for each token."""

    context: int
    new_tokens: int
    block: int
    """Block size assumed for a kernel without a configuration."""


DEVICE = RowBounds(1750, 800, 128)
INTERPRETED = RowBounds(580, 160, 32)

LONG, LONG_CAPACITY = 4096 + 41, 8192
"""Tokens of a long context, and the size of its bucket that a kernel must allow."""

STEP_ROWS = {"one": 6, "few": 14, "many": 2 * MANY_ROWS + 4}
"""Max rows of a step for each value, unused rows included."""


def claimed_axes(caps: Caps, layouts: Mapping[str, type[KVLayout]]) -> OpAxes:
    """Return the attention axes, reduced to the values that a kernel and `layouts` support."""
    claims: dict[str, Any] = {
        "phase": lambda v: v in caps.modes,
        "dtype": lambda v: v in caps.q_dtypes & caps.kv_dtypes,
        "context": lambda v: v != "long" or caps.context(LONG_CAPACITY),
        "storage": lambda v: v is None or v in caps.kv_dtypes,
        "head_dim": lambda v: caps.head_dim(v) or ("mla" in caps.features and caps.latent_dim(v)),
        "group": caps.group,
        "page": lambda v: all(map(caps.page_size, (48, 80))) if v == "row" else caps.page_size(v),
        "rows": lambda v: v == "one" or caps.rows(STEP_ROWS[v]),
    }
    first = {axis: ATTENTION.values[axis][0] for axis in FEATURES}
    axes = ATTENTION.within(claims).having(layout=tuple(layouts))
    axes = axes.having(
        **{axis: (first[axis],) for axis, f in FEATURES.items() if f not in caps.features}
    )
    for axis, claim in (
        ("head_dim", caps.head_dim),
        ("group", caps.group),
        ("page", caps.page_size),
    ):
        if not any(isinstance(v, int) for v in axes.values[axis]):
            others = [size for size in OTHER_SIZES if claim(size)][:2]
            axes = axes.having(**{axis: (*others, *axes.values[axis])})
    never: list[tuple[str, Value, str, Value]] = [
        ("layout", n, "latent", True) for n, k in layouts.items() if not k.serves_v_prefix
    ]
    for name, kind in layouts.items():
        known = {*kind.storages, None}
        never += [("layout", name, "storage", v) for v in axes.values["storage"] if v not in known]
    for size in axes.known("head_dim"):
        never += [("head_dim", size, "latent", False)] * (not caps.head_dim(cast("int", size)))
        never += [("head_dim", size, "latent", True)] * (not caps.latent_dim(cast("int", size)))
    return dataclasses.replace(axes, never=(*axes.never, *never))


def attention_covering_cases(
    kernel: AttentionImpl,
    env: Env,
    layouts: Mapping[str, type[KVLayout]],
    reach: RowBounds,
    *,
    triples: bool,
) -> Iterator[tuple[AttentionCase, type[KVLayout]]]:
    """Return cases that cover every pair, or triple, of values that the kernel declares, each in
    its layout.

    The axis `config` is left out for kernels without a choice of configurations.
    """
    axes = claimed_axes(kernel.caps, layouts)
    longest = next((n for n in SHORTER_CONTEXTS if kernel.caps.context(n)), SHORTER_CONTEXTS[-1])
    reach = dataclasses.replace(reach, context=min(reach.context, longest))
    if not _has_choices(kernel, env, axes, layouts):
        axes = axes.having(config=("default",))
    rows = covering_rows(axes)
    if triples:
        rows = [*added_rows(axes), *covering_rows(axes, TRIPLES)]
    for row in rows:
        layout_type = layouts[str(row["layout"])]
        yield case_of(row, kernel, env, layout_type, reach), layout_type
    if triples and reach.context == DEVICE.context:
        for case in _longest_cases(kernel, axes):
            yield case, layouts[str(rows[0]["layout"])]


LONGER = (8192, 16384, 32768, 65536, 131072)
"""Context lengths of cases with one row. A kernel runs the lengths that its Caps allow."""


def _longest_cases(kernel: AttentionImpl, axes: OpAxes) -> Iterator[AttentionCase]:
    """Yield one row of each length around LONGER that the kernel allows, with small heads: alone,
    and with 40 new tokens.
    """
    row = {axis: values[0] for axis, values in axes.values.items() if values}
    small = {axis: min(cast("int", v) for v in axes.values[axis]) for axis in ("group", "kv_heads")}
    row |= {**small, "rows": "one", "padding": "none", "context": "long"}
    page = _page(row)
    for number, length in enumerate(LONGER):
        total = length + (-1, 0, 1, page + 1, 37)[number]
        if not kernel.caps.context(-(-(total + 1) // page) * page):
            return
        for phase, new in (("decode", 1), ("mixed", 40)):
            if phase in axes.values["phase"]:
                at = {**row, "phase": phase, "head_dim": row["head_dim"]}
                case = _case(at, (new,), (total,), 128)
                yield dataclasses.replace(case, name=f"{case.name}_{total}")


def _has_choices(
    kernel: AttentionImpl, env: Env, axes: OpAxes, layouts: Mapping[str, type[KVLayout]]
) -> bool:
    ordinary = {axis: values[0] for axis, values in axes.values.items() if values}
    for phase in axes.values["phase"]:
        case = _sized({**ordinary, "phase": phase}, 512, 512)
        layout = case.layout(layouts[str(ordinary["layout"])])
        with contextlib.suppress(
            Exception
        ):  # the case calls the kernel again and reports what it raises
            if len(candidates_of(kernel, env, case.spec, case.bucket, layout)) > 1:
                return True
    return False


def spec_of(row: Combination) -> AttnSpec:
    """Return the AttnSpec of a row of values, before its window is chosen."""
    heads, group = int(cast("int", row["kv_heads"])), int(cast("int", row["group"]))
    dtype = str(row["dtype"])
    others = {"same": dtype, "wider": "float32", "narrower": "bfloat16"}
    head_dim, is_latent = int(cast("int", row["head_dim"])), bool(row["latent"])
    return AttnSpec(
        heads * group,
        heads,
        head_dim,
        v_head_dim=head_dim * 8 // 9 if is_latent else None,
        scale=cast("float | None", row["scale"]),
        causal=bool(row["causal"]),
        softcap=cast("float | None", row["softcap"]),
        inputs=tuple(name for name, feature in FEATURE_OF.items() if row[feature]),
        q_dtype=others[str(row.get("q_dtype", "same"))],
        kv_dtype=dtype,
        kv_storage=cast("str | None", row["storage"]),
        kv_shared=bool(row["kv_shared"]),
        v_is_k_prefix=is_latent,
        return_lse=bool(row["lse"]),
        deterministic=bool(row["deterministic"]),
    )


def case_of(
    row: Combination, kernel: AttentionImpl, env: Env, layout_type: type[KVLayout], reach: RowBounds
) -> AttentionCase:
    """Return the case of a row of values, with lengths that suit the configuration which the kernel
    chooses for a context of that size.
    """
    limit = reach.context
    largest = _sized(row, limit, min(limit, reach.new_tokens))
    try:
        config = chosen_config(kernel, env, largest, largest.layout(layout_type))
    except Exception:  # noqa: BLE001  # the case calls the kernel again and reports what it raises
        config = None
    sizes = [size for size in sizes_of(config) if 3 * size < limit] or [reach.block]
    return _with_lengths(row, max(sizes), sizes, reach)


def sizes_of(config: Any) -> list[int]:
    """Return the numbers of a configuration that may count tokens: blocks, tiles, chunks."""
    return sorted({n for n in numbers_of(config) if n >= SMALLEST_SIZE})


def _sized(row: Combination, context: int, new_tokens: int) -> AttentionCase:
    """Return a one-row case of this context length, to ask the kernel for its configuration."""
    phase = cast("Mode", row["phase"])
    new = {"decode": 1, "prefill": new_tokens, "mixed": min(new_tokens, context - 1)}[phase]
    total = new if phase == "prefill" else context
    return _case(row, (new,), (total,), SMALLEST_SIZE)


def _with_lengths(
    row: Combination, block: int, sizes: Sequence[int], reach: RowBounds
) -> AttentionCase:
    page = _page(row)
    phase = cast("Mode", row["phase"])
    room = reach.context - (
        page if reach.context > 2 * page else 1
    )  # round the capacity up to whole pages
    room = min(room, reach.new_tokens) if phase == "prefill" else room
    if row["context"] == "long" and reach == DEVICE:
        room = LONG
    kind = (
        "pages" if (row["page"], row["rows"]) == ("row", "many") else str(row["context"])
    )  # limit the size of the cache
    totals = [n for n in _contexts(kind, page, block, room) if 0 < n <= room]
    if row["rows"] == "one":
        totals = [max(totals)]
    elif row["rows"] == "many":
        more = MANY_ROWS - len(totals)
        totals += [1 + 7 * i % (2 * page + 9) for i in range(max(0, more))]
    if phase == "decode":
        return _case(row, (1,) * len(totals), tuple(totals), block)
    if phase == "prefill":
        return _case(row, tuple(totals), tuple(totals), block)
    new_sizes = [size for size in sizes if size <= reach.new_tokens // 4] or [SMALLEST_SIZE]
    return _case(row, *_mixed(totals, max(new_sizes), reach.new_tokens), block)


def _page(row: Combination) -> int:
    return 16 if row["page"] == "row" else int(cast("int", row["page"]))


def _contexts(kind: str, page: int, block: int, room: int) -> list[int]:
    """Return context lengths. The longest of kind "blocks" has more than three blocks and ends
    inside a block.
    """
    if kind == "pages":
        return [2 * page + 1, 1, page - 1, page, page + 1]
    if kind == "powers":
        return [2**power + 1 for power in range(4, 12) if 2**power < room][::-1][:6]
    if kind == "long":
        return [room, block + 1, 1] if room == LONG else [room, 1]
    ragged = 3 * block + page // 2 + 1
    while ragged > room:  # keep the prompts within `room` tokens
        block //= 2
        ragged = 3 * block + page // 2 + 1
    return [ragged, block + 1, 1, 2 * block, block - 1]


def _mixed(totals: Sequence[int], block: int, room: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (new tokens, contexts) of the rows of a mixed step, in order: one third decodes, one
    third is new, the rest are chunks.
    """
    longest, *others = totals
    decode = [n for n in others[::3] if n > 1]
    fresh = [min(n, room // 2) for n in others if n not in decode][::2]
    chunks = [n for n in others if n not in decode and n > 2][1::2]
    new = [min(2 * block + 3, n - 1, room) for n in (longest, *chunks)]
    q_lens = (*(1,) * len(decode), *fresh, *(max(n, 1) for n in new))
    rows = sorted(
        zip(q_lens, (*decode, *fresh, longest, *chunks), strict=True),
        key=lambda r: 0 if r[0] == 1 < r[1] else 1 if r[0] == r[1] else 2,
    )
    return tuple(q for q, _ in rows), tuple(n for _, n in rows)


def _case(
    row: Combination, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], block: int
) -> AttentionCase:
    page = _page(row)
    longest = max(kv_lens)
    unit = 16 if row["page"] == "row" else page
    capacity = -(-(longest + 1) // unit) * unit
    spec = spec_of(row)
    windows = {
        "one": 1,
        "in_page": page // 2 + 1,
        "over_pages": 2 * page + 3,
        "over_blocks": block + page // 2 + 1,
        "beyond": capacity + 100,
    }
    phase = cast("Mode", row["phase"])
    holes = row["padding"] == "holes"
    if holes and phase == "decode":
        q_lens, kv_lens = (
            tuple(n for total in lens for n in (total, 0)) for lens in (q_lens, kv_lens)
        )
    padding = {"some": (3, 1), "none": (0, 0), "holes": (20, 4)}[str(row["padding"])]
    return AttentionCase(
        _name(row),
        phase,
        q_lens,
        kv_lens,
        dataclasses.replace(spec, window=windows.get(str(row["window"]))),
        page_size=page,
        capacity=capacity,
        contiguous=row["page"] == "row" and phase != "decode",
        rows_are_pages=row["page"] == "row" and phase == "decode",
        padding_tokens=padding[0],
        padding_rows=padding[1],
        poison=float(str(row["poison"])),
        scores=str(row["scores"]),
        values=str(row["values"]),
        shares_pages=bool(row["sharing"]),
        config=str(row["config"]),
    )


def _name(row: Combination) -> str:
    """Return a name with phase, dtype, sizes, and the values that differ from the usual ones."""
    heads = f"d{row['head_dim']}-{row['kv_heads']}x{row['group']}"
    sizes = f"{row['phase']}-{row['dtype']}-{heads}-page_{row['page']}"
    plain = ("phase", "dtype", "head_dim", "kv_heads", "group", "page", "layout")
    rest = [
        _word(axis, v)
        for axis, v in row.items()
        if axis not in plain and v != ATTENTION.values[axis][0]
    ]
    return "-".join([sizes, *rest])


def _word(axis: str, value: Value) -> str:
    if value is True:
        return axis
    return f"not_{axis}" if value is False else f"{axis}_{value}"
