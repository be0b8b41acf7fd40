"""Differences of tokens are forgiven where rounding decides between the two, greedy or sampled, and
nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from enginebay import SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay_samplers import standard
from enginebay_testing.near_ties import assert_same_tokens, first_impossible_token, possible_tokens
from enginebay_testing.reference import ReferenceModel
from enginebay_xla.sample import sample as draw
from tests.brief import TINY

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=2**40 + 3)
VOCAB = 32


class Fixed:
    """A model with the same logits after every prefix."""

    sample = staticmethod(jax.jit(functools.partial(standard.sample, draw=draw)))

    def __init__(self, row: np.ndarray) -> None:
        self.row = row.astype(np.float32)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        return np.tile(self.row, (len(token_ids), 1))

    def rounding(self, token_ids: Sequence[int]) -> np.ndarray:
        return np.zeros(len(token_ids), np.float32)


def wide() -> Fixed:
    return Fixed(np.random.default_rng(0).normal(size=VOCAB))


def tie_of(params: SamplingParams) -> tuple[Fixed, int, int]:
    """A model in which the token after one token and another one are a hair's breadth apart, and
    the two.
    """
    model = wide()
    (chosen,) = possible_tokens(model, [0], params)
    other = (chosen + 1) % VOCAB
    low, high = 0.0, 60.0
    for _ in range(60):  # how much the other's logit must rise to be chosen
        middle = (low + high) / 2
        raised = model.row.copy()
        raised[other] += middle
        low, high = (
            (low, middle)
            if other in possible_tokens(Fixed(raised), [0], params)
            else (middle, high)
        )
    raised = model.row.copy()
    raised[other] += high + 1e-4
    return Fixed(raised), chosen, other


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_rounding_decides_a_near_tie(params: SamplingParams) -> None:
    model, chosen, other = tie_of(params)
    assert possible_tokens(model, [0], params) == {chosen, other}
    rows = [[chosen]] * 19
    assert_same_tokens(model, [[0]] * 20, [*rows, [chosen]], [*rows, [other]], params)
    assert first_impossible_token(model, [0], [other], params) is None
    third = (chosen + 2) % VOCAB
    with pytest.raises(AssertionError, match="not a near-tie"):
        assert_same_tokens(model, [[0]], [[chosen]], [[third]], params)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_near_ties_in_many_rows_are_no_accident(params: SamplingParams) -> None:
    model, chosen, other = tie_of(params)
    with pytest.raises(AssertionError, match="2 of 10 rows differ"):
        assert_same_tokens(
            model, [[0]] * 10, [[chosen]] * 10, [[chosen]] * 8 + [[other]] * 2, params
        )


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_token_that_only_another_seed_gives_is_impossible(params: SamplingParams) -> None:
    model = wide()
    output = [next(iter(possible_tokens(model, [0] * (1 + at), params))) for at in range(8)]
    assert first_impossible_token(model, [0], output, params) is None
    output[5] = (output[5] + 1) % VOCAB
    assert first_impossible_token(model, [0], output, params) == 5


@pytest.mark.long
def test_only_inputs_that_are_rounded_move_logits_besides() -> None:
    def rounding(**choices: str) -> np.ndarray:
        config = EngineConfig(model=TINY, dtype="float32", max_model_len=256, **choices)
        return ReferenceModel(make_plan(config)).rounding([5, 6, 7])

    assert not rounding().any()
    assert not rounding(quantization="int4").any()
    for how in ("int8", "int8_group"):
        moved = rounding(quantization="int4", activation_quantization=how)
        assert moved.shape == (3,)
        assert (moved > 1e-3).all()
        assert (moved < 1).all()
