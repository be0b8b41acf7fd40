"""The compiled programs of a step, and which programs can serve which steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from enginebay.config import EngineConfig
from enginebay.contracts.cache import CacheLayout
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.ops.spec import Bucket
from enginebay.types import StepVariant

ProgramName = tuple[StepKey, tuple[tuple[str, CacheLayout], ...]]
"""What a compiled program is stored under: its key, and the cache layouts that it depends on."""


def parts_of(key: StepKey) -> tuple[StepKey, ...]:
    """The keys of a step's programs, which together are the step. They have nothing to do with
    EngineParts.

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


FIRST_TOKENS = 128
"""The largest number of tokens of the first compiled prefill: longer prompts run in parts of this
size at nearly the same speed, and shorter ones still take little time.
"""


SEVERAL_ROWS = 8
"""Larger batches run in parts of this size at nearly the same speed, and smaller ones in one step
of it, which takes a CPU about twice as long as one row unless products skip padding.
"""


SEVERAL_TOKENS = 512
"""Longer prompts run in parts of this size 1.6 times as fast as in parts of FIRST_TOKENS, and
shorter ones in one step of it, where products skip padding.
"""


def first_rows(free_padding_rows: int) -> int:
    """The largest number of rows of the first compiled decode: SEVERAL_ROWS where a step of one row
    takes no longer by it (`EngineParts.free_padding_rows`), else one.
    """
    return SEVERAL_ROWS if free_padding_rows >= SEVERAL_ROWS else 1


def first_steps(keys: Iterable[StepKey], free_padding_rows: int = 0) -> list[StepKey]:
    """A few of the keys, with which every step can run: a small prefill that serves any rows, and
    decode and verify steps of `first_rows`, or else of the fewest, over the longest context. A
    larger step runs in several parts.
    """
    found: dict[tuple[object, ...], tuple[tuple[int, ...], StepKey]] = {}
    keys, most = list(keys), first_rows(free_padding_rows)
    rows = {verifies: _rows_of_first(keys, most, verifies=verifies) for verifies in (False, True)}
    for key in keys:
        b = key.bucket
        rank: tuple[int, ...]
        if key.kind == "prefill":
            if b.mode != "mixed":
                continue  # it serves only rows without a prefix
            is_small = b.tokens <= FIRST_TOKENS
            rank = (b.seqs, int(is_small), b.tokens if is_small else -b.tokens)
        else:
            if b.seqs != rows[key.kind == "verify"]:
                continue
            rank = (b.max_kv_len,)
        kind = key.kind, b.rows_are_pages
        if kind not in found or rank > found[kind][0]:
            found[kind] = rank, key
    return [key for _, key in found.values()]


def _rows_of_first(keys: Sequence[StepKey], most: int, *, verifies: bool) -> int:
    """The rows of the first decode or verify steps: the largest size of at most `most` that stands
    in for fewer rows, as steps whose rows are pages do not; the smallest size where there is none.
    """
    kinds = ("verify",) if verifies else ("decode", "compact")
    sizes = [key.bucket for key in keys if key.kind in kinds]
    able = [size.seqs for size in sizes if size.seqs <= most and not size.rows_are_pages]
    return max(able, default=min((size.seqs for size in sizes), default=0))


def warmed(keys: Iterable[StepKey], config: EngineConfig) -> list[StepKey]:
    """The keys, and the keys of the same steps with the additional results and with the adapters
    that the configuration enables.
    """
    every = list(keys)
    if config.full_vocab_logprobs:
        every += [replace(key, full_vocab=True) for key in every if key.kind != "verify"]
    if config.embeddings:
        every += [replace(key, pools=True) for key in every if key.kind == "prefill"]
    if config.prompt_embeds:
        every += [replace(key, embeds=True) for key in every if key.kind == "prefill"]
    if config.lora_slots:
        every += [replace(key, adapts=True) for key in every]
    return list(dict.fromkeys(every))


def in_order(
    keys: Sequence[StepKey], config: EngineConfig, free_padding_rows: int = 0
) -> tuple[list[StepKey], list[StepKey]]:
    """The steps of `warmed`: those whose programs serve every request, and the others as they are
    compiled beside the requests: first those that serve every step, then by increasing cost, and at
    the end those without adapters, in whose place the steps with adapters run.
    """
    first = covering(warmed(first_steps(keys, free_padding_rows), config))
    every = warmed(keys, config)
    serving_all = set(covering(every))
    others = [key for key in every if key not in first]
    is_lean = {key: bool(config.lora_slots) and not key.adapts for key in every}
    others.sort(key=lambda k: (k not in serving_all, is_lean[k], *cost(k), k.full_vocab))
    return first, others


def plain(key: StepKey) -> StepKey:
    """The key of the step without the variant of its sampler."""
    return replace(key, variant=StepVariant.FULL, names=None)


def is_near(key: StepKey, other: StepKey, free_padding_rows: int = 0) -> bool:
    """Whether the padding of a larger program costs less than several smaller steps."""
    if key.kind == "prefill":
        most = SEVERAL_TOKENS if free_padding_rows >= SEVERAL_TOKENS else FIRST_TOKENS
        return key.bucket.tokens <= max(2 * max(other.bucket.tokens, FIRST_TOKENS), most)
    return key.bucket.seqs <= max(4 * other.bucket.seqs, first_rows(free_padding_rows))


def several_rows(keys: Iterable[StepKey]) -> list[StepKey]:
    """The decode steps among the keys with the fewest rows that are at least SEVERAL_ROWS, over the
    longest contexts.
    """
    able = [key for key in keys if key.kind in ("decode", "compact")]
    able = [key for key in able if key.bucket.seqs >= SEVERAL_ROWS]
    fewest = min((key.bucket.seqs for key in able), default=0)
    return covering(key for key in able if key.bucket.seqs == fewest)


def several_tokens(keys: Iterable[StepKey], free_padding_rows: int) -> list[StepKey]:
    """The prefills among the keys with the most tokens that are at most SEVERAL_TOKENS, and more
    than FIRST_TOKENS; none where products do not skip so much padding.
    """
    if free_padding_rows < SEVERAL_TOKENS:
        return []
    able = [key for key in keys if key.kind == "prefill" and key.bucket.mode == "mixed"]
    able = [key for key in able if FIRST_TOKENS < key.bucket.tokens <= SEVERAL_TOKENS]
    most = max((key.bucket.tokens for key in able), default=0)
    return covering(key for key in able if key.bucket.tokens == most)


class Scoping:
    """Remembers the variants and logits processors that requests have needed so far, and whether
    requests had adapters.

    A new program is compiled for all of these, because what was needed once is needed again. So a
    bucket is compiled again only when a request needs something for the first time, a service of
    greedy requests never compiles a sampler, and a service without adapters runs the steps of the
    model alone.

    The names of the logits processors in a key are None for all processors of the engine, as
    warmup() compiles them.
    """

    def __init__(self, *, has_greedy: bool) -> None:
        self._largest = StepVariant.GREEDY if has_greedy else StepVariant.SAMPLE
        self._sets: list[frozenset[str]] = [frozenset()]
        self._adapts = False

    def serving(self, key: StepKey, need: StepNeeds) -> Iterator[StepKey]:
        """The variants of a step that serve its needs, smallest first: any compiled one will do."""
        full = StepVariant.FULL
        for adapts in (True,) if key.adapts else (False, True):
            one = replace(key, adapts=adapts)
            for variant in StepVariant:
                if need.variant <= variant < full:
                    yield replace(one, variant=variant, names=frozenset())
            for names in (*(names for names in self._sets if names >= need.names), None):
                yield replace(one, variant=full, names=names)

    def to_compile(self, key: StepKey, need: StepNeeds) -> StepKey:
        """The variant to compile when none of these is compiled: it serves all needs so far."""
        self._largest = max(self._largest, need.variant)
        self._adapts |= key.adapts
        if not need.names <= self._sets[-1]:
            self._sets.append(self._sets[-1] | need.names)
        is_full = self._largest is StepVariant.FULL
        names = self._sets[-1] if is_full else frozenset[str]()
        return replace(key, variant=self._largest, names=names, adapts=self._adapts)
