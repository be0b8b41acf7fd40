"""Logits processors that change scores and ban tokens, against what their sources say, in float64
NumPy; options that are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from enginebay.compose.processors import choose_processors
from enginebay.config import EngineConfig
from enginebay.contracts.processor import RowFacts, Sizes
from enginebay.errors import ConfigError, RequestError
from tests.unit.processor_rows import (
    EOS,
    REGISTRY,
    VOCAB,
    WIDTH,
    Row,
    banned,
    check,
    fields_of,
    only,
)

TEXT = [5, 6, 7, 1, 5, 6, 7, 2, 8, 5, 6, 7]
"""Ends with what it has had twice, which 1 and 2 followed."""


def test_penalties() -> None:
    def oracle(row: Row) -> np.ndarray:
        options = {
            "presence": 0.0,
            "frequency": 0.0,
            "repetition": 1.0,
            "output_only": False,
            **(row.options or {}),
        }
        score = row.logits.astype(np.float64)
        for token in set(row.output if options["output_only"] else row.text):
            factor = np.clip(options["repetition"], 1e-30, 1e30)
            score[token] = score[token] / factor if score[token] > 0 else score[token] * factor
        for token, times in Counter(row.output).items():
            score[token] -= options["frequency"] * times + options["presence"]
        return score

    texts: dict[str, Any] = {"prompt": [1, 2, 2, 60], "output": [2, 7, 7, 69, 0]}
    rows = [
        Row({}, **texts),
        Row({"presence": 1.5}, **texts),
        Row({"frequency": -0.7}, **texts),
        Row({"repetition": 1.8}, **texts),
        Row({"repetition": 1.8, "output_only": True}, **texts),
        Row({"repetition": 0.5, "output_only": True}, prompt=[1, 2, 3]),
        Row({"presence": -2.0, "frequency": 2.0, "repetition": 3.0}, **texts, seed=3),
        Row({"presence": 1.0, "repetition": 100.0}, **texts, logits=only(7, 40)),
        Row({"repetition": 1e-300}, **texts, logits=only(7, 40)),
        Row({"repetition": 1e300}, **texts),
    ]
    check("penalties", oracle, rows, changed=8)


def test_logit_bias() -> None:
    def oracle(row: Row) -> np.ndarray:
        score = row.logits.astype(np.float64)
        for token, bias in ((row.options or {}).get("bias") or {}).items():
            score[int(token)] += bias
        return score

    every = {i: 0.1 * i for i in range(VOCAB)}
    biases: list[Any] = [{}, {0: 5, VOCAB - 1: -100.0}, {"12": 100.0}, every]
    rows = [
        *(Row({"bias": b}, seed=i) for i, b in enumerate(biases)),
        Row({"bias": {3: 9.0}}, logits=only(8)),
    ]
    check("logit_bias", oracle, rows, changed=3)


def test_allowed_token_ids() -> None:
    def oracle(row: Row) -> np.ndarray:
        ids = (row.options or {})["token_ids"]
        return banned(row, set(range(VOCAB)) - set(range(VOCAB) if ids is None else ids))

    sets: list[Any] = [None, [0], [31, 32, 33, 63, 64, 69], [69], list(range(1, VOCAB))]
    rows = [Row({"token_ids": ids}, seed=i) for i, ids in enumerate(sets)]
    check(
        "allowed_token_ids",
        oracle,
        [*rows, Row({"token_ids": [1, 2]}, logits=only(8, 9))],
        changed=4,
    )


def test_min_tokens() -> None:
    def oracle(row: Row) -> np.ndarray:
        options = {"stop_token_ids": (), **(row.options or {})}
        early = len(row.output) < options["min_tokens"]
        return banned(row, {*EOS, *options["stop_token_ids"]} if early else set())

    rows = [
        Row({"min_tokens": 3, "stop_token_ids": stops}, output=[8] * num)
        for num in (0, 2, 3, 4)
        for stops in ([], [0, 69])
    ]
    rows += [
        Row({"min_tokens": 0}),
        Row({"min_tokens": 5}, logits=only(*EOS)),
        Row({"min_tokens": 5}, logits=only(4, 8)),
    ]
    check("min_tokens", oracle, rows, changed=5)


def test_bad_words() -> None:
    def oracle(row: Row) -> np.ndarray:
        sequences = (row.options or {})["sequences"]
        ends = {
            s[-1]
            for s in sequences
            if len(s) <= len(row.text) + 1 and row.text[len(row.text) - len(s) + 1 :] == s[:-1]
        }
        return banned(row, ends)

    long = list(range(20, 36))
    rows = [
        Row({"sequences": []}),
        Row({"sequences": [[0], [69]]}),
        Row({"sequences": [[1, 5], [3, 1, 6], [1, 3, 7], [2, 3, 1, 8]]}, prompt=[3, 1]),
        Row(
            {"sequences": [[3, 1, 7, 8], [1, 7, 9], [7, 10], [3, 7, 11]]}, prompt=[3, 1], output=[7]
        ),
        Row({"sequences": [long, [34, 36], [33, 36]]}, prompt=long[:10], output=long[10:15]),
        Row({"sequences": [long]}, prompt=long[1:15]),
        Row({"sequences": [[8]]}, logits=only(8)),
        Row({"sequences": [[4, 4, 9]]}, prompt=[4]),  # nothing stands before the text
    ]
    check("bad_words", oracle, rows, changed=4)


def test_no_repeat_ngram() -> None:
    def oracle(row: Row) -> np.ndarray:
        size, text = (row.options or {})["size"], row.text
        tail = text[len(text) - size + 1 :] if size > 1 else []
        grams = [text[i : i + size] for i in range(len(text) - size + 1)]
        return banned(row, {g[-1] for g in grams if g[:-1] == tail})

    rows = [Row({"size": n}, prompt=TEXT[:5], output=TEXT[5:]) for n in (1, 2, 3, 4, 5, 20)]
    rows += [Row({"size": n}, prompt=[6]) for n in (1, 2)]
    rows += [
        Row({"size": 3}, prompt=[6] * 6),
        Row({"size": 2}, prompt=[6] * WIDTH),
        Row({"size": 1}, prompt=[8], logits=only(8)),
    ]
    check("no_repeat_ngram", oracle, rows, changed=7)


def dry_oracle(row: Row) -> np.ndarray:
    """As its source has it, token by token."""
    defaults = {
        "multiplier": 0.8,
        "base": 1.75,
        "allowed_length": 2,
        "sequence_breakers": (),
        "range": 0,
    }
    options = {**defaults, **(row.options or {})}
    breakers, score = set(options["sequence_breakers"]), row.logits.astype(np.float64)
    text = row.text[-options["range"] :]
    lengths: dict[int, int] = {}
    for i in range(len(text) - 1):
        if text[i] != text[-1] or text[-1] in breakers or text[i + 1] in breakers:
            continue
        length = 1
        while (
            length < 50
            and i - length >= 0
            and text[i - length] == text[-1 - length]
            and text[i - length] not in breakers
        ):
            length += 1
        lengths[text[i + 1]] = max(length, lengths.get(text[i + 1], 0))
    for token, length in lengths.items():
        if length >= options["allowed_length"]:
            score[token] -= options["multiplier"] * options["base"] ** (
                length - options["allowed_length"]
            )
    return score


def test_dry() -> None:
    texts: dict[str, Any] = {"prompt": TEXT[:5], "output": TEXT[5:]}
    options: list[dict[str, Any]] = [
        {},
        {"allowed_length": 1},
        {"allowed_length": 3, "multiplier": 3.0, "base": 1.0},
        {"allowed_length": 4},
        {"multiplier": 0.0},
        {"allowed_length": 1, "sequence_breakers": [6]},
        {"allowed_length": 1, "sequence_breakers": [7]},
        {"allowed_length": 1, "sequence_breakers": [2, 69]},
        {"allowed_length": 1, "range": 6},
        {"range": 8, "base": 2.0},
    ]
    rows = [Row(o, **texts) for o in options]
    rows += [
        Row({"base": 4.0}, prompt=[6, 8] * (WIDTH // 2)),
        Row({"allowed_length": 1}, prompt=[6]),
    ]
    check(
        "dry",
        dry_oracle,
        [*rows, Row({"allowed_length": 1}, **texts, logits=only(2, 60))],
        changed=9,
    )


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("logit_bias", {"bias": {VOCAB: 1.0}}, rf"token id {VOCAB}.*0 to {VOCAB - 1}"),
        ("logit_bias", {"bias": dict.fromkeys(range(1025), 1.0)}, "1025.*at most 1024"),
        ("allowed_token_ids", {"token_ids": [3, -1]}, rf"token id -1.*0 to {VOCAB - 1}"),
        ("min_tokens", {"stop_token_ids": [1000]}, "token id 1000"),
        ("min_tokens", {"stop_token_ids": list(range(10, 25))}, "17.*at most 16"),
        ("bad_words", {"sequences": [[1]] * 257}, "257 bad words.*at most 256"),
        ("bad_words", {"sequences": [[1] * 17]}, "17 tokens.*at most 16"),
        ("bad_words", {"sequences": [[1, 70]]}, "token id 70"),
        ("dry", {"sequence_breakers": [-2]}, "token id -2"),
    ],
)
def test_what_cannot_be_served_is_refused(name: str, options: Mapping[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        fields_of(name, options)


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("penalties", {"presence": 2.5}, "presence"),
        ("penalties", {"repetition": 0.0}, "repetition"),
        ("penalties", {"output_only": 1}, "output_only"),
        ("logit_bias", {"bias": {3: float("inf")}}, "bias.3"),
        ("logit_bias", {"bias": {3: -100.5}}, "bias.3"),
        ("logit_bias", {"bias": {"three": 1.0}}, "bias.three"),
        ("allowed_token_ids", {"token_ids": []}, "token_ids"),
        ("allowed_token_ids", {"token_ids": ["3"]}, "token_ids"),
        ("min_tokens", {"min_tokens": -1}, "min_tokens"),
        ("min_tokens", {"min_tokens": True}, "min_tokens"),
        ("bad_words", {"sequences": [[]]}, "sequences"),
        ("bad_words", {"sequences": [3]}, "sequences"),
        ("no_repeat_ngram", {"size": 0}, "size"),
        ("dry", {"base": 0.5}, "base"),
        ("dry", {"allowed_length": 51}, "allowed_length"),
        ("typical", {"typical_p": 0.0}, "typical_p"),
        ("typical", {"typical_p": float("nan")}, "typical_p"),
        ("xtc", {"probability": 1.1}, "probability"),
        ("mirostat", {"tau": -1.0}, "tau"),
        ("mirostat", {"rate": 0.1}, "rate"),
    ],
)
def test_wrong_options_are_refused_by_name(
    name: str, options: Mapping[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        REGISTRY.options(REGISTRY.find("processor", name), options)
    with pytest.raises(RequestError, match=field):
        choose_processors(REGISTRY, EngineConfig(processors=(name,))).rows(
            {name: options}, RowFacts(np.array([1], np.int32), (), Sizes(VOCAB, WIDTH))
        )
