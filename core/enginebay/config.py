"""EngineConfig: every setting of an engine, from a TOML file, command-line flags or Python."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Unpack, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from enginebay.config_sections import (
    AUTO,
    CaptureChoice,
    Choice,
    GuidedLimits,
    KernelChoice,
    ShadowChoice,
    SpecialTokens,
    TemplateLimits,
    by_phase,
    with_options,
)
from enginebay.errors import ConfigError, EnginebayError
from enginebay.keywords import CacheDtype, Dtype, EngineFields
from enginebay.validation import Validated

NO_PROPOSER: Final = "none"
NO_QUANTIZATION: Final = "none"
FILES: Final = "huggingface"
"""The checkpoint part for folders and files, and for names that no other part has."""
LOCAL_EXECUTOR = "local"
"""The value of `executor` for the executor of enginebay, which runs commands in this process."""
PARTS = ("engine", "scheduler", "sampler", "proposer", "grammars", "quantization")

MAX_PASSES = 4
"""Max passes of the model in one verify step. The device begins another pass, without the host,
as long as every draft of the pass before was accepted.
"""

LogicalAxis = Literal["batch", "heads", "kv_heads", "mlp", "vocab", "expert"]
"""A logical axis of weights and caches."""

DEFAULT_AXIS_RULES: dict[LogicalAxis, str | None] = {
    "batch": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "expert": "tensor",
}
"""Logical axis -> mesh axis. None: the axis is not sharded, so every device holds all of it."""


class EngineConfig(Validated):
    """All settings of one engine; immutable. A wrong field raises ConfigError.

    `auto` is replaced by a value when an engine is planned: `enginebay.compose.resolve` chooses it
    and records the reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    refusal: ClassVar[type[EnginebayError]] = ConfigError

    model: str = Field("demo", description="folder, hub id, GGUF file, or demo: the embedded model")
    platform: str = Field(
        AUTO, description="devices to run on: cpu, cuda, tpu, or those of a plugin"
    )
    dtype: Dtype = Field(
        AUTO, description="dtype of the computation: float32, bfloat16, float16 or auto"
    )
    engine: Choice = Field(Choice(), description="engine, which owns the cache and runs the steps")
    scheduler: Choice = Field(Choice(), description="policy that decides which requests run next")
    sampler: Choice = Field(Choice(), description="sampler, which chooses each next token")
    proposer: Choice = Field(
        Choice(), description="proposer, which drafts tokens for the next step to verify"
    )
    draft_tokens: int | None = Field(
        None,
        ge=1,
        le=64,
        description="max drafts of a row that one pass of the model verifies; unset: 15 for "
        "weights under 64 MiB, else 7",
    )
    kernels: dict[str, KernelChoice] = Field(
        default_factory=dict, description="op -> implementation (kernel)"
    )
    interpret: bool = Field(
        False,
        description="interpret a kernel for another platform on the host when it is chosen by name",
    )
    shadow: dict[str, ShadowChoice] = Field(
        default_factory=dict,
        max_length=1,
        description="op -> candidate kernel to compare with the chosen one on a share of the steps",
    )
    capture: CaptureChoice | None = Field(
        None, description="live steps whose calls of ops are written into a file"
    )
    processors: tuple[str, ...] | Literal["auto"] = Field(
        "auto", description="logits processors that requests may use; auto: the default ones"
    )
    grammars: Choice = Field(
        Choice(), description="library that compiles grammars of guided requests"
    )
    guided_limits: GuidedLimits = Field(
        GuidedLimits(), description="limits for the constraints of guided requests"
    )
    template_limits: TemplateLimits = Field(
        TemplateLimits(), description="limits for rendering a chat template"
    )
    special_tokens_in_text: SpecialTokens = Field(
        "parse",
        description="special tokens in prompts and messages. parse: they become these tokens, as "
        "in transformers; text: they become tokens of their letters",
    )
    checkpoint: str = Field(
        AUTO, description="part that opens the model; auto: the one that has its name"
    )
    executor: str = Field(
        LOCAL_EXECUTOR,
        description="runs an engine's commands: local, or the import path of your own, "
        '"module:attribute"',
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="whether generation_config.json sets defaults of sampling parameters"
    )
    weight_dtype: Dtype = Field(AUTO, description="dtype of the weights; auto: the value of dtype")
    kv_cache_dtype: CacheDtype | dict[str, CacheDtype] = Field(
        AUTO,
        description="dtype of the cache, or one for each cache group; int8, uint4, fp8: quantised; "
        "auto: as the model's configuration says (kv_cache_quantization_method), or else the same "
        "as `dtype`",
    )
    quantization: Choice = Field(
        Choice(),
        description="how weights are stored in fewer bits, such as int8; auto: as the checkpoint "
        "stores them",
    )
    activation_quantization: Literal["auto", "none", "int8", "int8_group"] = Field(
        AUTO,
        description="rounding of the inputs of quantised weights, with a scale for each token or "
        "for each 32 inputs of a token; auto: as the checkpoint says",
    )
    layout: str = Field(AUTO, description="cache layout")
    tuned: Literal["auto", "off", "require"] = Field(
        "auto",
        description="tuned kernel configurations. auto: use them; off: ignore them; "
        "require: a kernel without one is an error",
    )
    tuned_folder: str = Field(
        AUTO, description="folder of your own tuned kernels; auto: in the user's cache folder"
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="max length of prompt plus output, in tokens; unset: the model's, at most 4096",
    )
    max_num_seqs: int = Field(32, ge=1, le=4096, description="max requests that run together")
    max_num_batched_tokens: int = Field(1024, ge=16, description="max prompt tokens in one step")
    decode_steps: int = Field(
        16, ge=1, le=256, description="max tokens that a row decodes in one compiled call"
    )
    stream_chunk_tokens: int = Field(
        1, ge=1, le=256, description="max tokens in a chunk of a stream, while few requests stream"
    )
    overlap_execution: bool = Field(
        True,
        description="launch a step while the step before it runs; false: read each step first",
    )
    mixed_steps: Literal["auto", "on", "off"] = Field(
        AUTO, description="decode rows and prefill prompts in one step"
    )
    mesh: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="devices along each mesh axis, such as {tensor = 2}"
    )
    axis_rules: dict[LogicalAxis, str | None] = Field(
        default_factory=dict,
        description="logical axis -> mesh axis; replaces the default rules of these axes",
    )
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="makes requests without a seed repeatable"
    )
    lora: dict[str, str] = Field(
        default_factory=dict, description="adapters to load: name -> folder in the format of PEFT"
    )
    max_loras: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="slots for adapters on the device; unset: one for each in `lora`",
    )
    max_lora_rank: int = Field(16, ge=1, le=1024, description="max rank of an adapter")
    max_cpu_loras: int | None = Field(
        None, ge=1, description="max number of loaded adapters; unset: any number"
    )
    lora_targets: tuple[str, ...] | Literal["auto"] = Field(
        AUTO, description="layers with adapters, such as q_proj; auto: linear ones but the head"
    )
    verify_weights: bool = Field(
        False, description="refuse NaN and infinity in the weights while loading"
    )
    verify_kernels: bool = Field(
        True, description="check kernels that are given by import path before they are used"
    )
    compile_cache: str = Field(
        AUTO,
        description="folder of compiled programs; auto: that of JAX's settings, else one in the "
        "user's cache folder; off: JAX's settings are not changed",
    )
    dump_step: str | None = Field(
        None, min_length=1, description="folder for a description of every compiled program"
    )
    forbid_compiling: bool = Field(
        False, description="after warmup(), a program that must still be compiled is an error"
    )
    full_vocab_logprobs: bool = Field(
        False,
        description="warmup() also compiles programs for prompt_logprobs and logprobs = -1; false: "
        "the first such request does",
    )
    idle_release_s: float | None = Field(
        None,
        gt=0,
        description="seconds without a request after which the engine gives free memory of the "
        "heap, and on a Linux CPU of the cache, back to the system; unset: never",
    )
    embeddings: bool = Field(False, description="warmup() also compiles for LLM.embed()")
    prompt_embeds: bool = Field(False, description="warmup() also compiles for prompt embeddings")

    if TYPE_CHECKING:

        def __init__(self, **fields: Unpack[EngineFields]) -> None: ...

    @field_validator("model", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _cache_dtypes_are_known(cls, value: Any) -> Any:
        given = list(value.values()) if isinstance(value, Mapping) else [value]
        known = get_args(CacheDtype)
        if not all(each in known for each in given):
            raise ValueError(f"{', '.join(known)}, or one of these for each cache group")
        return value

    @model_validator(mode="after")
    def _mesh_and_rules_meet(self) -> EngineConfig:
        """Refuse a misspelt axis, which would silently leave every weight unsharded."""
        for axis, target in self.axis_rules.items():
            if target is not None and target not in self.mesh:
                raise ConfigError(
                    f"axis_rules.{axis} = {target!r}",
                    f"an axis of mesh ({', '.join(self.mesh) or 'which has none'})",
                    "Correct the name of the axis, or add this axis to mesh.",
                )
        named = {t for t in (DEFAULT_AXIS_RULES | self.axis_rules).values() if t is not None}
        for mesh_axis, size in self.mesh.items():
            if size > 1 and mesh_axis not in named:
                raise ConfigError(
                    f"mesh.{mesh_axis} = {size}, an axis that no rule uses",
                    f"axes that rules name ({', '.join(sorted(named)) or 'none'})",
                    "Correct the name of the axis, or add a rule for it to axis_rules.",
                )
        return self

    @model_validator(mode="after")
    def _observers_may_compile(self) -> EngineConfig:
        for name, what in (("shadow", self.shadow), ("capture", self.capture)):
            if what and self.forbid_compiling:
                raise ConfigError(
                    f"{name} together with forbid_compiling",
                    f"one of the two: a {name} compiles programs of its own while serving",
                    f"Leave out {name} or forbid_compiling.",
                )
        return self

    @property
    def max_drafts(self) -> int:
        """Max drafts of a row that one pass of the model verifies; 0 without a proposer, and while
        the proposer is still "auto".
        """
        return 0 if self.proposer.name in (AUTO, NO_PROPOSER) else self.draft_tokens or 0

    @property
    def draft_passes(self) -> int:
        """Max passes of the model in one verify step: MAX_PASSES, or `decode_steps` if smaller."""
        return min(MAX_PASSES, self.decode_steps)

    @property
    def max_ahead(self) -> int:
        """Max tokens that launched steps may write into a row's cache after its committed tokens.

        At most two steps are launched: a prompt chunk or a decode that was not read yet, and the
        decode after it.
        """
        verified = self.draft_passes * (self.max_drafts + 1) if self.max_drafts else 0
        steps = max(self.decode_steps, verified)
        return max(self.max_num_batched_tokens, steps) + steps

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.mesh.values())

    @property
    def lora_slots(self) -> int:
        """Number of slots for adapters on the device."""
        return len(self.lora) if self.max_loras is None else self.max_loras

    def rules(self) -> dict[str, str | None]:
        """Logical axis -> mesh axis; None where the axis is not sharded or the mesh lacks it."""
        merged = DEFAULT_AXIS_RULES | self.axis_rules
        return {axis: mesh if mesh in self.mesh else None for axis, mesh in merged.items()}


