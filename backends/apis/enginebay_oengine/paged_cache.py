"""PagedAttentionCache: keys and values of all sequences in the pages of one pool, and its
metadata.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from pydantic import ValidationError

from enginebay.compose.plan import Plan
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.cache_shape import pages_for
from enginebay.contracts.placement import Placement
from enginebay.errors import ConfigError, InputError, RequestError, shown
from enginebay.ops.head_rotation import rotate, rotated_widths
from enginebay.ops.kv_storage import QUANTIZE
from enginebay.validation import describe_validation
from enginebay_oengine.opened_model import OpenedModel
from enginebay_paged.options import PagedOptions
from enginebay_paged.page_steps import pool_shapes


@dataclasses.dataclass(frozen=True, eq=False)
class PagedAttentionCacheMetaData:
    """Sizes of a cache: num_pages pages (including the dummy page) of page_size tokens, for
    sequences of up to max_length tokens.

    `layouts` and `num_layers` are by cache group of the model.
    """

    page_size: int
    num_pages: int
    max_length: int
    layouts: Mapping[str, KVLayout]
    num_layers: Mapping[str, int]
    placement: Placement
    num_token_ids: int
    greedy_only: bool = False
    """Whether the sampler always returns the best token."""

    @property
    def max_pages_per_sequence(self) -> int:
        """Pages of the longest sequence, which is the width of a page table."""
        return pages_for(self.max_length, self.page_size)

    def check_token_ids(self, token_ids: np.ndarray) -> None:
        """Raise InputError (a ValueError) for ids outside the vocabulary."""
        wrong = token_ids[(token_ids < 0) | (token_ids >= self.num_token_ids)]
        if len(wrong):
            raise InputError(
                f"token id {wrong[0]}",
                f"0 to {self.num_token_ids - 1}",
                "Use the model's tokenizer.",
            )

    def check_temperature(self, temperature: float) -> None:
        """Raise RequestError (a ValueError) for a temperature above 0 when the sampler is greedy
        and would ignore it.
        """
        if self.greedy_only and temperature > 0:
            raise RequestError(
                f"temperature = {temperature} with a greedy sampler",
                "temperature = 0",
                'Configure sampler = "standard" to sample.',
            )

    @property
    def longest_sequence(self) -> int:
        """Max tokens of a sequence: max_length, or all pages."""
        return min(self.max_length, (self.num_pages - 1) * self.page_size)


@functools.partial(tree_util.register_dataclass, data_fields=["views"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PagedAttentionCache:
    """The cache's arrays by cache group and layer. Axis 0 of each array counts pages; page 0 is
    never read.

    An engine takes over a cache: its arrays are donated to every step.
    """

    views: Mapping[str, Sequence[Mapping[str, jax.Array]]]

    @staticmethod
    def create_metadata(
        model: OpenedModel,
        *,
        page_size: int = 64,
        num_pages: int | None = None,
        memory_utilization: float | None = None,
        max_num_seqs: int | None = None,
        max_length: int | None = None,
    ) -> PagedAttentionCacheMetaData:
        """Return the sizes of a cache for a model.

        Without num_pages, the cache gets `memory_utilization` (default 0.85) of the device's free
        memory, less weights and working space, but not more than `max_num_seqs` sequences of
        `max_length` tokens need. Both default to the model's configuration. ConfigError for a wrong
        value, UnsupportedError when there is no room for a page, or for num_pages.
        """
        parts, info = model.parts, model.plan.model.info
        try:
            options = PagedOptions(
                page_size=page_size, num_pages=num_pages, memory_utilization=memory_utilization
            )
        except ValidationError as error:
            raise ConfigError(describe_validation(error, PagedOptions)) from None
        most = parts.config.max_model_len
        assert most is not None, "make_plan settles max_model_len"
        length = most if max_length is None else max_length
        num_seqs = parts.config.max_num_seqs if max_num_seqs is None else max_num_seqs
        if not 2 <= length <= most or num_seqs < 1:
            raise ConfigError(
                f"max_length = {length}, max_num_seqs = {num_seqs}",
                f"2 to {most} tokens (the model's max_model_len), and at least one sequence",
                "Omit max_length and max_num_seqs to use the configuration's.",
            )
        sized = parts.config.model_copy(update={"max_num_seqs": num_seqs, "max_model_len": length})
        sampler = model.plan.registry.find("sampler", model.plan.config.sampler.name).declaration
        count, shapes = pool_shapes(dataclasses.replace(parts, config=sized), options)
        return PagedAttentionCacheMetaData(
            page_size=page_size,
            num_pages=count,
            max_length=length,
            layouts=parts.kv_layouts(shapes),
            num_layers={group.name: group.num_layers for group in info.groups},
            placement=parts.placement,
            num_token_ids=info.num_token_ids,
            greedy_only=bool(sampler and sampler.capabilities.get("greedy_only")),
        )

    @classmethod
    def init_cache(cls, metadata: PagedAttentionCacheMetaData) -> PagedAttentionCache:
        """Allocate an empty cache: zeros for every layer."""

        def layer(layout: KVLayout) -> dict[str, jax.Array]:
            where: Mapping[str, Any] = metadata.placement.cache(layout)
            return {
                n: jnp.zeros(s.shape, s.dtype, device=where[n]) for n, s in layout.shapes().items()
            }

        layouts = metadata.layouts
        return cls(
            {g: tuple(layer(layouts[g]) for _ in range(n)) for g, n in metadata.num_layers.items()},
        )


BLOCK_SIZE_FIELD, BLOCK_SIZE = "kv_cache_quantization_blocksize", 64


@dataclasses.dataclass(frozen=True, slots=True)
class CacheQuantizer:
    """Quantises keys and values as the cache stores them.

    quantization_method: int8, uint4 or fp8; None: values are stored in a float dtype, or the cache
    groups of the model differ. block_size: the number in the model's configuration, 64 without one.
    The cache has a scale for each head of a token, whatever the block size is.
    quantization_platform: the platform of the devices. rotated: the widths of the parts of a head
    that the cache rotates before it rounds them (`enginebay.ops.head_rotation.rotated_widths`).
    """

    quantization_method: str | None
    block_size: int
    quantization_platform: str
    rotated: tuple[int, ...] = ()

    def __call__(self, values: jax.Array, center: jax.Array | None = None) -> jax.Array:
        """Return keys or values [..., head_dim] as they are read from the cache, in their dtype.
        Without a method they are unchanged. `center`: for keys [..., kv_heads, head_dim] of a
        layer, what the cache subtracts from them, f32 [kv_heads, head_dim]: the layer's part of the
        weight that `enginebay.ops.key_centers.center_path` names.
        """
        values = jnp.asarray(values)
        if self.quantization_method is None:
            return values
        return _as_read(values, center, self.quantization_method, self.rotated)


@functools.partial(jax.jit, static_argnames=("method", "rotated"))
def _as_read(
    values: jax.Array, center: jax.Array | None, method: str, rotated: tuple[int, ...]
) -> jax.Array:
    less = jnp.float32(0) if center is None else center
    stored = QUANTIZE[method](rotate(values.astype(jnp.float32) - less, rotated))
    return (rotate(stored.values(), rotated) + less).astype(values.dtype)


def make_quantizer(plan: Plan) -> CacheQuantizer:
    """Return the quantizer of a plan's cache. ConfigError for a block size that is no count."""
    size = plan.checkpoint.config.get(BLOCK_SIZE_FIELD, BLOCK_SIZE)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"{BLOCK_SIZE_FIELD} = {shown(size)} in the model's configuration",
            "an integer of at least 1",
            f"Correct config.json, or remove {BLOCK_SIZE_FIELD} from it.",
        )
    specs = plan.model.info.attention.values()
    forms = {(spec.kv_storage, rotated_widths(spec)) for spec in specs}
    method, rotated = forms.pop() if len(forms) == 1 else (None, ())
    return CacheQuantizer(method, size, plan.platform.env().platform, rotated)
