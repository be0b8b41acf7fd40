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
from enginebay.plugins.registry import import_target, load_registry
from enginebay_xla.attention import xla_attention
from enginebay_xla.layout import HndLayout


def plain_ops(
    info: ModelInfo, placement: Placement
) -> Callable[[Bucket, dict[str, KVLayout]], Ops]:
    """What makes the Ops of a step, every op by enginebay_xla."""
    attention = dict.fromkeys(PHASES, xla_attention)
    ops, _ = usable_ops(load_registry(["xla"]))
    plain = {
        name: import_target(op.reference, f"the reference of op {name!r}")
        for name, op in ops.items()
        if op.calls is None and not op.made_of
    }
    return OpsBinder(
        ChosenKernels(attention, plain, {}, "hnd", HndLayout, (), Env("cpu"), ops=ops),
        info,
        placement,
    )
