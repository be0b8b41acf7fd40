"""The default values of sampling parameters for one model, which requests use for fields that they
leave out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from enginebay.config import EngineConfig, Reason
from enginebay.contracts.model import Checkpoint
from enginebay.row_value import ProcessorOption, declared
from enginebay.types import ROW_VALUES, SamplingParams

SETTING = "generation_config"
GENERATION_FILE = "generation_config.json"

PROCESSOR_OF = {
    name: one.processor for name, one in declared(SamplingParams, ProcessorOption).items()
}
"""Field of SamplingParams -> the logits processor that applies it. A sampler may apply penalties
itself.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Default values by field of SamplingParams, and the reason for them."""

    values: Mapping[str, Any]
    reason: Reason

    def missing_in(self, params: SamplingParams) -> dict[str, Any]:
        """Return the defaults for the fields that `params` leaves out.

        A field is not left out if the caller set it to any value, or named its logits processor in
        `processors`.
        """
        return {
            name: value
            for name, value in self.values.items()
            if name not in params.model_fields_set
            and PROCESSOR_OF.get(name) not in params.processors
        }

    def applied_to(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the defaults for the fields that it leaves out. The object itself is
        not changed.
        """
        missing = self.missing_in(params)
        return params.model_copy(update=missing) if missing else params


NO_DEFAULTS = SamplingDefaults({}, Reason(SETTING, "none", "no checkpoint"))


def choose_sampling_defaults(
    config: EngineConfig, checkpoint: Checkpoint, processors: Collection[str], *, greedy_only: bool
) -> SamplingDefaults:
    """Return the checkpoint's values that the chosen sampler and processors can apply; none with
    generation_config = "none".

    Other values are left out, because no request asked for them; the reason lists them.
    CheckpointError for a file that cannot be read.
    """
    if config.generation_config == "none":
        return SamplingDefaults({}, Reason(SETTING, "none", "chosen by name"))
    known = checkpoint.sampling_defaults
    refused = {name: _why_not(name, processors, greedy_only=greedy_only) for name in known}
    values = {name: value for name, value in known.items() if refused[name] is None}
    shown = ", ".join(f"{name} {value:g}" for name, value in values.items())
    in_file = checkpoint.folder.is_file()  # a GGUF file
    source = "general.sampling of the file" if in_file else GENERATION_FILE
    why = f"{source}, for fields that a request leaves out"
    if not known:
        there = in_file or (checkpoint.folder / GENERATION_FILE).is_file()
        why = f"{source} names no sampling" if there else f"there is no {GENERATION_FILE}"
    not_taken = tuple((name, why_not) for name, why_not in refused.items() if why_not is not None)
    return SamplingDefaults(values, Reason(SETTING, shown or "none", why, not_taken))


def _why_not(name: str, processors: Collection[str], *, greedy_only: bool) -> str | None:
    """Return why sampler and processors cannot apply a field, or None when they can."""
    processor = PROCESSOR_OF.get(name)
    by_sampler = name in ROW_VALUES and not greedy_only
    if processor is not None and processor not in processors and not by_sampler:
        return f"needs the logits processor {processor}"
    if name == "temperature" and greedy_only:
        return "the sampler is greedy only"
    return None
