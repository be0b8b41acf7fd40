"""What the tests of the vInference API share: one small model and size, and so a few programs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np

from enginebay_vinference import (
    SampleState,
    vInference,
    vInferenceConfig,
    vInferencePreCompileConfig,
)
from tests.brief import LATE
from tests.unit.serving import SIZES_OF_APIS

MODEL: dict[str, Any] = {"model": LATE, "processors": ()} | SIZES_OF_APIS
CONFIG = vInferenceConfig(max_new_tokens=20, streaming_chunks=8)
SIXTEEN = vInferencePreCompileConfig(batch_size=1, prefill_length=16)
BATCH = vInferencePreCompileConfig(batch_size=4, prefill_length=48)
BUCKETS = vInferencePreCompileConfig(batch_size=[1, 4], prefill_length=[16, 48])
"""Both of them."""
TEXTS = (
    "Once upon a time",
    "The",
    "One day, a little robot found a red ball behind the old house near the river and",
    "Hello, my name is",
)


def like(
    inference: vInference,
    config: vInferenceConfig = CONFIG,
    most: int | None = None,
    **options: Any,
) -> vInference:
    """Another inference, with what `inference` has compiled: of the first `most` shapes, or of all.

    It uses that for shapes that are equal in everything: chunk, longest answer and pad token too.
    """
    made = vInference(options.pop("model", MODEL), None, config, **options)
    for shape in inference.programs.shapes[:most]:
        pair = inference.programs.get(shape, ahead=True)
        made.programs.get(shape, ahead=True, make=lambda pair=pair: pair)
    return made


def padded(rows: list[list[int]], *, pad: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids padded on the right, and their mask."""
    width = max(map(len, rows))
    ids = np.array([row + [pad] * (width - len(row)) for row in rows], np.int32)
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], np.int32)
    return ids, mask


def last(states: Iterable[SampleState]) -> SampleState:
    """The last of them; each is valid until the next, so none is kept."""
    state = None
    for state in states:  # noqa: B007
        pass
    assert state is not None
    return state


def new_tokens(state: SampleState) -> list[list[int]]:
    """What each row has generated."""
    start = int(state.padded_length)
    ids = np.asarray(state.sequences)[:, start:]
    mask = np.asarray(state.model_kwargs["attention_mask"])[:, start:]
    return [row[real > 0].tolist() for row, real in zip(ids, mask, strict=True)]


def encode(inference: vInference, *texts: str) -> tuple[np.ndarray, np.ndarray]:
    """Texts as padded ids with their mask."""
    return padded([inference.tokenizer.encode(text) for text in texts])


def drain(
    parts: Generator[Any, None, Any], each: Callable[[Any], object] = lambda _: None
) -> tuple[list[Any], Any]:
    """What a generator yields, `each` called on it at once, and what it returns."""
    found = []
    while True:
        try:
            found.append(next(parts))
        except StopIteration as stop:
            return found, stop.value
        each(found[-1])
