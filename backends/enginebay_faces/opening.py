"""Opening a model for a documented API: its configuration, its tokenizer, and what both name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from enginebay.compose.composition import open_checkpoint
from enginebay.compose.plan import Plan
from enginebay.config import EngineConfig, make_config
from enginebay.errors import ConfigError, UnsupportedError, shown
from enginebay.llm import LLM
from enginebay.model import count_weights
from enginebay.text import Tokenizer
from enginebay_worker.tokenizer import TextTokenizer

ModelLike = LLM | EngineConfig | Mapping[str, Any] | str | Path
"""A model and its configuration, as the documented APIs take them."""

Rules = tuple[tuple[str, PartitionSpec], ...]
"""(pattern, spec): an array whose path the pattern matches is divided as the spec says."""


def config_of(model: EngineConfig | Mapping[str, Any] | str | Path, engine: str) -> EngineConfig:
    """The configuration of a folder, hub id or "demo", or one that is given, with this engine where
    it names none.

    ConfigError for another engine.
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
        raise ConfigError(given_engine, engine, "Leave the engine out, or name this one.")
    return config


def wrong_llm(llm: LLM, engine: str) -> ConfigError:
    """The error for an LLM with another engine than `engine`."""
    given = f"an LLM with engine {llm.config.engine.name!r}"
    return ConfigError(given, f"engine {engine!r}", "Make the LLM with it.")


def refuse_states(plan: Plan, face: str) -> None:
    """UnsupportedError for a model that keeps a recurrent state, which the arrays of a face do not
    have.
    """
    info = plan.model.info
    if info.states:
        given = f"a model of the family {info.family!r} for {face}"
        allowed = "models that keep keys and values alone"
        raise UnsupportedError(given, allowed, "Use LLM, which keeps recurrent states.")


def size_name(plan: Plan) -> str:
    """{model type}-{billions of parameters}."""
    kind = plan.checkpoint.config.get("model_type", plan.model.info.family)
    return f"{kind}-{count_weights(plan.model) / 1e9:.2f}"


def find_tokenizer(given: Any, plan: Plan) -> Tokenizer:
    """The Tokenizer of a name or folder, of a tokenizer of transformers, of a processor that has
    one, or of the model itself for None. ConfigError (a ValueError) for anything else.
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
            "a folder or hub id, a tokenizer of transformers, a processor with one, or None "
            "for the model's own",
            "Give one of these.",
        )
    tokenizer.limit_templates(plan.config.template_limits)
    return tokenizer


def token_ids(name: str, value: Any) -> list[int]:
    """Token ids of one, several or None. ConfigError (a ValueError) for anything else."""
    values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in values):
        raise ConfigError(
            f"{name} = {shown(value)}", "a token id, a list of them, or None", "Correct it."
        )
    return values


def eos_token_ids(tokenizer: Any, *others: Any) -> list[int]:
    """Those of a tokenizer of transformers, then `others`, each once."""
    given = (getattr(tokenizer, "eos_token_id", None), *others)
    return list(dict.fromkeys(one for ids in given for one in token_ids("eos_token_id", ids)))
