"""The C++ that an engine needs begins to compile when its kernels are chosen."""

from __future__ import annotations

from typing import Any

import pytest

from enginebay.compose.composition import make_engine, make_plan
from enginebay.config import EngineConfig
from tests.brief import TINY

native = pytest.importorskip("enginebay_native.linear", exc_type=Exception)
pytestmark = pytest.mark.xdist_group("native")


@pytest.mark.parametrize(
    ("settings", "libraries"),
    [
        ({}, {"attention_f32", "linear_f32"}),
        ({"dtype": "bfloat16"}, {"attention_bf16", "linear_bf16"}),
        ({"quantization": "int8"}, {"attention_f32", "linear_s8", "panel_linear"}),
        (
            {"quantization": "int4"},
            {"attention_f32", "quantized_linear_s4", "linear_s8", "panel_linear"},
        ),
        (
            {"quantization": "int4", "activation_quantization": "int8"},
            {"attention_f32", "rounded_linear_s4", "rounded_linear_s8", "panel_linear"},
        ),
        (
            {"quantization": "int4", "activation_quantization": "int8_group"},
            {"attention_f32", "group_rounded_linear_s4", "group_rounded_linear_s8", "panel_linear"},
        ),
        ({"kv_cache_dtype": "int8"}, {"attention_codes", "linear_f32"}),
    ],
)
def test_an_engine_begins_to_compile_what_it_needs(
    settings: dict[str, Any], libraries: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    for module in ("linear", "attention"):
        monkeypatch.setattr(
            f"enginebay_native.{module}.begin_compiling", lambda *names: begun.extend(names)
        )
    named = {"dtype": "float32", "max_model_len": 64, **settings}
    make_engine(make_plan(EngineConfig(model=TINY, **named)))
    assert set(begun) == libraries
