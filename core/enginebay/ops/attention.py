"""The op attention, which is chosen by phase: its signature and its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import jax

from enginebay.contracts.cache import CacheArrays
from enginebay.ops.head_inputs import HEAD_INPUTS
from enginebay.ops.op import CLOSE, CallsAround, Op
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnBatch, AttnSpec

NamedInputs = Mapping[str, jax.Array | int]
NO_INPUTS: NamedInputs = {}

INPUT_AXES: Mapping[str, tuple[str | None, ...]] = dict.fromkeys(HEAD_INPUTS, ("heads",))
"""The axes of inputs that enginebay knows, as in `Caps.inputs`."""


class AttentionOp(Protocol):
    """Attention as a model calls it. Implementation, layout, sharding and phase are chosen already.

    rope: the op first rotates q and k to batch.positions; a kernel may fuse this with the write to
    the cache. None: q and k are rotated already. k, v: None in a layer that reads the cache of
    another layer (spec.kv_shared). cache: the arrays of the layout and, where keys are stored less
    a centre, KEY_CENTER (`enginebay.ops.key_centers`), which kernels do not get. inputs: all that
    `spec.inputs` names, and "layer", the number of the layer, an int (a traced int32 in shadow
    mode). `enginebay.ops.head_inputs` describes the inputs f32 [Hq] that enginebay knows, such as
    "sinks" and "slopes". A kernel receives each input that it declares as a keyword.

    The last result is the log-sum-exp f32 [T, Hq] for a spec with `return_lse`, and None otherwise.
    With it a model can merge the attention over two caches.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: CacheArrays,
        batch: AttnBatch,
        *,
        spec: AttnSpec,
        rope: RopeSpec | None = None,
        inputs: NamedInputs = NO_INPUTS,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]: ...


ATTENTION: Op[AttentionOp] = Op(
    "attention",
    AttentionOp,
    "enginebay_xla.attention:xla_attention",
    "enginebay_xla.attention_quick:quick_attention_cases",
    CLOSE,
    calls=CallsAround(rotate="rope", write="kv_write", rotate_and_write="rope_kv_write"),
    kit="enginebay_testing.attention_suite:KIT",
    bench="enginebay_bench.attention:BENCH",
)
