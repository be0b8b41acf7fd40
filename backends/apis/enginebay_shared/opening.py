"""Opening of a model for a documented API: configuration, tokenizer and special tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from enginebay.compose.composition import open_checkpoint
from enginebay.compose.plan import Plan
from enginebay.config import LOCAL_EXECUTOR, EngineConfig, make_config
from enginebay.contracts.model import Model
from enginebay.contracts.text import Tokenizer
from enginebay.errors import ConfigError, UnsupportedError, shown
from enginebay.serving import LLM
from enginebay.text.tokenizer import TextTokenizer

ModelLike = LLM | EngineConfig | Mapping[str, Any] | str | Path
"""The forms in which the documented APIs accept a model."""

Rules = tuple[tuple[str, PartitionSpec], ...]
"""(pattern, spec): an array whose path matches the pattern is sharded by the spec."""


def config_of(model: EngineConfig | Mapping[str, Any] | str | Path, engine: str) -> EngineConfig:
    """Return the configuration of a folder, a hub id, "demo" or a mapping, or a given
    configuration. The engine "auto" becomes `engine`.

    ConfigError for another engine than `engine`.
    """
    if isinstance(model, EngineConfig):
        config = model
    else:
        given = model if isinstance(model, Mapping) else {"model": str(model)}
        config = make_config({"engine": engine}, given)
    if config.engine.name == "auto":
        config = make_config(config.model_dump(), {"engine": engine})
    if config.engine.name != engine:
        given_engine = f"engine = {config.engine.name!r}"
        raise ConfigError(given_engine, engine, f"Omit the engine, or pass engine={engine!r}.")
    return config


def wrong_llm(llm: LLM, engine: str) -> ConfigError:
    """Make the error for an LLM with another engine than `engine`."""
    given = f"an LLM with engine {llm.config.engine.name!r}"
    return ConfigError(given, f"engine {engine!r}", f"Pass LLM(..., engine={engine!r}).")


OWN_PARTS = {"scheduler": "fcfs", "proposer": "none", "executor": LOCAL_EXECUTOR}
"""Settings whose work an API with slots does itself, with their defaults."""

OF_LLM = frozenset(
    (
        *("capture", "decode_steps", "draft_tokens", "dump_step", "embeddings", "forbid_compiling"),
        *("full_vocab_logprobs", "generation_config", "grammars", "guided_limits"),
        *("idle_release_s", "lora", "lora_targets", "max_cpu_loras", "max_lora_rank", "max_loras"),
        *("mixed_steps", "overlap_execution", "prompt_embeds", "seed", "shadow"),
        "stream_chunk_tokens",
    )
)
"""Settings that the loop, the executor and the requests of an LLM read, and nothing else."""


def refuse_parts_of_llm(
    config: EngineConfig, api: str, engine: str, read: Collection[str] = ()
) -> None:
    """Raise ConfigError for a setting that the API `api`, which plans and runs its steps itself,
    would not use. `read`: the settings of OF_LLM that it reads, or that an LLM beside it reads.
    """
    todo = f"or use LLM(..., engine={engine!r})."
    for name, usual in OWN_PARTS.items():
        value = getattr(config, name)
        chosen = value if isinstance(value, str) else value.name
        if chosen not in (usual, "auto"):
            given = f"{name} = {chosen!r} for {api}, which would not use it"
            raise ConfigError(given, f"{usual!r} or 'auto'", f"Leave {name} out, {todo}")
    for name in sorted(OF_LLM.difference(read)):
        default = EngineConfig.model_fields[name].get_default(call_default_factory=True)
        if (value := getattr(config, name)) != default:
            given = f"{name} = {shown(value)} for {api}, which would not use it"
            raise ConfigError(given, f"{shown(default)}, the default", f"Leave {name} out, {todo}")


def refuse_states(plan: Plan, api: str) -> None:
    """Raise UnsupportedError for a model with a recurrent state, which the arrays of the API `api`
    cannot hold.
    """
    info = plan.model.info
    if info.states:
        given = f"a model of the family {info.family!r} for {api}"
        allowed = "models whose cache has only keys and values"
        raise UnsupportedError(given, allowed, "Use LLM, which supports recurrent states.")


def count_weights(model: Model) -> int:
    """Return the number of values of all weights."""
    return sum(math.prod(spec.shape) for spec in model.weight_specs().values())


def size_name(plan: Plan) -> str:
    """Return "{model type}-{billions of parameters}"."""
    kind = plan.checkpoint.config.get("model_type", plan.model.info.family)
    return f"{kind}-{count_weights(plan.model) / 1e9:.2f}"


def passed_tokenizer(given: Any, found: Tokenizer) -> Any:
    """Return the tokenizer in `given`, a tokenizer or a processor that has one. For None, a folder
    or a hub id, return `found`.
    """
    inner = getattr(given, "tokenizer", given)
    return found if inner is None or isinstance(inner, str | Path) else inner


def find_tokenizer(given: Any, plan: Plan) -> Tokenizer:
    """Return the Tokenizer for a folder or hub id, a transformers tokenizer, or a processor that
    has one; None is the model's own. ConfigError (a ValueError) for anything else.
    """
    inner = getattr(given, "tokenizer", given)
    if isinstance(inner, Tokenizer):
        return inner
    if inner is None or isinstance(inner, str | Path):
        named = None if inner is None else str(inner)
        where = (
            plan.checkpoint if named is None else open_checkpoint(plan.registry, plan.config, named)
        )
        tokenizer: Tokenizer = where.load_tokenizer()
    elif all(callable(getattr(inner, name, None)) for name in ("encode", "decode")):
        tokenizer = TextTokenizer(inner)
    else:
        raise ConfigError(
            f"a processor of type {type(given).__name__}",
            "a folder or hub id, a transformers tokenizer, a processor with one, or None "
            "for the model's own",
            "Pass one of these.",
        )
    tokenizer.limit_templates(plan.config.template_limits)
    tokenizer.read_special_tokens(plan.config.special_tokens_in_text)
    return tokenizer


def token_ids(name: str, value: Any) -> list[int]:
    """Return a list of token ids for one id, several ids or None. ConfigError (a ValueError) for
    anything else.
    """
    values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in values):
        raise ConfigError(
            f"{name} = {shown(value)}",
            "a token id, a list of token ids, or None",
            f"Set {name} to a token id.",
        )
    return values


def eos_token_ids(tokenizer: Any, *others: Any) -> list[int]:
    """Return the end-of-sequence ids of a transformers tokenizer, followed by `others`,
    each once.
    """
    given = (getattr(tokenizer, "eos_token_id", None), *others)
    return list(dict.fromkeys(one for ids in given for one in token_ids("eos_token_id", ids)))
