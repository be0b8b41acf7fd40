"""Segments: a prompt that is made of token ids and embeddings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeGuard

import jax
import numpy as np

from enginebay.contracts.prefix_key import DIGEST_BYTES
from enginebay.embeds import Embeds
from enginebay.errors import RequestError

Array = np.ndarray | jax.Array
Segment = Sequence[int] | Array
"""Token ids, or embeddings [tokens, hidden_size]."""

DTYPES = ("float32", "bfloat16", "float16")


class Segments:
    """One prompt, as a sequence of segments. A segment is a list of token ids, or an array of
    embeddings [tokens, hidden_size] (float32, bfloat16 or float16), which the model uses in place
    of token embeddings.

        Segments([1, 5, 7], image_embeddings, [9, 2])
    """

    def __init__(self, *segments: Segment) -> None:
        """RequestError for a segment that is neither."""
        for one in segments:
            if not (is_embeds(one) or is_token_ids(one)):
                raise RequestError(
                    f"a segment of type {type(one).__name__}",
                    "a list of token ids, or an array [tokens, hidden_size]",
                    "Convert the segment to a list or an array.",
                )
        self.segments = segments

    def resolve(
        self, hidden_size: int, placeholder: int, check: Callable[[Sequence[int]], None]
    ) -> tuple[list[int], Embeds]:
        """The prompt's token ids, with `placeholder` at each embedding's position, and the
        embeddings. Calls `check` with the ids of each segment of token ids. RequestError for
        embeddings whose shape, dtype or values the model cannot use.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        values = [np.zeros((0, hidden_size), np.float32)]
        for one in self.segments:
            if is_embeds(one):
                values.append(_checked(one, hidden_size))
                positions += range(len(token_ids), len(token_ids) + len(one))
                token_ids += [placeholder] * len(one)
            else:
                ids = [int(t) for t in one]
                check(ids)
                token_ids += ids
        rows = np.concatenate(values)
        digests = (
            hashlib.blake2b(row.tobytes(), digest_size=DIGEST_BYTES).digest() for row in rows
        )
        hashes = tuple(zip(positions, digests, strict=True))
        return token_ids, Embeds(np.asarray(positions, np.int32), rows, hashes)


def as_segments(prompt_embeds: object) -> list[Segments]:
    """The prompts in `prompt_embeds` of `LLM.generate`: one array, a list of the segments of one
    prompt, or a list of such lists, one per prompt. RequestError for anything else.
    """
    if is_embeds(prompt_embeds):
        return [Segments(prompt_embeds)]
    if isinstance(prompt_embeds, list | tuple) and prompt_embeds:
        if all(is_embeds(one) or is_token_ids(one) for one in prompt_embeds):
            return [Segments(*prompt_embeds)]
        if all(isinstance(one, list | tuple) for one in prompt_embeds):
            return [Segments(*one) for one in prompt_embeds]
    raise RequestError(
        f"prompt_embeds of type {type(prompt_embeds).__name__}",
        "an array [tokens, hidden_size], a list of segments, or a list of such lists",
        "Pass the embeddings of one prompt as an array.",
    )


def is_embeds(value: object) -> TypeGuard[Array]:
    """Whether a segment is an array of embeddings."""
    return isinstance(value, np.ndarray | jax.Array) and value.ndim == 2


def is_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    """Whether a segment is a list of token ids."""
    if isinstance(value, np.ndarray | jax.Array):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, list | tuple | range) and all(
        isinstance(t, int | np.integer) for t in value
    )


def _checked(embeds: Array, hidden_size: int) -> np.ndarray:
    array = np.asarray(embeds)
    given = f"embeddings {array.dtype} {list(array.shape)}"
    if array.dtype.name not in DTYPES:
        todo = "Convert the array with astype(numpy.float32)."
        raise RequestError(given, " or ".join(DTYPES), todo)
    if array.shape[1] != hidden_size or not len(array):
        allowed = f"[tokens, {hidden_size}] with at least one token, for this model"
        raise RequestError(given, allowed, "Compute the embeddings with this model.")
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise RequestError(
            f"{given} with NaN or infinity", "finite values", "Check how they were computed."
        )
    return array
