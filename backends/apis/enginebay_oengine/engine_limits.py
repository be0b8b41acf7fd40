"""EngineLimits: the checked sizes of an oEngine, and the step geometry that follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from enginebay.errors import ConfigError
from enginebay_oengine.opened_model import OpenedModel
from enginebay_oengine.paged_cache import PagedAttentionCacheMetaData
from enginebay_paged.page_steps import StepGeometry, step_geometry

DEFAULT_PREFILL_LENGTHS = tuple(2**power for power in range(9, 24))
DEFAULT_MAX_PREFILL_LENGTH = 4096
DEFAULT_MAX_LENGTH = 8192


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """oEngine's size arguments with defaults filled in. ConfigError (a ValueError) for wrong
    values.
    """

    max_concurrent_decodes: int
    max_concurrent_prefill: int
    prefill_lengths: tuple[int, ...]
    max_prefill_length: int
    max_length: int
    batch_size: int | None

    def geometry(self, model: OpenedModel, metadata: PagedAttentionCacheMetaData) -> StepGeometry:
        """Return the sizes of steps."""
        return step_geometry(
            model.parts,
            page_size=metadata.page_size,
            max_length=min(self.max_length, metadata.max_length),
            num_slots=max(self.max_concurrent_decodes, self.batch_size or 0),
            max_prompts=self.max_concurrent_prefill,
            max_prefill_tokens=self.max_prefill_length,
            prefill_lengths=self.prefill_lengths,
        )


def make_limits(
    max_concurrent_decodes: int | None,
    max_concurrent_prefill: int | None,
    prefill_lengths: Sequence[int] | None,
    max_prefill_length: int | None,
    max_length: int | None,
    batch_size: int | None,
) -> EngineLimits:
    """Make EngineLimits from oEngine's arguments."""

    def whole(name: str, value: int | None, default: int, least: int = 1) -> int:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"{name} = {value!r}",
                f"an integer of at least {least}",
                f"Pass a larger {name}." if isinstance(value, int) else f"Pass int({name}).",
            )
        return value

    lengths = DEFAULT_PREFILL_LENGTHS if prefill_lengths is None else tuple(prefill_lengths)
    for length in lengths:
        whole("prefill_lengths", length, 0)
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ConfigError(
            f"prefill_lengths = {list(lengths)}",
            "different integers in rising order",
            "Pass sorted(set(prefill_lengths)).",
        )
    decodes = whole("max_concurrent_decodes", max_concurrent_decodes, jax.device_count())
    if batch_size is not None and whole("batch_size", batch_size, 0) < decodes:
        raise ConfigError(
            f"batch_size = {batch_size}",
            f"at least max_concurrent_decodes, {decodes}",
            "Raise batch_size, or omit it.",
        )
    return EngineLimits(
        max_concurrent_decodes=decodes,
        max_concurrent_prefill=whole(
            "max_concurrent_prefill", max_concurrent_prefill, jax.device_count()
        ),
        prefill_lengths=lengths,
        max_prefill_length=whole(
            "max_prefill_length", max_prefill_length, DEFAULT_MAX_PREFILL_LENGTH
        ),
        max_length=whole("max_length", max_length, DEFAULT_MAX_LENGTH, least=2),
        batch_size=batch_size,
    )
