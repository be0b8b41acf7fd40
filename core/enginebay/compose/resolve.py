"""Replacing "auto": a pure function from configuration and facts to a configuration without it, and
the reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from enginebay.config import NO_PROPOSER, NO_QUANTIZATION, EngineConfig, Reason
from enginebay.config_sections import AUTO, Choice
from enginebay.errors import ConfigError
from enginebay.ops.select import behind

MAX_AUTO_MODEL_LEN = 4096
FEW_DRAFTS, MANY_DRAFTS, SMALL_MODEL_BYTES = 7, 15, 64 << 20
"""Of a small model a step's own cost is what counts, so that many drafts share it; a large one's
arithmetic grows with them.
"""


@dataclasses.dataclass(frozen=True)
class NamedFact:
    """A registered part as far as choosing needs it."""

    name: str
    priority: int = 0
    refused: str | None = None
    built_in: bool = False
    mixes: bool = False
    """Of an engine: it declares the capability mixed_steps."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that resolving depends on besides the configuration."""

    platforms: Sequence[NamedFact]
    engines: Sequence[NamedFact]
    schedulers: Sequence[NamedFact]
    samplers: Sequence[NamedFact]
    default_dtype: str
    model_max_len: int
    weight_bytes: int
    model_auto_len: int | None = None
    """The longest max_model_len that is taken unless the configuration gives one; None:
    model_max_len.
    """
    prefers_mixed_steps: bool = False
    """What the platform says."""


def pick(setting: str, wanted: str, facts: Sequence[NamedFact]) -> Reason:
    """The name to use: `wanted` itself unless it is "auto", else the highest priority that is not
    refused.

    Of equal priorities a built-in part is taken, then the first by name.
    """
    if wanted != AUTO:
        return Reason(setting, wanted, "chosen by name")
    able = sorted(
        (f for f in facts if f.refused is None), key=lambda f: (-f.priority, not f.built_in, f.name)
    )
    refused = tuple((f.name, f.refused) for f in facts if f.refused is not None)
    if not able:
        raise ConfigError(
            f"{setting} = 'auto' finds nothing ({'; '.join(': '.join(r) for r in refused)})",
            "an installed one",
            "Install a plugin that offers it.",
        )
    passed = tuple((f.name, behind(f, able[0])) for f in able[1:])
    return Reason(setting, able[0].name, f"highest priority ({able[0].priority})", refused + passed)


def resolve(config: EngineConfig, facts: Facts) -> tuple[EngineConfig, tuple[Reason, ...]]:
    """A configuration whose platform, dtype, engine, scheduler, sampler, proposer and sizes are
    settled.

    Pure: equal arguments give equal results. Kernels and layout are settled when the model's ops
    are known, see `kernels.choose_kernels`. ConfigError when max_model_len exceeds the model's own.
    """
    proposer = _proposer(config)
    reasons = [
        pick("platform", config.platform, facts.platforms),
        pick("engine", config.engine.name, facts.engines),
        pick("scheduler", config.scheduler.name, facts.schedulers),
        pick("sampler", config.sampler.name, facts.samplers),
        proposer,
    ]
    dtype = Reason("dtype", config.dtype, "chosen by name")
    if config.dtype == AUTO:
        dtype = Reason("dtype", facts.default_dtype, f"the default of platform {reasons[0].chosen}")
    kv = config.kv_cache_dtype
    cached = kv if isinstance(kv, str) else ", ".join(f"{g} {each}" for g, each in kv.items())
    others = [
        Reason(name, dtype.chosen, "that of dtype")
        if chosen == AUTO
        else Reason(name, chosen, "chosen by name")
        for name, chosen in (("weight_dtype", config.weight_dtype), ("kv_cache_dtype", cached))
    ]
    if config.quantization != NO_QUANTIZATION:
        others.append(Reason("quantization", config.quantization, "chosen by name"))
    reasons += [dtype, *others, _max_model_len(config, facts)]
    reasons.append(_mixed_steps(config, facts, reasons[1].chosen))
    draft_tokens = config.draft_tokens
    if proposer.chosen != NO_PROPOSER:
        reasons.append(_draft_tokens(config, facts))
        draft_tokens = int(reasons[-1].chosen)
    names = {reason.setting: reason.chosen for reason in reasons}
    settled = config.model_copy(
        update={
            "platform": names["platform"],
            **{name: names[name] for name in ("dtype", "weight_dtype")},
            "kv_cache_dtype": names["kv_cache_dtype"] if isinstance(kv, str) else kv,
            "engine": Choice(name=names["engine"], options=config.engine.options),
            "scheduler": Choice(name=names["scheduler"], options=config.scheduler.options),
            "sampler": Choice(name=names["sampler"], options=config.sampler.options),
            "proposer": Choice(name=names["proposer"], options=config.proposer.options),
            "max_model_len": int(names["max_model_len"]),
            "mixed_steps": names["mixed_steps"],
            "draft_tokens": draft_tokens,
        }
    )
    return settled, tuple(reasons)


