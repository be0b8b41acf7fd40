"""Ops, the chosen implementations that a model calls; and the contract of attention, the op that is
chosen by phase.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import jax

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.op import Op, SignatureT
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket, StepBatch

LAYER_CALL = "enginebay_layer"
"""The name of the jitted function of a model that computes one of several layers that are alike.
Steps can be compiled in parts at its calls.
"""


class AttentionImpl(Protocol):
    """An implementation of attention, registered as kind "kernel" with op "attention".

    A call writes k and v [T, Hkv, D] of the new tokens into the cache at batch.slots. Then every
    token of q [T, Hq, D] attends to the first kv_lens positions of its row, under the spec's mask.
    Rows are independent. The output is 0 for padding tokens and for tokens without a visible key.
    The call returns the updated cache, which is updated in place when it is donated. Inputs such as
    `sinks` and `slopes` f32 [Hq] are passed only if the spec names them, so an implementation needs
    only the arguments that it declares (`Caps.features`, `Caps.inputs`).
    """

    name: str
    version: str
    priority: int
    caps: Caps

    def default_config(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> Any:
        """Return the frozen configuration (such as block sizes) to use without a tuned one; None
        for an implementation that has no configuration.
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
        layout: KVLayout,
        config: Any,
        sinks: jax.Array | None = None,
        slopes: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """Return (out [T, Hq, Dv], the updated cache, log-sum-exp f32 [T, Hq] or None)."""


class Ops:
    """The chosen implementations of the ops that a model calls: `ops[RMS_NORM](x, weight,
    eps=1e-6)`. A fused op without an implementation is composed of its parts.
    """

    def __init__(
        self,
        bound: Mapping[str, Any],
        batch: StepBatch | None = None,
        adapters: jax.Array | None = None,
        *,
        shares_layers: bool = False,
    ) -> None:
        """`shares_layers`: whether a model may trace layers that are alike once for all of them,
        because no op reads the number of the layer or keeps what it is called with.
        """
        self._bound, self.batch, self.adapters = bound, batch, adapters
        self.shares_layers = shares_layers

    def __getitem__(self, op: Op[SignatureT]) -> SignatureT:
        """Return the implementation of an op. If the op takes a StepBatch, that of the step is
        passed to every call. UnsupportedError for an op without an implementation here, and for an
        op that takes a StepBatch outside Model.hidden.
        """
        function = self.named(op.name)
        if op.takes_batch:
            if self.batch is None:
                given = f"op {op.name!r}, which takes the step's batch, called outside Model.hidden"
                todo = "Call this op in Model.hidden, where tokens have rows and positions."
                raise UnsupportedError(given, "ops without the argument batch", todo)
            function = functools.partial(function, batch=self.batch)
        return cast("SignatureT", function)

    def in_step(self, batches: Mapping[str, AttnBatch], adapters: jax.Array | None = None) -> Ops:
        """Return the same ops for a call of Model.hidden with these batches by cache group, and
        with `adapters` int32 [S] of the rows.
        """
        batch = StepBatch.of(batches, adapters)
        return Ops(self._bound, batch, shares_layers=self.shares_layers)

    def of_rows(self, adapters: jax.Array | None) -> Ops:
        """Return the same ops for a call of Model.logits, with `adapters` int32 of its rows."""
        return Ops(self._bound, self.batch, adapters, shares_layers=self.shares_layers)

    def named(self, name: str) -> Any:
        """Return the implementation of the op with this name, without a StepBatch."""
        if name not in self._bound:
            raise UnsupportedError(
                f"the model calls op {name!r}, which has no implementation here",
                f"the ops {', '.join(self._bound)}",
                "See the reason with `enginebay explain`, and install a kernel for the op.",
            )
        return self._bound[name]

    def replaced(self, name: str, implementation: Any, *, shares_layers: bool = False) -> Ops:
        """Return the same ops with another implementation of one op, and with this value of
        `shares_layers`.
        """
        bound = {**self._bound, name: implementation}
        return Ops(bound, self.batch, self.adapters, shares_layers=shares_layers)

    def wrapped(self, wrap: Callable[[str, Any], Any]) -> Ops:
        """Return the same ops, of which each implementation is `wrap(name of the op,
        implementation)`. A model traces every layer by itself.
        """
        bound = {name: wrap(name, one) for name, one in self._bound.items()}
        return Ops(bound, self.batch, self.adapters)
