"""Registers JAX's own platforms, the built-in ops, and each op in plain JAX."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl

ANY_METHOD = dict.fromkeys(("quantizations", "activation_quantizations"), ("any",))
ANY_STORAGE = {"storages": ("any",)}
CAPABILITIES = {
    "linear": ANY_METHOD,
    "grouped_linear": ANY_METHOD,
    "embedding": ANY_METHOD,
    "kv_write": ANY_STORAGE,
    "rope_kv_write": ANY_STORAGE,
}


@hookimpl
def register_platforms(register: Register) -> None:
    """Register cpu, cuda and tpu."""
    register("cpu", "enginebay_xla.platforms:CpuPlatform", summary="the host's processors")
    register("cuda", "enginebay_xla.platforms:CudaPlatform", summary="NVIDIA GPUs")
    register("tpu", "enginebay_xla.platforms:TpuPlatform", summary="Google TPUs")


@hookimpl
def register_ops(register: Register) -> None:
    """Register the ops that the built-in models and engines use."""
    summaries = {
        "attention:ATTENTION": "attention to a paged cache, to which it may write the new tokens",
        "linear:EMBEDDING": "rows of a table",
        "kv_write:KV_WRITE": "writes keys and values to the cache",
        "linear:LINEAR": "a product with a weight, summed in f32",
        "grouped_linear:GROUPED_LINEAR": "products of rows with the weight of their group",
        "short_conv:SHORT_CONV": "a causal convolution over the last inputs of a row, its state",
        "ssd_scan:SSD_SCAN": "the scan of Mamba-2, whose state fades by one number per head",
        "norm:RMS_NORM": "division by the root of the mean square, times a weight",
        "norm:ADD_RMS_NORM": "a sum and its rms_norm in one kernel",
        "rope:ROPE": "rotary positions",
        "rope:ROPE_KV_WRITE": "rope of queries and keys, and kv_write, in one kernel",
        "sample:SAMPLE": "draws a token among those that top_k, top_p and min_p keep",
        "collectives:ALL_REDUCE": "the sum of the arrays of several devices",
        "collectives:ALL_GATHER": "the arrays of several devices, concatenated",
        "collectives:ALL_TO_ALL": "sends a piece of each device's array to each device",
    }
    for place, summary in summaries.items():
        name = place.partition(":")[2].lower()
        register(name, f"enginebay.ops.{place}", summary=summary)


@hookimpl
def register_kernels(register: Register) -> None:
    """Register the implementation of each op in plain JAX."""
    targets = {
        "attention": "enginebay_xla.attention:xla_attention",
        "kv_write": "enginebay_xla.kv_write:kv_write",
        "embedding": "enginebay_xla.linear:embedding",
        "linear": "enginebay_xla.linear:linear",
        "grouped_linear": "enginebay_xla.grouped_linear:grouped_linear",
        "rms_norm": "enginebay_xla.norm:rms_norm",
        "short_conv": "enginebay_xla.short_conv:short_conv",
        "ssd_scan": "enginebay_xla.ssd_scan:ssd_scan",
        "add_rms_norm": "enginebay_xla.norm:add_rms_norm",
        "rope": "enginebay_xla.rope:rope",
        "rope_kv_write": "enginebay_xla.rope_kv_write:rope_kv_write",
        "sample": "enginebay_xla.sample:sample",
        "all_reduce": "enginebay_xla.collectives:all_reduce",
        "all_gather": "enginebay_xla.collectives:all_gather",
        "all_to_all": "enginebay_xla.collectives:all_to_all",
    }
    for op, target in targets.items():
        register(
            "xla",
            target,
            op=op,
            summary="plain JAX, on any platform",
            capabilities=CAPABILITIES.get(op, {}),
        )


@hookimpl
def register_layouts(register: Register) -> None:
    """Register the layout of XLA on CPUs."""
    summary = "heads, tokens, features; for XLA on CPUs and cuDNN"
    register("hnd", "enginebay_xla.layout:HndLayout", summary=summary)
