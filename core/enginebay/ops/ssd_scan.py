"""The op ssd_scan: the scan of a state-space model whose decay is one number per head."""

from __future__ import annotations

from typing import Protocol

import jax

from enginebay.contracts.cache import CacheArrays
from enginebay.ops.op import CLOSE, Op
from enginebay.ops.spec import AttnBatch


class SsdScanOp(Protocol):
    """The state-space scan of Mamba-2 ("Transformers are SSMs", Dao and Gu 2024): returns (out [T,
    heads, head_dim] in x's dtype, the state after the tokens).

    x is [T, heads, head_dim], dt f32 [T, heads], decay f32 [heads], b and c [T, groups,
    state_size], skip [heads] or None; head h reads group h // (heads / groups). For each token of a
    row and each head, in turn, the state H [head_dim, state_size] becomes exp(dt * decay) * H + dt
    * x * b^T, and the output is H c + skip * x. Sums are f32. dt is 0 or more, and decay 0 or less.
    At position 0 the state before is 0. The state's array "scan" f32 [places, heads, head_dim,
    state_size] has the state of a row at place batch.page_table[row, 0]. Rows of length 0 are
    padding; no place is written for them. A NaN or an infinity may reach all tokens of its row, and
    no other row.
    """

    def __call__(
        self,
        x: jax.Array,
        dt: jax.Array,
        decay: jax.Array,
        b: jax.Array,
        c: jax.Array,
        skip: jax.Array | None,
        state: CacheArrays,
        batch: AttnBatch,
    ) -> tuple[jax.Array, CacheArrays]: ...


SSD_SCAN: Op[SsdScanOp] = Op(
    "ssd_scan",
    SsdScanOp,
    "enginebay_xla.ssd_scan:ssd_scan_reference",
    "enginebay_xla.quick_cases:ssd_scan_cases",
    CLOSE,
    kit="enginebay_xla.kit.kits:SSD_SCAN",
    bench="enginebay_xla.bench.scans:SSD_SCAN",
    cost="enginebay_xla.cost:ssd_scan_cost",
)
