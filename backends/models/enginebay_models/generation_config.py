"""Chooses the values of generation_config.json that requests use for fields they leave out."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from enginebay.compose.plan import Plan
from enginebay.compose.sampling_defaults import PROCESSOR_OF, SETTING, SamplingDefaults
from enginebay.config import EngineConfig, Reason
from enginebay.contracts.model import Checkpoint
from enginebay.types import ROW_VALUES
from enginebay_models.sampling_defaults import GENERATION_FILE


def with_sampling_defaults(plan: Plan) -> Plan:
    """Return the plan with the defaults of its checkpoint for sampling parameters."""
    entry = plan.registry.find("sampler", plan.config.sampler.name)
    defaults = choose_sampling_defaults(
        plan.config,
        plan.checkpoint,
        plan.processors.entries,
        greedy_only=bool(entry.capability("greedy_only")),
    )
    reasons = (*plan.reasons, defaults.reason)
    return dataclasses.replace(plan, sampling_defaults=defaults, reasons=reasons)


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
