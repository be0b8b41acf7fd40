"""Finds the attention problems of the configured engine's steps, before the engine is made."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.negotiate import PlanSteps
from enginebay.config import NO_PROPOSER, EngineConfig
from enginebay.config_sections import AUTO, PHASES
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.engine import AttentionProblem
from enginebay.contracts.executor import AttentionProblemsOf, EngineParts
from enginebay.contracts.model import Model, ModelInfo
from enginebay.contracts.placement import Placement
from enginebay.contracts.platform import Platform
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Caps
from enginebay.ops.spec import Bucket
from enginebay.plugins.registry import Registry, import_target
from enginebay.weights import WeightFormat

USUAL_PAGE_SIZE = 64


def usual_problems(parts: EngineParts, options: Any) -> list[AttentionProblem]:
    """Return the problems that are assumed for an engine without the capability
    `attention_problems`: its largest step of each phase, on pages of 64 tokens.
    """
    config = parts.config
    longest, num_rows = config.max_model_len, config.max_num_seqs
    assert longest is not None, "resolve() settles max_model_len"
    pages = -(-longest // USUAL_PAGE_SIZE)
    layouts = {
        group: spec.make_layout(parts.layout_type, pages, USUAL_PAGE_SIZE)
        for group, spec in parts.info.attention.items()
    }
    found: list[AttentionProblem] = []
    for phase in PHASES:
        rows = max(num_rows, parts.min_rows) if phase == "decode" else num_rows
        prompts = min(config.max_num_batched_tokens, longest * num_rows)
        tokens = rows if phase == "decode" else prompts
        width = 1 if phase == "decode" else tokens
        found.append((Bucket(tokens, rows, pages, width, longest, phase), layouts))
    return found


def engine_steps(
    registry: Registry,
    config: EngineConfig,
    *,
    model: Model,
    platform: Platform,
    placement: Placement,
    weight_format: WeightFormat,
) -> PlanSteps:
    """Return a function that lists the attention problems of the configured engine, for a layout
    and a decode kernel. An attention problem is the bucket and the cache layouts of a step, which
    an attention kernel must be able to run.

    The engine does not exist yet, so its capability `attention_problems` names the function that
    lists them. For an engine without this capability, `usual_problems` are assumed, and
    `make_engine` later refuses kernels that cannot run the engine's real steps.
    """
    _refuse_drafts(config, model.info)
    entry = registry.find("engine", config.engine.name)
    options = registry.options(entry, config.engine.options)
    target = entry.capability("attention_problems")
    what = f"attention_problems of engine {entry.name!r}"
    problems_of: AttentionProblemsOf = (
        usual_problems if target is None else import_target(str(target), what)
    )

    @functools.cache
    def problems(
        layout: str,
        layout_type: type[KVLayout],
        free_padding_rows: int,
        *,
        compact_decode: bool,
        ragged_decode: bool,
        drafts_are_rows: bool,
    ) -> Sequence[AttentionProblem]:
        parts = EngineParts(
            config=config,
            model=model,
            platform=platform,
            placement=placement,
            weight_format=weight_format,
            layout=layout,
            layout_type=layout_type,
            compact_decode=compact_decode,
            ragged_decode=ragged_decode,
            drafts_are_rows=drafts_are_rows,
            free_padding_rows=free_padding_rows,
        )
        return problems_of(parts, options)

    def steps(
        layout: str, layout_type: type[KVLayout], free_padding_rows: int, decode: Caps
    ) -> Sequence[AttentionProblem]:
        return problems(
            layout,
            layout_type,
            free_padding_rows,
            compact_decode=decode.compact_decode,
            ragged_decode=decode.ragged_decode,
            drafts_are_rows=decode.splits_rows,
        )

    return steps


def _refuse_drafts(config: EngineConfig, info: ModelInfo) -> None:
    """Raise UnsupportedError for a proposer with a model that keeps a recurrent state, because a
    rejected draft cannot be removed from the state.
    """
    if info.states and config.proposer.name not in (AUTO, NO_PROPOSER):
        given = f"proposer = {config.proposer.name!r} with a model of the family {info.family!r}"
        states = ", ".join(repr(group.name) for group in info.states)
        allowed = f"{NO_PROPOSER!r} for a model with recurrent states ({states})"
        raise UnsupportedError(given, allowed, "Leave --proposer out.")


def refuse_problems(
    kernels: ChosenKernels, engine: str, problems: Sequence[AttentionProblem]
) -> None:
    """Raise UnsupportedError when a chosen attention kernel cannot run a step of the engine."""
    for phase in PHASES:
        impl = kernels.attention[phase]
        reason = kernels.why_not(impl, phase, problems)
        if reason is not None:
            given = f"kernels.attention.{phase} = {impl.name!r} with engine {engine!r}: it {reason}"
            fix = f"Pass --attention {phase}=NAME, or change the engine's sizes."
            raise UnsupportedError(given, "a kernel that serves every step of the engine", fix)
