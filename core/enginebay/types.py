"""Records that cross the outside face: sampling parameters and requests."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from enginebay.embeds import Embeds
from enginebay.errors import EnginebayError, RequestError
from enginebay.grammar import Grammar
from enginebay.row_value import AppliedBy, FromCheckpoint, RowValue, declared
from enginebay.validation import Accepts, Validated, changed_fields, option

Float = TypeVar("Float")
Int = TypeVar("Int")

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["mean", "last"]
"""Of a prompt's hidden states: their mean, or that of the last token."""


class StepVariant(enum.IntEnum):
    """What a compiled step can do for its rows. Each variant serves rows that ask for less."""

    GREEDY = 0
    """Takes the first best token of each row."""
    SAMPLE = 1
    """Samples, and returns log-probabilities."""
    FULL = 2
    """Applies logits processors and penalties too."""


MAX_STOP_TOKENS = 16
"""Most end-of-sequence and stop token ids of a request: they are compared on the device."""

MAX_LOGPROBS = 20
"""Most best tokens whose log-probabilities a request may ask for: every step finds so many."""

ALL_LOGPROBS = -1
"""In place of such a number: the whole vocabulary."""


class RowParams(Validated, Generic[Float, Int]):
    """The sampling parameters of SamplingParams that the device has for each row.

    `Float` and `Int` are float and int in a request, and jax.Array [rows] in
    enginebay.sampler.DeviceParams. A parameter is declared here alone: the request, the row table,
    the device's rows, the command line's flags and the documentation's table have what these fields
    name.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, strict=True)
    refusal: ClassVar[type[EnginebayError]] = RequestError

    temperature: Annotated[
        Float, RowValue("float32", 0.0, "temperature", highest=1e30), FromCheckpoint("temperature")
    ] = option(0.0, ge=0.0, allow_inf_nan=False, description="0 is greedy")
    top_k: Annotated[
        Int, RowValue("int32", 0, "filter", lowest=0, highest=2**31 - 1), FromCheckpoint("top_k")
    ] = option(0, ge=-1, description="keep the k best tokens; 0 or -1 keeps all")
    top_p: Annotated[Float, RowValue("float32", 1.0, "filter"), FromCheckpoint("top_p")] = option(
        1.0, gt=0.0, le=1.0, description="keep the smallest set of best tokens with this mass"
    )
    min_p: Annotated[Float, RowValue("float32", 0.0, "filter"), FromCheckpoint("min_p")] = option(
        0.0, ge=0.0, le=1.0, description="drop tokens below min_p times the best one's probability"
    )
    presence_penalty: Annotated[
        Float, RowValue("float32", 0.0, "penalty"), AppliedBy("penalties", "presence")
    ] = option(
        0.0, ge=-2.0, le=2.0, description="taken from the logit of each token that is in the output"
    )
    frequency_penalty: Annotated[
        Float, RowValue("float32", 0.0, "penalty"), AppliedBy("penalties", "frequency")
    ] = option(
        0.0,
        ge=-2.0,
        le=2.0,
        description="taken from a token's logit as often as it is in the output",
    )
    repetition_penalty: Annotated[
        Float,
        RowValue("float32", 1.0, "penalty", lowest=1e-30, highest=1e30),
        AppliedBy("penalties", "repetition"),
        FromCheckpoint("repetition_penalty"),
    ] = option(
        1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="divides the logit of a token in prompt or output when it is positive, else "
        "multiplies it",
    )


class SamplingParams(RowParams[float, int]):
    """How the tokens of one request are chosen, and when it ends.

    Validated when made and on every assignment: RequestError. A value of another type is refused,
    however like a right one it looks. A copy (`FrozenSampling`) is taken when the request is
    queued, so later changes never reach a request under way.
    """

    max_tokens: Annotated[int | None, FromCheckpoint("max_new_tokens")] = Field(
        default=64,
        ge=1,
        description="most new tokens; None: as many as context and cache have room for",
    )
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="equal seeds give equal samples"
    )
    n: int = Field(default=1, ge=1, le=256, description="completions per prompt")
    best_of: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="completions that are made, of which the n likeliest are returned",
    )
    stop: Accepts[str | Sequence[str] | None, tuple[str, ...]] = option(
        (), description="texts that end the completion"
    )
    stop_token_ids: Accepts[Sequence[int], tuple[int, ...]] = option(
        (), description="token ids that end the completion"
    )
    stop_words_ids: Accepts[Sequence[Sequence[int]], tuple[tuple[int, ...], ...]] = option(
        (), description="sequences of token ids that end the completion"
    )
    ignore_eos: bool = Field(default=False, description="run through end-of-sequence tokens")
    include_stop_str_in_output: bool = Field(default=False, description="keep the stop text")
    skip_special_tokens: bool = Field(default=True, description="leave special tokens out of texts")
    logprobs: int | None = Field(
        default=None,
        ge=ALL_LOGPROBS,
        le=MAX_LOGPROBS,
        description="tell log-probabilities of each new token: its own, and of so many best ones; "
        "-1: of all",
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="tell log-probabilities of each token of the prompt: its own, and of so many "
        "best ones",
    )
    json_schema: dict[str, Any] | str | None = Field(
        default=None, description="the output is JSON of this schema, given as a dict or as text"
    )
    json_object: bool = Field(default=False, description="the output is a JSON object")
    regex: str | None = Field(default=None, description="the whole output matches this expression")
    choice: Accepts[Sequence[str], tuple[str, ...]] = option(
        (), description="the output is one of these texts"
    )
    grammar: str | None = Field(
        default=None, description="the output is of this grammar, in Lark's notation"
    )

    suppress_repetition_in_generation: Annotated[
        bool, AppliedBy("penalties", "output_only", uses=False)
    ] = Field(
        default=False, description="repetition_penalty looks at the output alone, not at the prompt"
    )
    no_repeat_ngram_size: Annotated[
        int, AppliedBy("no_repeat_ngram", "size"), FromCheckpoint("no_repeat_ngram_size")
    ] = Field(
        default=0,
        ge=0,
        description="no sequence of so many tokens comes twice, prompt included; 0: any may",
    )
    min_tokens: Annotated[int, AppliedBy("min_tokens", "min_tokens")] = Field(
        default=0, ge=0, description="least new tokens before a token or text that ends it"
    )
    logit_bias: Annotated[
        dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]], AppliedBy("logit_bias", "bias")
    ] = Field(
        default_factory=dict, description="token id -> what is added to its score, -100 to 100"
    )
    allowed_token_ids: Annotated[
        Accepts[Sequence[int] | None, tuple[int, ...] | None],
        AppliedBy("allowed_token_ids", "token_ids"),
    ] = option(None, min_length=1, description="the only tokens that may be chosen; None: all")
    bad_words: Accepts[Sequence[str], tuple[Annotated[str, Field(min_length=1)], ...]] = option(
        (), description="texts that the completion must not have"
    )
    typical_p: Annotated[float, AppliedBy("typical", "typical_p"), FromCheckpoint("typical_p")] = (
        Field(
            default=1.0, gt=0.0, le=1.0, description="keep the most typical tokens with this mass"
        )
    )
    processors: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="further logits processors by name, each with its options"
    )

    if not TYPE_CHECKING:  # a type checker derives the keywords from the fields

        def __init__(self, **fields):
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise self.refused(error) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise self.refused(error) from None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return changed_fields(self)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_and_lists_are_plain(cls, value: object) -> object:
        return _plain(value)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else () if value is None else value

    @field_validator("stop_words_ids")
    @classmethod
    def _no_empty_sequence(cls, value: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if not all(value):
            raise ValueError(
                "a sequence of at least one token id; an empty one would end every completion"
            )
        return value

    @field_validator("best_of", "n")
    @classmethod
    def _best_of_at_least_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        pair = {name: info.data.get(name) for name in ("n", "best_of")} | {
            str(info.field_name): value
        }
        if pair["n"] is not None and pair["best_of"] is not None and pair["best_of"] < pair["n"]:
            raise ValueError(
                f"best_of of at least n; they would be {pair['best_of']} and {pair['n']}"
            )
        return value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError(
                "texts that are not empty, as an empty one would end every completion at once"
            )
        return value


def _plain(value: object, levels: int = 4) -> object:
    """Numbers of numpy as Python's own; lists, ranges, arrays and sets as tuples; all else as it
    is.

    No field has lists of more than two levels: what is nested deeper than `levels`, or a range of
    more than a million, stays and is refused by its type.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _plain(value.tolist(), levels)
    too_long = isinstance(value, range) and value[1_000_000:]
    if levels and not too_long and isinstance(value, list | tuple | range | set | frozenset):
        return tuple(_plain(one, levels - 1) for one in value)
    return value


