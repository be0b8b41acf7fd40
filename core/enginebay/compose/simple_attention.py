"""The simple form of attention for experiments: one function of queries and pages, wrapped as a
full implementation.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import InputError
from enginebay.ops.caps import FEATURE_OF, Caps, Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket

SimpleFunction = Callable[..., jax.Array]
"""(q, k_pages, v_pages, batch, spec, *, inputs) -> out; see SimpleAttention."""

ARGUMENTS = ("q", "k_pages", "v_pages", "batch", "spec")
SIMPLE_FORM = f"({', '.join(ARGUMENTS)}) -> out"
FEATURES = frozenset({"window", "softcap", "kv_share", "shard_map"})


@dataclasses.dataclass(frozen=True)
class SimpleAttention:
    """An AttentionImpl around a function (q, k_pages, v_pages, batch, spec) -> out.

    The function gets q [T, Hq, D], and the pages of the step's rows, with the new tokens, as
    k_pages and v_pages [S * P, page_size, Hkv, D] for any layout of the cache. batch.page_table [S,
    P] and batch.slots [T] point into these pages. Pages without tokens are 0. The function returns
    out [T, Hq, D] of any float dtype; its values for padding tokens are ignored. The pages are
    copied in every layer of every step, so this form is for experiments and not for speed.

    Keyword-only arguments of the function without a default are inputs that the model passes, such
    as "layer", the number of the layer, or an array that the model's AttnSpec names; arrays are not
    split over devices, except "sinks" and "slopes".
    """

    function: SimpleFunction
    name: str
    layouts: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    """Names of the function's keyword-only arguments without a default."""
    version: str = "0"
    priority: int = 0

    @property
    def caps(self) -> Caps:
        """The same for every function: every platform, the layouts in `layouts` and all FEATURES.
        Only a check can find out which of these features the function supports.
        """
        known = {FEATURE_OF[name] for name in self.inputs if name in FEATURE_OF}
        others = {name: () for name in self.inputs if name not in FEATURE_OF}
        return Caps(layouts=self.layouts, features=FEATURES | known, inputs=others)

    def default_config(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> None:
        """Return None: there is nothing to tune."""
        return

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
        config: None = None,
        **inputs: Any,
    ) -> tuple[jax.Array, CacheArrays, None]:
        """Return (out [T, Hq, D] in q's dtype, the cache unchanged, None). See AttentionImpl;
        kv_write has run before.
        """
        bucket, size = batch.bucket, layout.page_size
        table = batch.page_table
        local_table = jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)
        k_pages, v_pages = layout.read(cache, table.reshape(-1))
        starts = jnp.arange(bucket.pages_per_seq, dtype=jnp.int32) * size
        held = starts[None, :, None] + jnp.arange(size)[None, None] < batch.kv_lens[:, None, None]
        held = held.reshape(-1, size, 1, 1)
        real = batch.seq_ids < bucket.seqs
        row, page = jnp.minimum(batch.seq_ids, bucket.seqs - 1), batch.positions // size
        slots = (row * bucket.pages_per_seq + page) * size + batch.positions % size
        local = dataclasses.replace(batch, page_table=local_table, slots=jnp.where(real, slots, -1))
        k_pages, v_pages = jnp.where(held, k_pages, 0), jnp.where(held, v_pages, 0)
        out = self.function(q, k_pages, v_pages, local, spec, **inputs)
        shape = getattr(out, "shape", None)
        if shape != q.shape:
            given = f"{type(out).__name__}{'' if shape is None else list(shape)} from {self.name}"
            raise InputError(
                given, f"an array {list(q.shape)}, the shape of q", "Return one output per query."
            )
        return jnp.where(real[:, None, None], out, 0).astype(q.dtype), cache, None


def adapt_attention(given: Any, name: str, layouts: Sequence[str]) -> Any:
    """Return `given` as an AttentionImpl: unchanged if it is one, else the simple form wrapped.

    `layouts` are all available layouts, the preferred one first. InputError for any other object.
    """
    if hasattr(given, "caps") and hasattr(given, "default_config") and not isinstance(given, type):
        return given
    allowed = f"an AttentionImpl, or a function {SIMPLE_FORM}"
    if isinstance(given, type) or not callable(given):
        what = "the class" if isinstance(given, type) else "an object of type"
        named = given.__name__ if isinstance(given, type) else type(given).__name__
        raise InputError(f"{name} is {what} {named}", allowed, "Pass an object or a function.")
    try:
        parameters = inspect.signature(given).parameters.values()
        inputs = tuple(
            p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty
        )
        inspect.signature(given).bind(*ARGUMENTS, **dict.fromkeys(inputs))
    except TypeError as error:
        raise InputError(
            f"{name}{inspect.signature(given)}: {error}", allowed, "Give it these five arguments."
        ) from None
    except ValueError:  # the signature is unknown: the check will find errors
        inputs = ()
    return SimpleAttention(given, name, tuple(layouts), inputs=inputs)
