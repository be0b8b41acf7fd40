"""The op sample: one token of each row after the filters of its request."""

from __future__ import annotations

from typing import Protocol

import jax

from enginebay.ops.op import Op


class SampleOp(Protocol):
    """Samples one token of each row after the filters top_k, top_p and min_p. A sampler with the
    capability `draws` calls it.

    z: f32 [S, vocab], (logits - the row's max) / temperature, so that the max is 0; -inf is never
    sampled. seeds: uint32 [S, 2]. top_k: int32 [S], 1 to vocab; vocab keeps all tokens. top_p: f32
    [S]; 1 keeps all tokens. min_p: f32 [S]; 0 keeps all tokens. Returns int32 [S]: the kept token
    with the largest z + sampling.gumbel_noise(seeds, id); the lowest id if several are equal.

    The filters are applied in this order. top_k keeps the tokens whose z is at least the top_k-th
    largest z. top_p sorts these by exp(z), equal ones by id, and keeps each token before which less
    than the share top_p of the total of exp(z) lies; the border may be wrong by 1e-6 of the total.
    min_p keeps tokens with exp(z) >= min_p. The first token with the largest z is always kept, and
    a row with top_k 1 returns it whatever the noise is. Rows are independent.
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


SAMPLE: Op[SampleOp] = Op(
    "sample",
    SampleOp,
    "enginebay_xla.sample:sample",
    "enginebay_xla.quick_cases:sample_cases",
    {},
    kit="enginebay_xla.kit.kits:SAMPLE",
    bench="enginebay_xla.bench.fused:SAMPLE",
    cost="enginebay_xla.cost:sample_cost",
    partition="enginebay_xla.partition:sample",
)