def _proposer(config: EngineConfig) -> Reason:
    """Drafts pay for some texts only, and more programs are compiled for them: who wants them says
    so.
    """
    name = config.proposer.name
    reason = (
        "nothing is drafted unless a proposer is chosen by name"
        if name == AUTO
        else "chosen by name"
    )
    name = NO_PROPOSER if name == AUTO else name
    if name == NO_PROPOSER and config.proposer.options:
        raise ConfigError(
            f"proposer = {name!r} with options {', '.join(config.proposer.options)}",
            "a proposer by name, such as ngram, or no options",
            "Name it.",
        )
    return Reason("proposer", name, reason)


def _mixed_steps(config: EngineConfig, facts: Facts, engine: str) -> Reason:
    mixing = [fact.name for fact in facts.engines if fact.mixes]
    able = engine in mixing
    if config.mixed_steps == "on" and not able:
        raise ConfigError(
            f"mixed_steps = 'on' with engine {engine!r}",
            f"engines that declare mixed_steps: {', '.join(mixing) or 'none'}",
            "Choose one of them, or leave it out.",
        )
    if config.mixed_steps != AUTO:
        return Reason("mixed_steps", config.mixed_steps, "chosen by name")
    if facts.prefers_mixed_steps:
        why = "the platform's choice" if able else f"engine {engine!r} does not declare it"
        return Reason("mixed_steps", "on" if able else "off", why)
    return Reason("mixed_steps", "off", "the platform's choice")


def _draft_tokens(config: EngineConfig, facts: Facts) -> Reason:
    if config.draft_tokens is not None:
        return Reason("draft_tokens", str(config.draft_tokens), "chosen by name")
    small = facts.weight_bytes < SMALL_MODEL_BYTES
    size = (
        f"{facts.weight_bytes / 2**20:.0f} MiB of weights, "
        f"{'less' if small else 'not less'} than {SMALL_MODEL_BYTES >> 20}"
    )
    return Reason("draft_tokens", str(MANY_DRAFTS if small else FEW_DRAFTS), size)


def _max_model_len(config: EngineConfig, facts: Facts) -> Reason:
    if config.max_model_len is None:
        most = facts.model_auto_len or facts.model_max_len
        length = min(most, MAX_AUTO_MODEL_LEN)
        why = f"the model's {most}, at most {MAX_AUTO_MODEL_LEN} unless asked for"
        if most < facts.model_max_len:
            why += (
                f"; a longer one, up to {facts.model_max_len}, "
                "changes the model's rotary frequencies"
            )
        return Reason("max_model_len", str(length), why)
    if config.max_model_len > facts.model_max_len:
        raise ConfigError(
            f"max_model_len = {config.max_model_len}",
            f"at most {facts.model_max_len}, the model's own",
            "Ask for less.",
        )
    return Reason("max_model_len", str(config.max_model_len), "chosen by name")
