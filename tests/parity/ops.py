"""The ops that parity tests and the models' conformance suite compute with: the plain JAX ones."""

from __future__ import annotations

from collections.abc import Callable

from enginebay.compose.binding import OpsBinder
from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.ops import usable_ops
from enginebay.config_sections import PHASES
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.model import ModelInfo
from enginebay.contracts.placement import Placement
from enginebay.ops.bound import Ops
from enginebay.ops.caps import Env
from enginebay.ops.spec import Bucket
from enginebay.plugins.registry import load_registry
from enginebay_xla.attention import xla_attention
from enginebay_xla.collectives import all_gather, all_reduce, all_to_all
from enginebay_xla.grouped_linear import grouped_linear
from enginebay_xla.kv_write import kv_write
from enginebay_xla.layout import HndLayout
from enginebay_xla.linear import embedding, linear
from enginebay_xla.norm import rms_norm
from enginebay_xla.rope import rope
from enginebay_xla.short_conv import short_conv


def plain_ops(
    info: ModelInfo, placement: Placement
) -> Callable[[Bucket, dict[str, KVLayout]], Ops]:
    """What makes the Ops of a step, every op by enginebay_xla."""
    plain = {
        "embedding": embedding,
        "linear": linear,
        "grouped_linear": grouped_linear,
        "rms_norm": rms_norm,
        "rope": rope,
        "kv_write": kv_write,
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "all_to_all": all_to_all,
        "short_conv": short_conv,
    }
    attention = dict.fromkeys(PHASES, xla_attention)
    ops, _ = usable_ops(load_registry(["xla"]))
    return OpsBinder(
        ChosenKernels(attention, plain, {}, "hnd", HndLayout, (), Env("cpu"), ops=ops),
        info,
        placement,
    )
