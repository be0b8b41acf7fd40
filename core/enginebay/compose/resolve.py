"""Replaces "auto" in a configuration, as a pure function of the configuration and some facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from enginebay.compose.model_cache import RequestedCache
from enginebay.config import NO_PROPOSER, EngineConfig, Reason
from enginebay.config_sections import AUTO
from enginebay.errors import ConfigError
from enginebay.ops.select import Candidate, choose

MAX_AUTO_MODEL_LEN = 4096
FEW_DRAFTS, MANY_DRAFTS, SMALL_MODEL_BYTES = 7, 15, 64 << 20
"""Default number of drafts. The cost of a step of a small model hardly depends on its number of
tokens, so that many drafts pay; the cost of a step of a large model grows with them.
"""


@dataclasses.dataclass(frozen=True)
class ResolveInputs:
    """Everything that `resolve` depends on, except for the configuration."""

    platforms: Sequence[Candidate]
    engines: Sequence[Candidate]
    schedulers: Sequence[Candidate]
    samplers: Sequence[Candidate]
    default_dtype: str
    model_max_len: int
    weight_bytes: int
    model_cache: RequestedCache | None = None
    """The cache that the model's configuration requests."""
    model_auto_len: int | None = None
    """Limit of max_model_len when the configuration does not set it; None: model_max_len."""
    mixing: Sequence[str] = ()
    """Names of the engines with the capability mixed_steps."""
    prefers_mixed_steps: bool = False
    """Platform.mixed_steps of the chosen platform."""


def pick(setting: str, wanted: str, facts: Sequence[Candidate]) -> Reason:
    """Return the name to use: `wanted`, or for "auto" the part with the highest priority that is
    not refused; for equal priorities a built-in part, then the first by name. ConfigError when
    every part is refused.
    """
    if wanted != AUTO:
        return Reason(setting, wanted, "chosen by name")
    if all(fact.unavailable for fact in facts):
        refused = "; ".join(f"{fact.name}: {fact.unavailable}" for fact in facts)
        raise ConfigError(
            f"{setting} = 'auto' finds nothing ({refused})",
            f"an installed {setting} that can be used here",
            f"Install a plugin that registers one, or see `enginebay plugins --kind {setting}`.",
        )
    return choose(setting, AUTO, facts)[1]


def resolve(config: EngineConfig, facts: ResolveInputs) -> tuple[EngineConfig, tuple[Reason, ...]]:
    """Choose platform, dtypes, engine, scheduler, sampler, proposer and sizes; return the
    configuration with these values, and a reason for each.

    The function is pure. Kernels and layout are chosen later, when the ops of the model are known;
    see `kernels.choose_kernels`. ConfigError for a max_model_len above the model's limit, for
    options of a proposer that is not chosen, and for mixed_steps with an engine that lacks them.
    """
    proposer = _proposer(config)
    reasons = [
        pick("platform", config.platform, facts.platforms),
        pick("engine", config.engine.name, facts.engines),
        pick("scheduler", config.scheduler.name, facts.schedulers),
        pick("sampler", config.sampler.name, facts.samplers),
        proposer,
    ]
    parts = {reason.setting: reason.chosen for reason in reasons[1:]}
    dtype = Reason("dtype", config.dtype, "chosen by name")
    if config.dtype == AUTO:
        dtype = Reason("dtype", facts.default_dtype, f"the default of platform {reasons[0].chosen}")
    kv = config.kv_cache_dtype
    cached = kv if isinstance(kv, str) else ", ".join(f"{g} {each}" for g, each in kv.items())
    others = [
        Reason(name, dtype.chosen, "the value of dtype")
        if chosen == AUTO
        else Reason(name, chosen, "chosen by name")
        for name, chosen in (("weight_dtype", config.weight_dtype), ("kv_cache_dtype", cached))
    ]
    if cached == AUTO and facts.model_cache is not None:
        others[1] = Reason("kv_cache_dtype", facts.model_cache.dtype, facts.model_cache.why)
    reasons += [dtype, *others, _max_model_len(config, facts)]
    reasons.append(_mixed_steps(config, facts, reasons[1].chosen))
    draft_tokens = config.draft_tokens
    if proposer.chosen != NO_PROPOSER:
        reasons.append(_draft_tokens(config, facts))
        draft_tokens = int(reasons[-1].chosen)
    names = {reason.setting: reason.chosen for reason in reasons}
    settled = config.model_copy(
        update={
            **{name: names[name] for name in ("platform", "dtype", "weight_dtype", "mixed_steps")},
            "kv_cache_dtype": names["kv_cache_dtype"] if isinstance(kv, str) else kv,
            **{
                kind: getattr(config, kind).model_copy(update={"name": name})
                for kind, name in parts.items()
            },
            "max_model_len": int(names["max_model_len"]),
            "draft_tokens": draft_tokens,
        }
    )
    return settled, tuple(reasons)


