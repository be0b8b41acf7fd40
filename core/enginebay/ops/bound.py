"""Ops: the chosen implementations that the runner hands to a model, which computes through them
only; and the signatures of the ops that engines and samplers call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol, cast

import jax

from enginebay.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.op import Op, SignatureT
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket, RopeSpec, StepBatch


class AttentionImpl(Protocol):
    """An implementation of the attention op, registered as kind "kernel", op "attention".

    Semantics: write k and v [T, Hkv, D] of the new tokens into the cache at batch.slots, then let
    every token of q [T, Hq, D] attend to its row's first kv_lens positions under the spec's mask.
    Rows are independent. Output on padding tokens is 0, as is a row without any visible key. The
    cache comes back updated, in place when donated. `sinks` and `slopes` f32 [Hq] are given where
    the spec has them: an implementation without the feature need not take the argument.
    """

    name: str
    version: str
    priority: int
    caps: Caps

    def default_config(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> Any:
        """The frozen configuration (block sizes and such) to use when nothing better was tuned;
        None when it has none.
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
        """(out [T, Hq, Dv], cache, log-sum-exp f32 [T, Hq] or None)."""


class AttentionOp(Protocol):
    """Attention as a model calls it: implementation, layout, sharding and phase are already chosen.

    With `rope` q and k come as they are and are rotated to batch.positions first, in one with the
    write of the cache where a kernel does both. k and v are None in a layer that reads another's
    cache (spec.kv_shared). A spec with `sinks` comes with sinks f32 [Hq], a score for each query
    head that takes part in its softmax without a key; a spec with `alibi` with slopes f32 [Hq].

    The last result is the log-sum-exp f32 [T, Hq] of a spec with `return_lse`, None of another: by
    it a model can merge what a query reads in two caches.
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
        sinks: jax.Array | None = None,
        slopes: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]: ...


class RopeOp(Protocol):
    """x [T, heads, head_dim], positions int32 [T] -> x with its first rotary_dim features
    rotated.
    """

    def __call__(self, x: jax.Array, positions: jax.Array, *, spec: RopeSpec) -> jax.Array: ...


class KvWriteOp(Protocol):
    """k, v [T, kv_heads, head_dim] put at slots int32 [T] of the cache; negative slots are dropped.
    In place when donated.

    The capability `layouts` names the cache layouts that it knows; without it, all of them.
    """

    def __call__(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, *, layout: KVLayout
    ) -> CacheArrays: ...


class RopeKvWriteOp(Protocol):
    """q [T, q_heads, head_dim] and k, v [T, kv_heads, head_dim] -> (q rotated, the cache with k
    rotated and v in it).

    Optional: without one, the ops rope and kv_write. positions and slots are int32 [T]; what slots
    mean, and the capability `layouts`, are as in KvWriteOp. Used before attention that does not
    write the cache itself.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: CacheArrays,
        positions: jax.Array,
        slots: jax.Array,
        *,
        spec: RopeSpec,
        layout: KVLayout,
    ) -> tuple[jax.Array, CacheArrays]: ...


class SampleOp(Protocol):
    """A draw from what top_k, top_p and min_p leave of each row; samplers call it, see the
    capability `draws`.

    z f32 [S, vocab]: logits less the row's largest, over its temperature; so at most 0, and the
    largest is 0; -inf is never drawn. seeds uint32 [S, 2]. top_k int32 [S] in 1..vocab, which keeps
    all. top_p f32 [S]: 1 keeps all. min_p f32 [S]: 0 keeps all. Returns int32 [S]: the kept token
    of the largest z + sampling.gumbel_noise(seeds, id), the lowest id of equals.

    Kept are, in this order: tokens of at least the top_k-th largest z, all of its equals too; of
    their mass (sums of exp(z)) in descending order, equals by id, the tokens before which less than
    the share top_p lies; of these, those of exp(z) >= min_p. The first best is always kept, and a
    row of top_k 1 gets it, whatever the noise. A border of mass may be missed by 1e-6 of it. Rows
    are independent.
    """

    def __call__(
        self,
        z: jax.Array,
        seeds: jax.Array,
        *,
        top_k: jax.Array,
        top_p: jax.Array,
        min_p: jax.Array,
    ) -> jax.Array: ...


class Ops:
    """The chosen implementation of each op that a model may call: `ops[RMS_NORM](x, weight,
    eps=1e-6)`. A fused op that no implementation computes is composed of its parts.
    """

    def __init__(self, bound: Mapping[str, Any], batch: StepBatch | None = None) -> None:
        self._bound, self._batch = bound, batch

    def __getitem__(self, op: Op[SignatureT]) -> SignatureT:
        """With the step's StepBatch where the op takes it. UnsupportedError for an op that has no
        implementation here, or takes a StepBatch where there is none.
        """
        function = self.named(op.name)
        if op.takes_batch:
            if self._batch is None:
                given = f"op {op.name!r}, which takes the step's batch, called outside Model.hidden"
                todo = "Call it in Model.hidden, whose tokens have rows and positions."
                raise UnsupportedError(given, "ops without the argument batch", todo)
            function = functools.partial(function, batch=self._batch)
        return cast("SignatureT", function)

    def in_step(self, batches: Mapping[str, AttnBatch]) -> Ops:
        """The same ops for the tokens of Model.hidden, whose rows `batches` has by cache group."""
        return Ops(self._bound, StepBatch.of(batches))

    def named(self, name: str) -> Any:
        """As `ops[op]`, for an op that is known by name alone."""
        if name not in self._bound:
            raise UnsupportedError(
                f"the model calls op {name!r}, which has no implementation here",
                ", ".join(self._bound),
                "`enginebay explain` shows why none was chosen.",
            )
        return self._bound[name]

    def replaced(self, name: str, implementation: Any) -> Ops:
        """The same ops with another implementation of one of them."""
        return Ops({**self._bound, name: implementation}, self._batch)
