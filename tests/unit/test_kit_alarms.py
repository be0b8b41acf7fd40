"""The kit refuses no right kernel: cases in which rounding alone came close to a bound."""

from __future__ import annotations

from typing import Any

import pytest

from enginebay_lora.kit import LORA_AXES, check_lora_case
from enginebay_lora.xla import lora
from enginebay_testing.layouts import installed_layouts
from enginebay_testing.op_kit import PlainCase
from enginebay_xla.kit.cache import check_rope_kv_write_case
from enginebay_xla.kit.quantized import QUANTIZED_LINEAR, check_quantized_linear_case
from enginebay_xla.kit.sample import _case_of, check_sample
from enginebay_xla.linear import linear
from enginebay_xla.rope_kv_write import rope_kv_write
from tests.zoo.right.draws import full_sort, small
from tests.zoo.right.linears import reversed_order

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "bfloat16", "tokens": 513, "slots": 1, "inputs": 129, "used": "one_has_all"},
        {"dtype": "float16", "tokens": 1, "slots": 1, "outputs": 257, "parts": 3},
        {"dtype": "bfloat16", "tokens": 513, "inputs": 7, "used": "last_only", "rank": 3},
    ],
    ids=["many tokens", "one token", "rank 3"],
)
def test_one_rounding_that_all_outputs_of_a_token_share_is_no_fault(values: Any) -> None:
    usual = {axis: values[0] for axis, values in LORA_AXES.values.items()}
    row = {**usual, "y_dtype": "float32", "rank": 1, "used": "one_has_all", **values}
    for seed in range(4):
        check_lora_case(lora, PlainCase(row, seed=seed))


@pytest.mark.long
@pytest.mark.parametrize(
    "storage", ["int8", *(pytest.param(s, marks=pytest.mark.long) for s in ("uint4", "fp8"))]
)
def test_a_quantised_cache_may_lose_a_share_of_the_rotated_head(storage: str) -> None:
    sizes = {"tokens": 65, "kv_heads": 3, "head_dim": 8, "page": 1, "group": 2, "latent": False}
    kinds = {
        "dtype": "bfloat16",
        "layout": "NhdLayout",
        "storage": storage,
        "rule": "yarn_untruncated",
    }
    row = {**sizes, **kinds, "pages": "many", "donated": True, "rotary": "half"}
    row |= {"slots": "plain", "positions": "usual"}
    layouts = {kind.__name__: kind for kind in installed_layouts().values()}
    for seed in range(4, 6):
        check_rope_kv_write_case(rope_kv_write, PlainCase(row, seed=seed, layouts=layouts))


@pytest.mark.long
def test_a_token_at_the_border_of_top_p_depends_on_the_order_of_the_sum() -> None:
    row = {"vocab": 700, "rows": 33, "top_k": "most", "top_p": "most", "min_p": "none"}
    check_sample(small, _case_of({**row, "logits": "equals"}, 4), 4)


@pytest.mark.long
def test_tokens_of_equal_mass_at_the_border_of_top_p_may_change_places() -> None:
    row = {"vocab": 700, "rows": 16, "top_k": "most", "top_p": "some", "min_p": "none"}
    check_sample(full_sort, _case_of({**row, "logits": "flat"}, 2), 2)


ROUNDED: dict[str, Any] = {"activations": "int8", "out_dtype": "float32"}
WIDE: dict[str, Any] = {**ROUNDED, "scale_dtype": "float16", "in_dims": 2, "bias": "plain"}


@pytest.mark.long
@pytest.mark.parametrize(
    "values",
    [
        {"rows": 513, "outputs": 1700, "data": "largest"},
        {**ROUNDED, "dtype": "bfloat16", "group_size": 64, "outputs": 1700, "data": "nan_row"},
        {**WIDE, "dtype": "bfloat16", "groups": 17, "rows": 32, "outputs": 128, "out_dims": 2},
        {
            **ROUNDED,
            "weights": "int8_group",
            "group_size": 1024,
            "rows": 17,
            "data": "special_rows",
        },
        {**WIDE, "weights": "int4", "group_size": 64, "groups": 5, "rows": 0},
    ],
    ids=["many sums", "one row", "many rows", "equal numbers", "no rows"],
)
def test_a_quantised_product_may_err_as_far_as_its_sums_and_its_rounded_inputs(
    values: dict[str, Any],
) -> None:
    usual = {axis: (each or ("int8",))[0] for axis, each in QUANTIZED_LINEAR.values.items()}
    usual["groups"] = 1 if values.get("weights") == "int8_group" else usual["groups"]
    for seed in range(5):
        for kernel in (linear, reversed_order):
            check_quantized_linear_case(kernel, PlainCase({**usual, **values}, seed=seed))
