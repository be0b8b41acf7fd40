"""The sections of EngineConfig: parts, kernels, and limits for guided requests and templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    field_validator,
    model_validator,
)

AUTO: Final = "auto"
PHASES: tuple[Literal["decode", "prefill", "mixed"], ...] = ("decode", "prefill", "mixed")


class Frozen(BaseModel):
    """Base of all configuration sections: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def with_options(part: Any) -> Any:
    """Return a part, which may be a name or a flat section, as a section with `options`."""
    if isinstance(part, str):
        return {"name": part}
    if isinstance(part, Mapping) and "options" not in part:
        name = {"name": part["name"]} if "name" in part else {}
        return {**name, "options": {k: v for k, v in part.items() if k != "name"}}
    return part


def by_phase(choice: Any) -> Any:
    """Return a choice of a kernel, which may be a name or a model, with its phases."""
    if isinstance(choice, BaseModel):
        return choice.model_dump()
    return dict.fromkeys(PHASES, choice) if isinstance(choice, str) else choice


class Choice(Frozen):
    """A part and its options: `engine = "x"`, or a section with `name` and the options of x."""

    name: str = AUTO
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_name_or_flat_section(cls, value: Any) -> Any:
        return with_options(value)


class KernelChoice(Frozen):
    """The implementation of one op in each phase; `attention = "x"` chooses x for all phases."""

    decode: str = AUTO
    prefill: str = AUTO
    mixed: str = AUTO

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return by_phase(value)


class ShadowChoice(Frozen):
    """A candidate kernel to compare with the chosen one on live steps: `shadow.attention =
    "x@0.05"` also runs x on one step in twenty.
    """

    name: str = Field(min_length=1, description="the candidate: a name or an import path")
    share: float = Field(default=0.05, gt=0, le=1, description="share of the steps that it runs on")

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
            raise ValueError("the name of a kernel, not auto")
        return value


class CaptureChoice(Frozen):
    """Live steps whose calls of ops are written into a file, which bench kernels, check and tune
    read with --trace. `capture = "x.trace"` sets the file alone.
    """

    file: str = Field(min_length=1, description="file that is written after each captured step")
    ops: tuple[str, ...] = Field((), description="ops whose calls are captured; empty: all")
    steps: tuple[NonNegativeInt, ...] = Field(
        (),
        description="numbers of the captured steps, counted from 0; empty: the first step of each "
        "program, and one in `every` steps",
    )
    every: int = Field(100, ge=1, description="one in so many steps is captured")
    max_steps: int = Field(16, ge=1, le=1000, description="max captured steps")
    values: bool = Field(
        False, description="whether the numbers of all ops but attention are saved, or only indices"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str) else value


class GuidedLimits(Frozen):
    """Limits for guided requests: the size of a constraint, and the time and memory that worker
    processes may use to compile it and to compute masks.

    Options of the grammar library limit the work per token, such as step_lexer_fuel.
    """

    size_bytes: int = Field(
        default=256 << 10,
        ge=1,
        description="max bytes of a JSON schema, a regular expression, all choices, or a grammar",
    )
    depth: int = Field(
        default=100, ge=1, le=500, description="max nesting of lists and objects in a schema"
    )
    items: int = Field(
        default=10_000,
        ge=1,
        description="max number of lists and objects in a schema, rules in a grammar, or choices",
    )
    compile_s: float = Field(
        default=5.0, gt=0, le=3600, description="max seconds to compile one constraint"
    )
    mask_s: float = Field(
        default=2.0, gt=0, le=3600, description="max seconds to compute one mask of allowed tokens"
    )
    memory_bytes: int = Field(
        default=128 << 20,
        ge=16 << 20,
        description="max memory that the compiling worker process allocates after its start; the "
        "process that computes masks may allocate eight times as much",
    )
    stack_bytes: int = Field(
        default=8 << 20,
        ge=1 << 20,
        le=1 << 29,
        description="stack of the compiling worker process; the process that computes masks has "
        "twice as much",
    )


SpecialTokens = Literal["parse", "text"]
"""What special tokens in prompts and messages become: these tokens, or tokens of their letters."""


class TemplateLimits(Frozen):
    """Limits for rendering one chat. Templates are programs that come with checkpoints and
    requests, so they are not trusted.
    """

    time_s: float = Field(default=5.0, gt=0, le=3600, description="max seconds to render one chat")
    memory_bytes: int = Field(
        default=256 << 20,
        ge=16 << 20,
        description="max memory that the worker process allocates after its start",
    )
    stack_bytes: int = Field(
        default=8 << 20, ge=1 << 20, le=1 << 30, description="stack of the worker process"
    )
    max_output_chars: int = Field(
        default=8_000_000, ge=1, description="max characters of the rendered text"
    )
