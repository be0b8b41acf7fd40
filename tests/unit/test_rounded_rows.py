"""Rows that are rounded to int8: within half a scale, rows of zeros and of NaN included."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.errors import UnsupportedError
from enginebay.ops.activations import LARGEST, rounded_groups, rounded_rows
from enginebay_pallas.products import prepared_rows
from enginebay_testing.quantized import random_weight


def test_rows_are_rounded_to_int8_with_a_scale_each() -> None:
    x = np.random.default_rng(0).normal(size=(5, 48)).astype(np.float32)
    x *= np.logspace(-3, 3, 5, dtype=np.float32)[:, None]
    x[3] = 0.0
    values, scales = (np.asarray(each) for each in rounded_rows(x))
    assert (values.dtype, scales.shape) == (np.int8, (5, 1))
    assert (np.abs(values * scales - x) <= 0.501 * scales).all()
    assert (np.abs(values).max(axis=1) == [LARGEST, LARGEST, LARGEST, 0, LARGEST]).all()


def test_a_row_of_nan_changes_no_other_row() -> None:
    x = np.ones((3, 8), np.float32)
    x[1, 4] = np.nan
    values, scales = (np.asarray(each) for each in rounded_rows(x))
    assert (values[[0, 2]] == LARGEST).all()
    assert np.isnan(scales[1]).all()


def test_each_group_of_a_row_is_rounded_with_a_scale_of_its_own() -> None:
    x = np.random.default_rng(0).normal(size=(3, 75)).astype(np.float32)
    x[:, 32:64] *= 1000.0
    x[1, 40] = np.nan
    got = np.asarray(rounded_groups(x))
    for first in (0, 32, 64):
        group = x[:, first : first + 32]
        values, scales = (np.asarray(each) for each in rounded_rows(group))
        np.testing.assert_array_equal(got[:, first : first + 32], values * scales)
    assert np.isnan(got).sum() == np.isnan(got[1, 32:64]).sum() == 32


def test_a_kernel_that_has_one_scale_for_a_row_refuses_groups() -> None:
    x = jnp.ones((3, 64), jnp.float32)
    for rounding in ("float", "int8"):
        prepared_rows(
            x, random_weight("int8", (4, 64), 1, 1, activations=rounding), is_interpreted=True
        )
    with pytest.raises(UnsupportedError, match="rounded by 'int8_group'"):
        prepared_rows(
            x, random_weight("int8", (4, 64), 1, 1, activations="int8_group"), is_interpreted=True
        )
