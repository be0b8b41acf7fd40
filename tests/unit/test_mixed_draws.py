"""20,000 draws, and 200,000, of requests that ask for logits processors and sampling parameters
together have exact frequencies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from enginebay.plugins.registry import load_registry
from enginebay_samplers import standard
from enginebay_testing.mixed_draws import NUM_DRAWS, MixedRequest, check_mixed_draws
from enginebay_testing.sampler_runs import RowHistory, logits_of
from enginebay_testing.sampling_oracle import OracleParams, penalised, probabilities
from enginebay_xla import sample as draw

REGISTRY = load_registry()
SAMPLE = functools.partial(standard.sample, draw=draw.sample)
VOCAB = 24
LOGITS = logits_of(VOCAB, spread=1.0, seed=3)
HISTORY = RowHistory((2, 5, 7, 11), (5, 8, 5, 3, 2, 5))


def processors_of(names: Sequence[str]) -> tuple[Any, ...]:
    """Built-in ones by name, in the order in which steps apply them."""
    entries = [REGISTRY.find("processor", name) for name in names]
    entries.sort(key=lambda entry: entry.declaration.capabilities["order"])
    return tuple((entry.name, REGISTRY.load(entry)()) for entry in entries)


def options_of(**given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: REGISTRY.options(REGISTRY.find("processor", name), values)
        for name, values in given.items()
    }


# What the processors' sources say, in float64: scores [VOCAB] to scores.


def after_temperature(scores: np.ndarray, temperature: float) -> np.ndarray:
    mass = np.exp((scores - scores.max()) / temperature)
    return mass / mass.sum()


def without(scores: np.ndarray, lost: np.ndarray) -> np.ndarray:
    return np.where(lost, -np.inf, scores)


def typical(scores: np.ndarray, temperature: float, mass: float) -> np.ndarray:
    p = after_temperature(scores, temperature)
    information = -np.log(np.where(p > 0, p, 1.0))
    distance = np.where(p > 0, np.abs(information - (p * information).sum()), np.inf)
    order = np.argsort(distance)
    num_kept = np.flatnonzero(np.cumsum(p[order]) >= mass)[0] + 1
    return without(scores, ~np.isin(np.arange(VOCAB), order[:num_kept]))


def xtc(scores: np.ndarray, temperature: float, threshold: float) -> np.ndarray:
    p = after_temperature(scores, temperature)
    top = p >= threshold
    return without(scores, top & (p > p[top].min())) if top.any() else scores


def mirostat(scores: np.ndarray, temperature: float, mu: float) -> np.ndarray:
    p = after_temperature(scores, temperature)
    surprise = -np.log2(np.where(p > 0, p, 1e-300))
    return without(scores, (surprise > mu) & (scores < scores.max()))


def biased(scores: np.ndarray, bias: Mapping[int, float]) -> np.ndarray:
    scores = scores.astype(np.float64)
    for token, value in bias.items():
        scores[token] += value
    return scores


def banned(scores: np.ndarray, *tokens: int) -> np.ndarray:
    return without(scores, np.isin(np.arange(VOCAB), tokens))


PENALTIES = OracleParams(presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.3)
BIAS = {1: 3.0, 4: -2.5, 9: 1.5}


def cutting() -> dict[str, MixedRequest]:
    """Penalties and biases, and what cuts by probability."""
    lessened = penalised(LOGITS, PENALTIES, *HISTORY)
    penalties = {"presence": 0.4, "frequency": 0.3, "repetition": 1.3}
    after_bias = biased(LOGITS, BIAS)
    both = biased(lessened, BIAS)
    t_typical = OracleParams(temperature=0.8, top_p=0.9)
    t_xtc, t_miro = OracleParams(temperature=1.3), OracleParams(temperature=1.2)
    t_all = OracleParams(temperature=1.5, top_k=12, top_p=0.95, min_p=0.01)
    all_typical = typical(both, 1.5, 0.9)
    wide = OracleParams(temperature=2.0, min_p=0.05)
    allowed = tuple(range(0, VOCAB, 2))
    return {
        "temperature, top_p and typical": MixedRequest(
            LOGITS, probabilities(typical(LOGITS, 0.8, 0.7), t_typical), t_typical,
            options_of(typical={"typical_p": 0.7}),
        ),
        "xtc at two of five positions": MixedRequest(
            LOGITS,
            0.4 * probabilities(xtc(LOGITS, 1.3, 0.05), t_xtc) + 0.6 * probabilities(LOGITS, t_xtc),
            t_xtc, options_of(xtc={"threshold": 0.05, "probability": 0.4}),
        ),
        "penalties and min_p": MixedRequest(
            LOGITS, probabilities(lessened, OracleParams(min_p=0.05)), OracleParams(min_p=0.05),
            options_of(penalties=penalties), HISTORY,
        ),
        "logit_bias and top_k": MixedRequest(
            LOGITS, probabilities(after_bias, OracleParams(top_k=5)), OracleParams(top_k=5),
            options_of(logit_bias={"bias": BIAS}),
        ),
        "mirostat's first token": MixedRequest(
            LOGITS, probabilities(mirostat(LOGITS, 1.2, 3.0), t_miro), t_miro,
            options_of(mirostat={"tau": 1.5}),
        ),
        "allowed tokens, biased, and min_p": MixedRequest(
            LOGITS,
            probabilities(without(after_bias, ~np.isin(np.arange(VOCAB), allowed)), wide), wide,
            options_of(logit_bias={"bias": BIAS}, allowed_token_ids={"token_ids": allowed}),
        ),
        "penalties, bias, typical, xtc, top_k, top_p and min_p": MixedRequest(
            LOGITS,
            0.5 * probabilities(xtc(all_typical, 1.5, 0.08), t_all)
            + 0.5 * probabilities(all_typical, t_all),
            t_all,
            options_of(
                penalties=penalties, logit_bias={"bias": BIAS}, typical={"typical_p": 0.9},
                xtc={"threshold": 0.08, "probability": 0.5},
            ),
            HISTORY,
        ),
    }  # fmt: skip


def repeating() -> dict[str, MixedRequest]:
    """What looks at the text so far: here it ends with 2 5, which 7 followed, and 5 was followed by
    7, 8 and 3.
    """
    text = (*HISTORY.prompt, *HISTORY.output)
    assert text[-2:] == (2, 5)
    early, warm = OracleParams(top_k=10), OracleParams(temperature=1.4)
    # A repetition of two tokens is prolonged by 7, one of a single token by 8 and 3.
    drier = biased(LOGITS, {7: -1.2 * 1.5**1, 8: -1.2, 3: -1.2})
    cut = OracleParams(top_p=0.8)
    return {
        "no two tokens twice, and top_p": MixedRequest(
            LOGITS, probabilities(banned(LOGITS, 7, 8, 3), cut), cut,
            options_of(no_repeat_ngram={"size": 2}), HISTORY,
        ),
        "bad words, no end yet, and top_k": MixedRequest(
            LOGITS, probabilities(banned(LOGITS, 1, 6, 9, 10), early), early,
            options_of(
                bad_words={"sequences": ((6,), (2, 5, 10), (5, 2, 12))},
                min_tokens={"min_tokens": 7},
            ),
            HISTORY, eos_token_ids=(1, 9),
        ),
        "dry and temperature": MixedRequest(
            LOGITS, probabilities(drier, warm), warm,
            options_of(dry={"multiplier": 1.2, "base": 1.5, "allowed_length": 1}), HISTORY,
        ),
        "dry, no three tokens twice, and typical": MixedRequest(
            LOGITS, probabilities(typical(banned(drier, 7), 1.4, 0.8), warm), warm,
            options_of(
                dry={"multiplier": 1.2, "base": 1.5, "allowed_length": 1},
                no_repeat_ngram={"size": 3}, typical={"typical_p": 0.8},
            ),
            HISTORY,
        ),
    }  # fmt: skip


EXACTLY = pytest.param(NUM_DRAWS, marks=pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize("num_draws", [20_000, EXACTLY])
def test_processors_and_parameters_together_have_exact_frequencies(
    num_draws: int,
) -> None:  # holds SG4
    mixes = cutting() | repeating()
    plain = probabilities(LOGITS, OracleParams())
    for name, mix in mixes.items():
        alone = probabilities(LOGITS, mix.params)
        assert np.abs(mix.shares - alone).max() > 0.01, f"{name}: its processors change nothing"
        assert np.abs(mix.shares - plain).max() > 0.01, f"{name}: nothing is changed"
    names = {name for mix in mixes.values() for name in mix.options}
    check_mixed_draws(SAMPLE, processors_of(sorted(names)), mixes, num_draws)


@pytest.mark.long
def test_shares_that_are_a_little_off_are_noticed() -> None:  # holds SG4
    mix = cutting()["xtc at two of five positions"]
    options = options_of(xtc={"threshold": 0.05, "probability": 0.42})
    with pytest.raises(AssertionError, match="a bit too often: chi-square"):
        check_mixed_draws(
            SAMPLE,
            processors_of(["xtc"]),
            {"a bit too often": dataclasses.replace(mix, options=options)},
        )
    forbidden = dataclasses.replace(mix, shares=np.eye(VOCAB)[int(LOGITS.argmax())])
    with pytest.raises(AssertionError, match=r"one token: tokens .* but their share is 0"):
        check_mixed_draws(SAMPLE, processors_of(["xtc"]), {"one token": forbidden}, 2000)
