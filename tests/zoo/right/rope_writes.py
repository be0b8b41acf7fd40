"""The op rope_kv_write in plain JAX: ways to rotate, and to write, that belong together."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.rotary import RopeSpec
from tests.zoo.right import ropes, writes
from tests.zoo.right.ropes import Rope
from tests.zoo.right.writes import Write


@dataclasses.dataclass(frozen=True)
class RopeWrite:
    """See the module. `order`: queries and keys rotated apart; as heads of one array; or each token
    rotated and written before the next one.
    """

    rope: Rope
    write: Write
    order: Literal["apart", "together", "by token"] = "apart"

    @property
    def capabilities(self) -> dict[str, tuple[str, ...]]:
        """What a declaration of the kernel would say."""
        return self.write.capabilities

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
    ) -> tuple[jax.Array, CacheArrays]:
        rope = functools.partial(self.rope, spec=spec)
        write = functools.partial(self.write, layout=layout)
        if self.order == "apart":
            cache = write(cache, slots, rope(k, positions), v)
            return rope(q, positions), cache
        if self.order == "together":
            both = rope(jnp.concatenate([k, q], axis=1), positions)
            cache = write(cache, slots, both[:, : k.shape[1]], v)
            return both[:, k.shape[1] :], cache

        def one(
            arrays: dict[str, jax.Array], token: tuple[jax.Array, ...]
        ) -> tuple[dict[str, jax.Array], jax.Array]:
            q, k, v, position, slot = (x[None] for x in token)
            return dict(write(arrays, slot, rope(k, position), v)), rope(q, position)[0]

        tokens: tuple[jax.Array, ...] = (q, k, v, positions, slots)
        written, turned = jax.lax.scan(one, dict(cache), tokens)
        return turned, written


complex_numbers = RopeWrite(ropes.complex_numbers, writes.last_first)
tables = RopeWrite(ropes.tables, writes.flat, "together")
added = RopeWrite(ropes.added, writes.masks, "together")
two_parts = RopeWrite(ropes.two_parts, writes.pages)
phases = RopeWrite(ropes.phases, writes.chunks_of_five, "together")
head_by_head = RopeWrite(ropes.head_by_head, writes.heads)
token_by_token = RopeWrite(Rope(), writes.last_first, "by token")
pieces = RopeWrite(Rope(rotate=ropes.rolled), writes.pieces, "by token")
doubled = RopeWrite(ropes.doubled, writes.alternating)
host = RopeWrite(ropes.host, writes.ordered, "together")
reciprocals = RopeWrite(ropes.complex_numbers, writes.reciprocals, "together")
