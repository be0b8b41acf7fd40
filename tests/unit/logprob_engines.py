"""Engines for tests of log-probabilities. Each has one layer and one bucket size of everything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.brief import LEAST
from tests.unit.replaceable_parts import Changing, changing
from tests.unit.serving import HOT, SIZES, assert_idle, with_

SMALL: dict[str, Any] = SIZES | {
    "max_model_len": 96,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "processors": (),
}


@contextlib.contextmanager
def pages() -> Iterator[Changing]:
    """One layer of the demo model on a paged engine.

    The first request is sampled and has penalties, so that the engine compiles the programs with
    sampling at once, and does not first compile programs for greedy rows.
    """
    with changing(LEAST, engine={"name": "oengine", "page_size": 8}, **SMALL) as made:
        made.llm.generate([[5, 6, 7]], with_(HOT, frequency_penalty=1.0))
        yield made
        assert_idle(made.llm)


@contextlib.contextmanager
def slots() -> Iterator[Changing]:
    """Like `pages`, on vInference with fixed slots: greedy rows with prompt logprobs."""
    with changing(LEAST, engine={"name": "vinference", "grow": False}, **SMALL) as made:
        yield made
        assert_idle(made.llm)
