"""Preparation of an eSurge: the model (by name or already open), its tokenizer, and its engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginebay.compose.composition import Composed, build, find_family, make_plan
from enginebay.compose.plan import Plan, make_title
from enginebay.config import DEFAULT_AXIS_RULES, make_config
from enginebay.contracts.engine import LaterCompilation
from enginebay.contracts.model import Checkpoint
from enginebay.contracts.text import Tokenizer
from enginebay.errors import ConfigError
from enginebay.serving.abilities import Abilities
from enginebay.serving.prepare import Preparer
from enginebay.types import MAX_STOP_TOKENS
from enginebay.waits import waiting
from enginebay_esurge.settings import ENGINE, EngineSettings
from enginebay_shared.opening import eos_token_ids, find_tokenizer, size_name

PRELOADED = "preloaded"
"""The configuration's name for a model that was passed as an object."""


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """The plan, before anything is loaded, and the tokenizer of requests."""

    plan: Plan
    tokenizer: Tokenizer

    def default_name(self) -> str:
        """Return "{model type}-{billions of parameters}b"."""
        return f"{size_name(self.plan)}b"

    def make_preparer(self, extra_eos_token_ids: Sequence[int]) -> Preparer:
        """Return the Preparer of requests, which end at the end-of-sequence ids of the model, of
        the tokenizer, and at extra_eos_token_ids.
        """
        plan = self.plan
        known = plan.checkpoint.token_info
        own = eos_token_ids(self.tokenizer.inner)
        eos = tuple(dict.fromkeys((*known.eos_token_ids, *own, *extra_eos_token_ids)))
        info = plan.model.info
        num_ids = info.num_token_ids
        if (
            any(not 0 <= token_id < num_ids for token_id in extra_eos_token_ids)
            or len(eos) > MAX_STOP_TOKENS
        ):
            raise ConfigError(
                f"extra_eos_token_ids = {list(extra_eos_token_ids)}",
                f"ids from 0 to {num_ids - 1}, at most {MAX_STOP_TOKENS} including those of "
                "model and tokenizer",
                "Remove ids from extra_eos_token_ids.",
            )
        assert plan.config.max_model_len is not None, "make_plan settles max_model_len"
        return Preparer(
            self.tokenizer,
            dataclasses.replace(known, eos_token_ids=eos),
            info.vocab_size,
            plan.config.max_model_len,
            abilities=Abilities.of(plan),
            seed=plan.config.seed,
        )


def prepare_model(
    model: str | Path | Checkpoint, tokenizer: Any, settings: EngineSettings
) -> PreparedModel:
    """Plan a model by name, or an open model, which requires a tokenizer: ConfigError (a
    ValueError) without one.
    """
    checkpoint = None if isinstance(model, str | Path) else model
    if checkpoint is not None and tokenizer is None:
        raise ConfigError(
            "a preloaded model without a tokenizer",
            "a preloaded model with a tokenizer",
            "Pass tokenizer=...",
        )
    name = str(model) if checkpoint is None else PRELOADED
    more = {k: v for k, v in settings.more.items() if k not in ("engine_options", "axis_rules")}
    # A first plan without sizes, to find the model's max length and the devices.
    first = make_plan(make_config(more, {"model": name, "engine": ENGINE}), checkpoint=checkpoint)
    num_devices = len(first.platform.devices())
    max_tp = max_shards(first, num_devices) if settings.auto_shard_model else 1
    info = first.model.info
    longest = info.auto_max_model_len or info.max_model_len
    config = settings.config(name, longest, num_devices, max_tp)
    plan = make_plan(config, first.registry, first.checkpoint)
    return PreparedModel(plan, find_tokenizer(tokenizer, plan))


def max_shards(plan: Plan, num_devices: int) -> int:
    """Return the max number of the devices that the dimensions of a plan's model can be
    split over.
    """
    family = find_family(plan.registry, plan.checkpoint.architecture)
    split = {axis for axis, target in DEFAULT_AXIS_RULES.items() if target == "tensor"}
    for num_shards in range(num_devices, 1, -1):
        try:
            model = family.build(
                plan.checkpoint.config, dtype=plan.config.dtype, num_shards=num_shards
            )
        except ConfigError:
            continue  # its heads are not divisible by num_shards
        specs = model.weight_specs().values()
        sizes = [
            n
            for spec in specs
            for n, axis in zip(spec.shape, spec.axes, strict=True)
            if axis in split
        ]
        if not any(size % num_shards for size in sizes):
            return num_shards
    return 1


def load_engine(
    plan: Plan, log: logging.Logger, level: int, *, compiles: bool
) -> tuple[Composed, LaterCompilation | None]:
    """Load the weights and allocate the cache. With `compiles`, compile the programs that every
    step needs; the returned LaterCompilation, if any, compiles the others. If configured, no step
    may compile afterwards.
    """
    parts = build(plan)
    if not compiles:
        return parts, None
    engine = parts.engine
    with waiting(f"compiling the largest steps of {make_title(plan)}"):
        others = engine.begin_warmup(
            lambda done, total, what: log.log(level, "compiled %s (%d of %d)", what, done, total)
        )
    engine.compilations.forbidden = plan.config.forbid_compiling
    return parts, others
