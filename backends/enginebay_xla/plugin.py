"""What this package offers: JAX's own platforms, and every op in plain JAX."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl

EVERYWHERE = ("cpu", "cuda", "tpu")
READS_WEIGHTS = ("linear", "grouped_linear", "embedding")


@hookimpl
def register_platforms(register: Register) -> None:
    """cpu, cuda and tpu."""
    register("cpu", "enginebay_xla.platforms:CpuPlatform", summary="the host's processors")
    register("cuda", "enginebay_xla.platforms:CudaPlatform", summary="NVIDIA GPUs")
    register("tpu", "enginebay_xla.platforms:TpuPlatform", summary="Google TPUs")


@hookimpl
def register_ops(register: Register) -> None:
    """The ops that the built-in models and engines use."""
    summaries = {
        "attention": "queries over the keys and values of a paged cache, which it writes",
        "embedding": "rows of a table",
        "kv_write": "keys and values into the cache",
        "linear": "a product with a weight, summed in f32",
        "grouped_linear": "rows sorted by group, each by the weight of its group",
        "short_conv": "a causal convolution over a row's last inputs, which are its state",
        "rms_norm": "division by the root of the mean square, times a weight",
        "add_rms_norm": "a sum and its rms_norm in one",
        "rope": "rotary positions",
        "rope_kv_write": "rope of queries and keys, and kv_write, in one",
        "sample": "a draw from the tokens that the filters leave",
        "all_reduce": "the sum of arrays of several devices",
        "all_gather": "arrays of several devices in one",
        "all_to_all": "a piece of each device's array for each device",
    }
    for name, summary in summaries.items():
        register(name, f"enginebay_xla.ops:{name.upper()}", summary=summary)


@hookimpl
def register_kernels(register: Register) -> None:
    """The reference implementation of each op."""
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
            capabilities={"quantizations": ("any",)} if op in READS_WEIGHTS else {},
        )


@hookimpl
def register_layouts(register: Register) -> None:
    """That of XLA on CPU."""
    summary = "heads, tokens, features: XLA on CPU, cuDNN"
    register("hnd", "enginebay_xla.layout:HndLayout", summary=summary)
