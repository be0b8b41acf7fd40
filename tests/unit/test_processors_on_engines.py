"""Each built-in logits processor in a row of its own: both engines give the same tokens, alone and
in one batch.
"""

from __future__ import annotations

from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from tests.brief import BRIEF

PROMPT = [5, 6, 7, 8, 5, 6, 7]


def asked(processors: dict[str, dict[str, Any]]) -> SamplingParams:
    return SamplingParams(
        max_tokens=6, temperature=1.5, seed=3, ignore_eos=True, processors=processors
    )


def options_against(plain: list[int]) -> dict[str, dict[str, Any]]:
    """By processor, so that each changes these tokens."""
    return {
        "logit_bias": {"bias": {plain[0]: -100.0}},
        "allowed_token_ids": {"token_ids": list(range(100, 200))},
        "min_tokens": {"min_tokens": 8, "stop_token_ids": [plain[0]]},
        "bad_words": {"sequences": [[PROMPT[-1], plain[0]]]},
        "no_repeat_ngram": {"size": 1},
        "dry": {"multiplier": 50.0, "allowed_length": 1},
        "penalties": {"presence": 2.0, "frequency": 2.0, "repetition": 2.0},
        "typical": {"typical_p": 0.1},
        "xtc": {"threshold": 0.001, "probability": 1.0},
        "mirostat": {"tau": 0.5},
    }


def tokens(llm: LLM, rows: list[SamplingParams]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate([PROMPT] * len(rows), rows)]


@pytest.mark.slow
def test_every_row_gets_what_it_gets_alone_on_both_engines() -> None:
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    found = []
    for engine in ("vinference", "oengine"):
        with LLM(BRIEF, engine=engine, dtype="float32", **sizes) as llm:
            (plain,) = tokens(llm, [asked({})])
            options = options_against(plain)
            rows = [
                asked({}),
                *(asked({name: values}) for name, values in options.items()),
                asked(options),
            ]
            together = tokens(llm, rows)
            assert [tokens(llm, [row])[0] for row in rows] == together
            found.append(together)
    assert found[0] == found[1]
    free, *others = found[0]
    changed = {name for name, other in zip(options, others, strict=False) if other != free}
    assert changed >= options.keys() - {"dry", "penalties", "no_repeat_ngram"}, (
        "what repeats nothing is not changed"
    )
    assert set(others[1]) <= set(range(100, 200))
    assert len({*others[4], *PROMPT}) == len({*PROMPT}) + 6