def make_config(*layers: Mapping[str, Any]) -> EngineConfig:
    """Make an EngineConfig from layers of values. A later layer wins over an earlier one; sections
    merge key by key.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer)
    return EngineConfig(**merged)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two layers of values, where `over` wins; sections merge key by key."""
    merged = dict(under)
    for key, value in over.items():
        old, new = _written_out(key, merged.get(key)), _written_out(key, value)
        are_parts = key in PARTS and isinstance(old, Mapping) and isinstance(new, Mapping)
        is_other = are_parts and new.get("name", old.get("name")) != old.get("name")
        merged[key] = new if is_other else _over(old, new)  # another part has other options
    return merged


def _over(old: Any, new: Any) -> Any:
    """Return `new`, merged with `old` key by key where both are sections."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return dict(old) | {key: _over(old.get(key), value) for key, value in new.items()}


def _written_out(key: str, value: Any) -> Any:
    """Return the long form of a value: a part as {"name": ..., "options": {...}}, a kernel choice
    with all its phases.
    """
    if isinstance(value, BaseModel):
        return value.model_dump()
    if key in PARTS:
        return with_options(value)
    if key == "kernels" and isinstance(value, Mapping):
        return {op: by_phase(choice) for op, choice in value.items()}
    return value


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a setting has its value: the setting, the chosen value, the reason in words, and each
    refused candidate with its reason.
    """

    setting: str
    chosen: str
    why: str
    refused: tuple[tuple[str, str], ...] = ()
