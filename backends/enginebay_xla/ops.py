"""The ops that come with enginebay: what is the same of all their implementations."""

from __future__ import annotations

from enginebay.ops.op import Op

CLOSE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
ANGLES = {**CLOSE, "float32": 1e-3}
"""An f32 angle of thousands of radians is off by its own rounding."""

attention = Op(
    "attention",
    "enginebay_xla.attention:xla_attention",
    "enginebay_xla.attention_quick:attention_cases",
    CLOSE,
)
linear = Op(
    "linear", "enginebay_xla.linear:linear", "enginebay_xla.quick_cases:linear_cases", CLOSE
)
embedding = Op(
    "embedding", "enginebay_xla.linear:embedding", "enginebay_xla.quick_cases:embedding_cases", {}
)
rms_norm = Op(
    "rms_norm", "enginebay_xla.norm:rms_norm", "enginebay_xla.quick_cases:rms_norm_cases", CLOSE
)
rope = Op("rope", "enginebay_xla.rope:rope", "enginebay_xla.quick_cases:rope_cases", ANGLES)
kv_write = Op(
    "kv_write", "enginebay_xla.kv_write:kv_write", "enginebay_xla.quick_cases:kv_write_cases", {}
)
sample = Op("sample", "enginebay_xla.sample:sample", "enginebay_xla.quick_cases:sample_cases", {})

add_rms_norm = Op(
    "add_rms_norm",
    "enginebay_xla.norm:add_rms_norm",
    "enginebay_xla.quick_cases:add_rms_norm_cases",
    CLOSE,
    made_of=("rms_norm",),
)
rope_kv_write = Op(
    "rope_kv_write",
    "enginebay_xla.rope_kv_write:rope_kv_write",
    "enginebay_xla.quick_cases:rope_kv_write_cases",
    ANGLES,
    made_of=("rope", "kv_write"),
)
