"""All faults, those that CI runs, and the right kernels that no check may refuse."""

from __future__ import annotations

from tests.zoo.faults import Fault
from tests.zoo.half_a import FAULTS as HALF_A
from tests.zoo.half_b import FAULTS as HALF_B
from tests.zoo.listed import RIGHT

__all__ = ("FAULTS", "RIGHT", "SAMPLE")

FAULTS: tuple[Fault, ...] = (*HALF_A, *HALF_B)

SAMPLE: tuple[str, ...] = (
    "attention_causal_mask_shows_one_key_too_many",
    "attention_merge_swaps_the_weights",
    "linear_adds_the_bias_in_every_split",
    "grouped_linear_multiplies_by_the_next_group",
    "all_reduce_takes_the_largest",
    "all_gather_along_the_first_axis",
    "all_to_all_keeps_its_own",
    "short_conv_row_that_begins_keeps_the_old_state",
    "ssd_scan_row_that_begins_keeps_the_old_state",
    "lora_few_tokens_without_an_adapter_get_the_first",
    "rms_norm_statistics_in_16_bits",
    "add_rms_norm_norm_of_x_alone",
    "rope_turns_neighbours",
    "embedding_by_a_product",
    "kv_write_dropped_tokens_go_to_slot_0",
    "rope_kv_write_turns_by_slots",
    "sample_top_k_one_less",
)
"""Seventeen that CI runs, of every op."""
