"""Registers JAX's own platforms, the built-in ops, and each op in plain JAX."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl

EVERYWHERE = ("cpu", "cuda", "tpu")
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
        "attention": "attention of queries to a paged cache, to which it may write the new tokens",
        "embedding": "rows of a table",
        "kv_write": "writes keys and values to the cache",
        "linear": "a product with a weight, summed in f32",
        "grouped_linear": "products of rows, sorted by group, with the weight of their group",
        "short_conv": "a causal convolution over the last inputs of a row, which are its state",
        "rms_norm": "division by the root of the mean square, times a weight",
        "add_rms_norm": "a sum and its rms_norm in one kernel",
        "rope": "rotary positions",
        "rope_kv_write": "rope of queries and keys, and kv_write, in one kernel",
        "sample": "draws a token among those that top_k, top_p and min_p keep",
        "all_reduce": "the sum of the arrays of several devices",
        "all_gather": "the arrays of several devices, concatenated",
        "all_to_all": "sends a piece of each device's array to each device",
    }
    for name, summary in summaries.items():
        register(name, f"enginebay_xla.ops:{name.upper()}", summary=summary)


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
            platforms=EVERYWHERE,
            summary="plain JAX, on any platform",
            capabilities=CAPABILITIES.get(op, {}),
        )


@hookimpl
def register_layouts(register: Register) -> None:
    """Register the layout of XLA on CPUs."""
    summary = "heads, tokens, features; for XLA on CPUs and cuDNN"
    register("hnd", "enginebay_xla.layout:HndLayout", summary=summary)
