"""The kits of the built-in ops without phases; `Op.kit` names them."""

from __future__ import annotations

from enginebay_testing.op_kit import OpKit, covering_cases
from enginebay_xla.kit import axes, cache, plain, programs, quantized, sample, scans, states

WEIGHTS = {"quantizations": "weights", "activation_quantizations": "activations"}
CACHES = {"layouts": "layout", "storages": "storage"}

LINEAR = OpKit(quantized.linear_cases, programs.linear, WEIGHTS)
GROUPED_LINEAR = OpKit(quantized.grouped_linear_cases, programs.grouped_linear, WEIGHTS)
SHORT_CONV = OpKit(covering_cases(axes.SHORT_CONV, states.check_short_conv_case), states.short_conv)
SSD_SCAN = OpKit(covering_cases(axes.SSD_SCAN, scans.check_ssd_scan_case), scans.ssd_scan)
EMBEDDING = OpKit(
    quantized.embedding_cases,
    programs.embedding,
    {**WEIGHTS, "activation_quantizations": "the inputs are ids, which are not rounded"},
)
RMS_NORM = OpKit(covering_cases(axes.RMS_NORM, plain.check_rms_norm_case), programs.rms_norm)
ADD_RMS_NORM = OpKit(
    covering_cases(axes.ADD_RMS_NORM, plain.check_add_rms_norm_case), programs.add_rms_norm
)
ROPE = OpKit(covering_cases(axes.ROPE, plain.check_rope_case), programs.rope)
KV_WRITE = OpKit(
    covering_cases(axes.KV_WRITE, cache.check_kv_write_case), programs.kv_write, CACHES
)
ROPE_KV_WRITE = OpKit(
    covering_cases(axes.ROPE_KV_WRITE, cache.check_rope_kv_write_case),
    programs.rope_kv_write,
    CACHES,
)
SAMPLE = OpKit(
    covering_cases(axes.SAMPLE, sample.check_sample_case, sample.sample_checks), programs.sample
)