def _proposer(config: EngineConfig) -> Reason:
    """Choose no proposer for "auto": drafts pay only for some texts, and need more programs."""
    is_auto = config.proposer.name == AUTO
    reason = "no drafts unless a proposer is chosen by name" if is_auto else "chosen by name"
    name = NO_PROPOSER if is_auto else config.proposer.name
    if name == NO_PROPOSER and config.proposer.options:
        raise ConfigError(
            f"proposer = {name!r} with options {', '.join(config.proposer.options)}",
            "a proposer by name, such as ngram, or no options",
            "Name the proposer (proposer.name=ngram), or leave its options out.",
        )
    return Reason("proposer", name, reason)


def _mixed_steps(config: EngineConfig, facts: ResolveInputs, engine: str) -> Reason:
    able = engine in facts.mixing
    if config.mixed_steps == "on" and not able:
        raise ConfigError(
            f"mixed_steps = 'on' with engine {engine!r}",
            f"engines that declare mixed_steps: {', '.join(facts.mixing) or 'none'}",
            "Choose one of these engines with --engine, or leave mixed_steps out.",
        )
    if config.mixed_steps != AUTO:
        return Reason("mixed_steps", config.mixed_steps, "chosen by name")
    wanted = facts.prefers_mixed_steps
    why = (
        f"engine {engine!r} does not declare it" if wanted and not able else "the platform's choice"
    )
    return Reason("mixed_steps", "on" if wanted and able else "off", why)


def _draft_tokens(config: EngineConfig, facts: ResolveInputs) -> Reason:
    if config.draft_tokens is not None:
        return Reason("draft_tokens", str(config.draft_tokens), "chosen by name")
    small = facts.weight_bytes < SMALL_MODEL_BYTES
    size = f"{facts.weight_bytes / 2**20:.0f} MiB of weights"
    why = f"{size}, {'less' if small else 'not less'} than {SMALL_MODEL_BYTES >> 20}"
    return Reason("draft_tokens", str(MANY_DRAFTS if small else FEW_DRAFTS), why)


def _max_model_len(config: EngineConfig, facts: ResolveInputs) -> Reason:
    if config.max_model_len is None:
        most = facts.model_auto_len or facts.model_max_len
        length = min(most, MAX_AUTO_MODEL_LEN)
        why = f"the model's {most}, at most {MAX_AUTO_MODEL_LEN} unless it is set"
        if most < facts.model_max_len:
            longer = f"a longer one, up to {facts.model_max_len}"
            why += f"; {longer}, changes the model's rotary frequencies"
        return Reason("max_model_len", str(length), why)
    if config.max_model_len > facts.model_max_len:
        raise ConfigError(
            f"max_model_len = {config.max_model_len}",
            f"at most {facts.model_max_len}, the model's own",
            f"Pass --max-model-len {facts.model_max_len}, or a smaller number.",
        )
    return Reason("max_model_len", str(config.max_model_len), "chosen by name")
