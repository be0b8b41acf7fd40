"""Weights that are rounded in a product: what quantised weights would give."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import InputError
from enginebay_xla.linear import linear
from enginebay_xla.rounded_weights import linear_by_int4, linear_by_int8
from tests.brief import LEAST
from tests.unit.quantizing import quantized

ROWS = np.random.default_rng(0).normal(size=(6, 4, 64)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)


def test_a_weight_rounded_to_int8_is_that_of_the_quantisation() -> None:
    got = jax.jit(linear_by_int8)(X, ROWS)
    np.testing.assert_allclose(got, linear(X, quantized(ROWS)), rtol=1e-4, atol=1e-5)


def test_four_bits_are_coarser_and_keep_a_weight_of_zeros() -> None:
    plain = np.asarray(linear(X, ROWS))
    errors = [
        np.abs(np.asarray(jax.jit(one)(X, ROWS)) - plain).max()
        for one in (linear_by_int8, linear_by_int4)
    ]
    assert 0 < 5 * errors[0] < errors[1] < 0.2 * np.abs(plain).max()
    assert not np.asarray(linear_by_int4(X, 0 * ROWS)).any()


def test_a_quantised_weight_is_refused() -> None:
    with pytest.raises(InputError, match=r"quantised by int8.*Leave --quantization out"):
        linear_by_int8(X, quantized(ROWS))


@pytest.mark.slow
def test_a_shadow_shows_what_rounded_weights_would_change() -> None:
    shadow = {"linear": "enginebay_xla.rounded_weights:linear_by_int8@1"}
    with LLM(LEAST, dtype="float32", max_model_len=64, max_num_seqs=1, shadow=shadow) as llm:
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=4, ignore_eos=True))
        report = llm.shadow_report()
    assert report is not None
    assert report.num_failed == 0
    worst = max(one.relative for one in report.layers)
    assert 1e-4 < worst < 0.1
