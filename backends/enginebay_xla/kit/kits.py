"""The kits of the built-in ops without phases; `Op.kit` names them."""

from __future__ import annotations

from enginebay_testing.op_kit import OpKit, covering_cases
from enginebay_xla.kit import axes, cache, grouped, plain, programs, sample, states

LINEAR = OpKit(covering_cases(axes.LINEAR, plain.check_linear), programs.linear)
GROUPED_LINEAR = OpKit(
    covering_cases(axes.GROUPED_LINEAR, grouped.check_grouped_linear), programs.grouped_linear
)
SHORT_CONV = OpKit(covering_cases(axes.SHORT_CONV, states.check_short_conv), states.short_conv)
EMBEDDING = OpKit(covering_cases(axes.EMBEDDING, plain.check_embedding), programs.embedding)
RMS_NORM = OpKit(covering_cases(axes.RMS_NORM, plain.check_rms_norm), programs.rms_norm)
ADD_RMS_NORM = OpKit(
    covering_cases(axes.ADD_RMS_NORM, plain.check_add_rms_norm), programs.add_rms_norm
)
ROPE = OpKit(covering_cases(axes.ROPE, plain.check_rope), programs.rope)
KV_WRITE = OpKit(covering_cases(axes.KV_WRITE, cache.check_kv_write), programs.kv_write)
ROPE_KV_WRITE = OpKit(
    covering_cases(axes.ROPE_KV_WRITE, cache.check_rope_kv_write), programs.rope_kv_write
)
SAMPLE = OpKit(
    covering_cases(axes.SAMPLE, sample.check_sample_row, sample.sample_checks), programs.sample
)
