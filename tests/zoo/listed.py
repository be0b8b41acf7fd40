"""The right kernels that no check may refuse: those of ours, and those that are organised
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

OURS: tuple[tuple[str, str], ...] = (
    ("attention", "enginebay_xla.attention:xla_attention"),
    ("attention", "enginebay_native.attention:attention"),
    ("attention", "enginebay_pallas.attention:attention"),
    ("linear", "enginebay_xla.linear:linear"),
    ("linear", "enginebay_native.linear:linear"),
    ("grouped_linear", "enginebay_xla.grouped_linear:grouped_linear"),
    ("grouped_linear", "enginebay_native.grouped_linear:grouped_linear"),
    ("all_reduce", "enginebay_xla.collectives:all_reduce"),
    ("all_gather", "enginebay_xla.collectives:all_gather"),
    ("all_to_all", "enginebay_xla.collectives:all_to_all"),
    ("short_conv", "enginebay_xla.short_conv:short_conv"),
    ("ssd_scan", "enginebay_xla.ssd_scan:ssd_scan"),
    ("ssd_scan", "enginebay_xla.ssd_scan:ssd_scan_reference"),
    ("lora", "enginebay_lora.xla:lora"),
    ("rms_norm", "enginebay_xla.norm:rms_norm"),
    ("rms_norm", "enginebay_pallas.rms_norm:rms_norm"),
    ("add_rms_norm", "enginebay_xla.norm:add_rms_norm"),
    ("rope", "enginebay_xla.rope:rope"),
    ("embedding", "enginebay_xla.linear:embedding"),
    ("kv_write", "enginebay_xla.kv_write:kv_write"),
    ("kv_write", "enginebay_pallas.kv_write:kv_write"),
    ("rope_kv_write", "enginebay_xla.rope_kv_write:rope_kv_write"),
    ("sample", "enginebay_xla.sample:sample"),
    ("sample", "enginebay_pallas.sample:sample"),
)

OTHERWISE: Mapping[tuple[str, str], str] = {
    ("attention", "split_attention"): "attention",
    ("attention", "attentions"): """
        every exact thirds strides powers_of_two backwards blocks_of_24 narrow narrow_sums chain
        tree vectors heads_of_64 pages_of_16 decode_alone decode_thirds decode_backwards
        prefill_alone no_write one_head_each short
    """,
    ("linear", "linears"): """
        upcast in_narrow split_in_three strided reversed_order seven_outputs row_by_row transposed
        compensated pairwise tiles_of_128 tiles_of_24 outer on_host
    """,
    ("grouped_linear", "grouped_linears"): """
        every every_transposed one_by_one one_by_one_in_three of_jax in_buckets
        blocks_of_five blocks_of_16 side_by_side compensated host_loop
    """,
    ("rms_norm", "norms"): """
        passes eighths in_halves running scaled exact product last_first host
    """,
    ("add_rms_norm", "norms"): """
        add_passes add_eighths add_in_halves add_running add_scaled add_exact add_product
        add_last_first add_host
    """,
    ("rope", "ropes"): """
        complex_numbers tables added doubled two_parts phases head_by_head token_by_token
        host
    """,
    ("embedding", "embeddings"): """
        index slices backwards blocks_of_100 blocks_of_4096 ordered levels left_and_right
        bits host
    """,
    ("kv_write", "writes"): """
        last_first tokens ordered alternating chunks_of_five masks flat pages pieces heads
        reciprocals
    """,
    ("rope_kv_write", "rope_writes"): """
        complex_numbers tables added two_parts phases head_by_head token_by_token pieces
        doubled host reciprocals
    """,
    ("sample", "draws"): """
        full_sort ascending bisection digits all_best small row_by_row bisected_rows host
        base_two
    """,
    ("short_conv", "short_convs"): """
        windows product tokens convolution oldest_first newest_first scattered
        seven_channels host
    """,
    ("ssd_scan", "scans"): """
        prefixes rows pairs heads features host
    """,
    ("all_reduce", "collectives"): """
        sum_whole sum_backwards sum_ring sum_axes sum_scattered sum_scattered_ring sum_pairs
        sum_copies
    """,
    ("all_gather", "collectives"): """
        gather_whole gather_ring gather_shifts gather_axes gather_copies gather_doubling
        gather_bits gather_turned
    """,
    ("all_to_all", "collectives"): """
        exchange_whole exchange_ring exchange_bits exchange_doubling exchange_shifts
        exchange_backwards exchange_axes exchange_untiled
    """,
    ("lora", "loras"): """
        slots slots_backwards tokens segments ranks side_by_side side_by_side_pairwise
        blocks_of_five masks host
    """,
}
"""Names of kernels in a module of tests/zoo/right, by op and module."""

RIGHT: tuple[tuple[str, str], ...] = (
    *OURS,
    *(
        (op, f"right.{module}:{name}")
        for (op, module), names in OTHERWISE.items()
        for name in names.split()
    ),
)