ROW_VALUES = declared(SamplingParams, RowValue)
"""The declared value of each field that the device has for each row."""

_PENALTIES = tuple((n, one.neutral) for n, one in ROW_VALUES.items() if one.stage == "penalty")


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSampling:
    """What the loop and the device need of a request's SamplingParams, fixed when it is queued."""

    max_tokens: int
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    """The request's own copy, which nobody changes, without the fields that stand here beside it.
    """
    stop_token_ids: tuple[int, ...] = ()
    """Every token id that ends the request, end-of-sequence ids included unless they are ignored.
    """
    num_logprobs: int | None = None
    """How many best tokens' log-probabilities are told besides each sampled one's; None: none at
    all.
    """
    num_prompt_logprobs: int | None = None
    """The same of the prompt's tokens."""
    processors: tuple[Any, ...] = ()
    """The fields of each logits processor that it uses (enginebay.processor.RowValues)."""
    reads_tokens: bool = False
    """Whether what the device does with its scores depends on all of its tokens so far."""

    @property
    def min_tokens(self) -> int:
        """How many new tokens come before one that ends the request, by itself or as the last of a
        stop sequence or a stop text.
        """
        return self.params.min_tokens

    @property
    def returns_all(self) -> bool:
        """Whether more log-probabilities of new tokens are told than a usual step has."""
        return self.num_logprobs is not None and self.num_logprobs > MAX_LOGPROBS

    @property
    def penalises(self) -> bool:
        """Whether tokens of prompt or output change the scores of those to come."""
        return any(getattr(self.params, name) != neutral for name, neutral in _PENALTIES)

    @property
    def is_greedy(self) -> bool:
        """Whether the first best token of what is left is taken."""
        return takes_best(self.params)

    @property
    def variant(self) -> StepVariant:
        """The least variant of a step that serves the request."""
        if self.processors or self.penalises:
            return StepVariant.FULL
        is_plain = self.is_greedy and self.num_logprobs is None
        return StepVariant.GREEDY if is_plain else StepVariant.SAMPLE


