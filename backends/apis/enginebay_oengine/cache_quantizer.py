"""CacheQuantizer: what the cache of a model does to keys and values."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from enginebay.compose.plan import Plan
from enginebay.errors import ConfigError, shown
from enginebay.ops.head_rotation import rotate, rotated_widths
from enginebay.ops.kv_storage import QUANTIZE

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

    def __call__(self, values: jax.Array) -> jax.Array:
        """Return keys or values [..., head_dim] as they are read from the cache, in their dtype.
        Without a method they are unchanged.
        """
        values = jnp.asarray(values)
        if self.quantization_method is None:
            return values
        return _as_read(values, self.quantization_method, self.rotated)


@functools.partial(jax.jit, static_argnames=("method", "rotated"))
def _as_read(values: jax.Array, method: str, rotated: tuple[int, ...]) -> jax.Array:
    stored = QUANTIZE[method](rotate(values, rotated))
    return rotate(stored.values(), rotated).astype(values.dtype)


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
