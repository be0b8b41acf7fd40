"""Sections of EngineConfig: parts and kernels by name, limits of constraints and of templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

AUTO: Final = "auto"
PHASES: tuple[Literal["decode", "prefill", "mixed"], ...] = ("decode", "prefill", "mixed")


class Frozen(BaseModel):
    """Base of configuration sections: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Choice(Frozen):
    """A part by name, with its own options: `engine = "x"`, or a section with `name` and the
    options beside it.
    """

    name: str = AUTO
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_name_or_flat_section(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and "options" not in value:
            return {
                "name": value.get("name", AUTO),
                "options": {k: v for k, v in value.items() if k != "name"},
            }
        return value


class KernelChoice(Frozen):
    """The implementation of one op, by phase; `attention = "x"` chooses x for all of them."""

    decode: str = AUTO
    prefill: str = AUTO
    mixed: str = AUTO

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return dict.fromkeys(PHASES, value) if isinstance(value, str) else value


class ShadowChoice(Frozen):
    """A candidate to be compared on live steps: `shadow.attention = "x@0.05"` runs x on one step in
    twenty.
    """

    name: str = Field(min_length=1)
    share: float = Field(default=0.05, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, at, share = value.rpartition("@")
        return {"name": name, "share": share} if at else {"name": value}

    @field_validator("name")
    @classmethod
    def _is_named(cls, value: str) -> str:
        if value == AUTO:
            raise ValueError("the name of a kernel; auto is what the shadow is compared with")
        return value


class GuidedLimits(Frozen):
    """What a guided request may ask: the size of its constraint, and what compiling and following
    it may use of the worker processes.

    Steps are limited by options of the grammar library, such as step_lexer_fuel.
    """

    size_bytes: int = Field(
        default=256 << 10,
        ge=1,
        description="bytes of a schema as JSON, an expression, all choices, or a grammar",
    )
    depth: int = Field(
        default=100, ge=1, le=500, description="lists and objects within one another in a schema"
    )
    items: int = Field(
        default=10_000,
        ge=1,
        description="lists and objects of a schema, rules of a grammar, or choices",
    )
    compile_s: float = Field(default=5.0, gt=0, le=3600, description="seconds to compile")
    mask_s: float = Field(
        default=2.0, gt=0, le=3600, description="seconds for one mask of allowed tokens"
    )
    memory_bytes: int = Field(
        default=128 << 20,
        ge=16 << 20,
        description="memory to compile, beyond that of the worker's start; masks: eight times this",
    )
    stack_bytes: int = Field(
        default=8 << 20,
        ge=1 << 20,
        le=1 << 29,
        description="stack of the worker that compiles; twice this for the one that makes masks",
    )


class TemplateLimits(Frozen):
    """What rendering one chat may use: templates come with checkpoints and with requests, and are
    programs of strangers.
    """

    time_s: float = Field(default=5.0, gt=0, le=3600, description="seconds to render one chat")
    memory_bytes: int = Field(
        default=256 << 20,
        ge=16 << 20,
        description="memory of the worker process beyond that of its start",
    )
    stack_bytes: int = Field(
        default=8 << 20, ge=1 << 20, le=1 << 30, description="stack of the worker process"
    )
    max_output_chars: int = Field(
        default=8_000_000, ge=1, description="characters of the rendered text"
    )