def takes_best(params: SamplingParams) -> bool:
    """Whether the first best token is taken, whatever else a request asks for."""
    return params.temperature < float(np.finfo(np.float32).tiny) or params.top_k == 1


def with_length(params: SamplingParams, max_tokens: int | None) -> SamplingParams:
    """`params` with this max_tokens where the caller set none, not even None."""
    return (
        params
        if "max_tokens" in params.model_fields_set
        else params.model_copy(update={"max_tokens": max_tokens})
    )


def as_sampling_params(params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """SamplingParams of a mapping of its fields; None has the defaults. RequestError for a wrong
    field or another type.
    """
    if isinstance(params, SamplingParams):
        return params
    if params is None or isinstance(params, Mapping):
        return SamplingParams(**(params or {}))
    raise RequestError(
        f"sampling parameters of type {type(params).__name__}",
        "SamplingParams or a dict of its fields, or a list of one of them per prompt",
        'Make them with SamplingParams(max_tokens=16) or {"max_tokens": 16}.',
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One sequence to complete; a prompt with n completions becomes n of these.

    Invariants: `prompt_token_ids` is int32 of at least one token; prompt plus at least one new
    token fits the engine's context; requests with the same `parent_id` (but "") have the same
    prompt, so that an engine may compute it once; `key` are the two words of the request's own
    random key, the same for all completions of a prompt: the device folds it with `index`.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    sampling: FrozenSampling
    key: tuple[int, int]
    arrival_s: float
    priority: int = 0
    """Larger is more urgent, to schedulers that look at it."""
    parent_id: str = ""
    index: int = 0
    tenant: str = ""
    """On whose account it runs, for schedulers that are fair among tenants."""
    grammar: Grammar | None = None
    """What the output must be; None: anything."""
    embeds: Embeds | None = None
    """Of prompt positions that hold embeddings; their token id is one past the vocabulary."""
    cache_salt: str = ""
    """Requests with another one share no prefix with it."""
    pooling: Pooling | None = None
    """The prompt's hidden states are asked for, pooled so, and no token; None: tokens are."""
    streams: bool = False
    """Whether its tokens are sent as they are made. It changes no token."""


def key_of(seed: int) -> tuple[int, int]:
    """The two 32-bit words of a request's random key, from its seed."""
    return seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF
