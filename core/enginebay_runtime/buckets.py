"""Bucket sizes: step shapes are rounded up to a few sizes, so that few programs are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from enginebay.config_sections import KernelChoice
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.proposer import MAX_VERIFIED_ROWS
from enginebay.errors import InternalError


def doubling(low: int, high: int) -> tuple[int, ...]:
    """low, 2*low, 4*low, ... below high, then high itself."""
    sizes = []
    size = min(low, high)
    while size < high:
        sizes.append(size)
        size *= 2
    return (*sizes, high)


def finer(low: int, high: int) -> tuple[int, ...]:
    """doubling(low, high) with sizes between: multiples of 4 from 8 on, multiples of a quarter of
    the power of two from 32 on.
    """
    sizes = doubling(low, high)
    between = (
        size
        for power in sizes
        if power >= 8
        for size in range(power, min(2 * power, high), max(4, power // 4))
    )
    return tuple(sorted({*sizes, *between}))


def fewer_sizes(sizes: Sequence[int], kept: Collection[int], free: int) -> tuple[int, ...]:
    """The ascending sizes without those that are at most `free` and not in `kept`; always with the
    last one.
    """
    return tuple(n for n in sizes if n > free or n in kept or n == sizes[-1])


def smallest_fit(sizes: Sequence[int], needed: int) -> int:
    """The smallest of the ascending `sizes` that is at least `needed`."""
    for size in sizes:
        if size >= needed:
            return size
    raise InternalError(
        f"a step needs size {needed}, the largest bucket is {sizes[-1]}: the loop plans too "
        "large a step"
    )


@dataclasses.dataclass(frozen=True)
class BucketSizes:
    """Ascending sizes: rows of a decode step, rows and tokens of a prefill step, context lengths.
    `no_prefix_tokens`: the sizes of a prefill that also have a program for rows without a prefix.
    """

    decode_rows: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    no_prefix_tokens: tuple[int, ...]

    def prefill_shape(
        self, num_rows: int, num_tokens: int, *, no_prefix: bool, is_rare: bool
    ) -> tuple[int, int, bool]:
        """(rows, tokens, whether no row has a prefix) of the program for a prefill.

        Rare shapes use only every other size: fewer programs, a little more padding. With a single
        size of prefill rows, prefills of a size that is not among `no_prefix_tokens` use the
        program for rows with a prefix.
        """
        every, seqs = self.prefill_tokens, smallest_fit(self.prefill_rows, num_rows)
        if len(self.prefill_rows) > 1:
            fits = every[::-2][::-1] if is_rare or seqs > 1 else every
            return seqs, smallest_fit(fits, num_tokens), no_prefix
        tokens = smallest_fit(every, num_tokens)
        return seqs, tokens, no_prefix and tokens in self.no_prefix_tokens

    @property
    def verify_rows(self) -> tuple[int, ...]:
        """Rows of a verify step: every other size of a decode step, always with the smallest."""
        largest = smallest_fit(self.decode_rows, min(MAX_VERIFIED_ROWS, self.decode_rows[-1]))
        sizes = [size for size in self.decode_rows if size <= largest]
        return tuple(sorted({sizes[0], *sizes[::-2]}))


def default_sizes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    min_rows: int,
    ragged_decode: bool = False,
    one_prefill_width: bool = False,
    apart: bool = False,
    free_padding_rows: int = 0,
) -> BucketSizes:
    """Powers of two: decode rows from `min_rows`, prefill tokens from 16, contexts from 256.

    With `ragged_decode` programs do not depend on the context, so there is one context length, and
    rows come in finer sizes. With `one_prefill_width` (see Platform) all prefills have room for
    `max_num_seqs` rows, and only the largest size has a program without a prefix: on a CPU a
    smaller one is no faster, and that one is by a twentieth in bfloat16. `apart`: every other size
    has one, because another kernel computes it. Up to `free_padding_rows` padding takes little
    time, so there are fewer sizes.
    """
    longest_chunk = min(max_num_batched_tokens, max(16, max_model_len * max_num_seqs))
    prefill_tokens, free = doubling(16, longest_chunk), free_padding_rows
    prefill_tokens = fewer_sizes(prefill_tokens, prefill_tokens[1::2], free)
    rows = min_rows, max(min_rows, max_num_seqs)
    powers = doubling(*rows)
    decode_rows = finer(*rows) if ragged_decode else powers
    return BucketSizes(
        decode_rows=fewer_sizes(decode_rows, {powers[0], *powers[2:]}, free),
        prefill_rows=tuple(dict.fromkeys((max_num_seqs if one_prefill_width else 1, max_num_seqs))),
        prefill_tokens=prefill_tokens,
        kv_lens=(max_model_len,) if ragged_decode else doubling(256, max_model_len),
        no_prefix_tokens=prefill_tokens[::-2] if apart else prefill_tokens[-1:],
    )


def bucket_sizes(parts: EngineParts) -> BucketSizes:
    """The default sizes of an engine's steps."""
    config = parts.config
    assert config.max_model_len is not None, "the composition root resolves max_model_len"
    attention = config.kernels.get("attention", KernelChoice())
    return default_sizes(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        min_rows=parts.min_rows,
        ragged_decode=parts.ragged_decode,
        one_prefill_width=parts.platform.one_prefill_width,
        apart=attention.prefill != attention.mixed,
        free_padding_rows=parts.free_padding_rows,
    )
