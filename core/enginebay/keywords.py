"""Keywords of SamplingParams, EngineConfig and LLM with the types that a caller may give, for type
checkers.

Each record is wider than the model's fields: `stop="."` is accepted and kept as a tuple. The
defaults, ranges and meanings are those of the models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pydantic import BaseModel


class SamplingFields(TypedDict, total=False):
    """Keywords of enginebay.types.SamplingParams."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    n: int
    best_of: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    stop_words_ids: Sequence[Sequence[int]]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int | None
    prompt_logprobs: int | None
    json_schema: dict[str, Any] | str | None
    json_object: bool
    regex: str | None
    choice: Sequence[str]
    grammar: str | None
    suppress_repetition_in_generation: bool
    no_repeat_ngram_size: int
    min_tokens: int
    logit_bias: dict[int, float]
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    typical_p: float
    processors: dict[str, dict[str, Any]]


Section = str | Mapping[str, Any] | BaseModel
"""A part by name, or by name and options."""


class ServingChoices(TypedDict, total=False):
    """The fields of enginebay.config.EngineConfig that every face leaves to its caller."""

    platform: str
    scheduler: Section
    sampler: Section
    proposer: Section
    draft_tokens: int | None
    kernels: Mapping[str, Section]
    interpret: bool
    shadow: Mapping[str, Section]
    processors: Sequence[str] | Literal["auto"]
    grammars: Section
    guided_limits: Mapping[str, Any] | BaseModel
    generation_config: Literal["auto", "none"]
    layout: str
    tuned: Literal["auto", "off", "require"]
    tuned_folder: str
    decode_steps: int
    template_limits: Mapping[str, Any] | BaseModel
    axis_rules: Mapping[str, str | None]
    seed: int | None
    verify_weights: bool
    verify_kernels: bool
    compile_cache: str
    dump_step: str | None
    full_vocab_logprobs: bool


class EngineChoices(ServingChoices, total=False):
    """Keywords of enginebay.llm.LLM: all fields of EngineConfig but `model`, which is its first
    parameter.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    engine: Section
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    overlap_execution: bool
    mesh: Mapping[str, int]
    forbid_compiling: bool


class EngineFields(EngineChoices, total=False):
    """Keywords of enginebay.config.EngineConfig."""

    model: str
