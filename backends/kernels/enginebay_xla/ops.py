"""The former place of the records of the built-in ops, which are in `enginebay.ops`."""

from __future__ import annotations

from enginebay.on_demand import on_demand

__getattr__, __dir__ = on_demand(
    __name__,
    {
        "enginebay.ops.attention": "ATTENTION AttentionOp",
        "enginebay.ops.collectives": "ALL_GATHER ALL_REDUCE ALL_TO_ALL "
        "AllGatherOp AllReduceOp AllToAllOp",
        "enginebay.ops.grouped_linear": "GROUPED_LINEAR GroupedLinearOp",
        "enginebay.ops.kv_write": "KV_WRITE KvWriteOp",
        "enginebay.ops.linear": "EMBEDDING LINEAR EmbeddingOp LinearOp",
        "enginebay.ops.norm": "ADD_RMS_NORM RMS_NORM AddRmsNormOp RmsNormOp",
        "enginebay.ops.rope": "ROPE ROPE_KV_WRITE RopeKvWriteOp RopeOp",
        "enginebay.ops.sample": "SAMPLE SampleOp",
        "enginebay.ops.short_conv": "SHORT_CONV ShortConvOp",
        "enginebay.ops.ssd_scan": "SSD_SCAN SsdScanOp",
    },
)
