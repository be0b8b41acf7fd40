"""The compiled programs of a step, and which programs can serve which steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from enginebay.contracts.cache import CacheLayout
from enginebay.contracts.step_key import StepKey
from enginebay.ops.spec import Bucket
from enginebay.types import StepVariant

ProgramName = tuple[StepKey, tuple[tuple[str, CacheLayout], ...]]
"""What a compiled program is stored under: its key, and the cache layouts that it depends on."""


def parts_of(key: StepKey) -> tuple[StepKey, ...]:
    """The programs of a step.

    A prefill has several: one runs the model, and is the same for all sampling parameters; the
    others sample, for one row or for all. So the sampling programs are compiled once for prefills
    of any number of tokens.
    """
    if key.kind != "prefill":
        return (key,)
    seqs = key.bucket.seqs
    sizes = [Bucket(num, seqs, 1, 1, 1, "decode") for num in dict.fromkeys((1, seqs))]
    samples = replace(key, kind="sample", pools=False, embeds=False)
    return (
        replace(key, kind="forward", variant=StepVariant.FULL, names=None),
        *(replace(samples, bucket=size) for size in sizes),
    )


def program_name(key: StepKey, layouts: Mapping[str, CacheLayout]) -> ProgramName:
    """The name of a key's program. A "sample" program serves caches of any size."""
    return key, () if key.kind == "sample" else tuple(layouts.items())


def cost(key: StepKey) -> tuple[int, ...]:
    """Tokens, rows and context: sorts programs by increasing cost."""
    b = key.bucket
    return b.tokens, b.seqs, b.max_kv_len, int(b.mode == "mixed")


def covers(key: StepKey, other: StepKey) -> bool:
    """Whether the program of `key` serves every step that `other` serves, with more padding."""
    mine, its = key.bucket, other.bucket
    if key.kind == "prefill":
        mode_serves = mine.max_q_len >= its.max_q_len and mine.mode in (its.mode, "mixed")
    else:
        mode_serves = (mine.max_q_len, mine.mode) == (its.max_q_len, its.mode)
    return (
        replace(key, bucket=its, adapts=other.adapts) == other
        and key.adapts >= other.adapts
        and mode_serves
        and mine.rows_are_pages == its.rows_are_pages
        and mine.tokens >= its.tokens
        and mine.seqs >= its.seqs
        and mine.pages_per_seq >= its.pages_per_seq
        and mine.max_kv_len >= its.max_kv_len
    )


def covering(keys: Iterable[StepKey]) -> list[StepKey]:
    """The fewest of the keys that together cover all of them."""
    keys = list(dict.fromkeys(keys))
    return [key for key in keys if not any(o != key and covers(o, key) for o in keys)]
