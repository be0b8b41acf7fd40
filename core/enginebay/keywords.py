"""Keywords of EngineConfig and LLM with the types that a caller may pass, for type checkers.

EngineConfig documents the meaning, range and default of each field. The names stand here a second
time because a type checker can check the keywords of LLM and eSurge only against a TypedDict; a
test demands the same names in both places. The types are wider than those of the fields:
`engine="oengine"` is accepted and stored as a Choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pydantic import BaseModel

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheDtype = Literal[Dtype, "int8", "uint4", "fp8"]
Section = str | Mapping[str, Any] | BaseModel
"""A part: its name, or a section with its name and options."""


class ServingChoices(TypedDict, total=False):
    """The fields of enginebay.config.EngineConfig that every API accepts from its caller."""

    checkpoint: str
    executor: str
    platform: str
    weight_dtype: Dtype
    kv_cache_dtype: CacheDtype | Mapping[str, CacheDtype]
    quantization: Section
    activation_quantization: Literal["auto", "none", "int8", "int8_group"]
    scheduler: Section
    sampler: Section
    proposer: Section
    draft_tokens: int | None
    kernels: Mapping[str, Section]
    interpret: bool
    shadow: Mapping[str, Section]
    capture: Section | None
    processors: Sequence[str] | Literal["auto"]
    grammars: Section
    guided_limits: Mapping[str, Any] | BaseModel
    generation_config: Literal["auto", "none"]
    layout: str
    tuned: Literal["auto", "off", "require"]
    tuned_folder: str
    decode_steps: int
    stream_chunk_tokens: int
    template_limits: Mapping[str, Any] | BaseModel
    special_tokens_in_text: Literal["parse", "text"]
    axis_rules: Mapping[str, str | None]
    mixed_steps: Literal["auto", "on", "off"]
    seed: int | None
    lora: Mapping[str, str]
    max_loras: int | None
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_targets: Sequence[str] | Literal["auto"]
    verify_weights: bool
    verify_kernels: bool
    compile_cache: str
    dump_step: str | None
    full_vocab_logprobs: bool
    idle_release_s: float | None
    embeddings: bool
    prompt_embeds: bool


class EngineChoices(ServingChoices, total=False):
    """Keywords of enginebay.serving.LLM: all fields of EngineConfig except `model`, which is the
    first positional parameter of LLM.
    """

    dtype: Dtype
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
