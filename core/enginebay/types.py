"""Sampling parameters and requests: the records that users and faces pass to the engine loop."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from enginebay.embeds import Embeds
from enginebay.errors import EnginebayError, RequestError
from enginebay.grammar import Grammar
from enginebay.row_value import (
    FromCheckpoint,
    HttpName,
    MaxItems,
    ProcessorOption,
    RowValue,
    declared,
)
from enginebay.validation import Accepts, Validated, option

Float = TypeVar("Float")
Int = TypeVar("Int")

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["mean", "last"]
"""How a prompt's hidden states become one vector: their mean, or the last token's state."""


class StepVariant(enum.IntEnum):
    """How much a compiled step does for its rows. A step also serves rows of a lower variant."""

    GREEDY = 0
    """Chooses the first token with the highest logit of each row."""
    SAMPLE = 1
    """Samples tokens and returns log-probabilities."""
    FULL = 2
    """Also applies logits processors and penalties."""


NOT_FINITE = -2
"""In the tokens of a step: the row's logits had NaN or infinity, so that it has no token."""

MAX_STOP_TOKENS = 16
"""Max number of end-of-sequence and stop token ids of a request: the device compares them."""

MAX_LOGPROBS = 20
"""Max value of `logprobs` in a request: every step finds this number of top tokens."""

ALL_LOGPROBS = -1
"""The value of `logprobs` that requests the whole vocabulary."""


class RowParams(Validated, Generic[Float, Int]):
    """The sampling parameters that the device holds for each row.

    `Float` and `Int` are float and int in a request (SamplingParams), and jax.Array [rows] on the
    device (enginebay.contracts.sampler.DeviceParams). This class is the only place that declares
    such a parameter: the row table, the device arrays, the command-line flags and the table in the
    documentation are derived from its fields.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, strict=True)
    refusal: ClassVar[type[EnginebayError]] = RequestError

    temperature: Annotated[
        Float,
        RowValue("float32", 0.0, "temperature", highest=1e30),
        FromCheckpoint("temperature", gguf="temp"),
    ] = option(0.0, ge=0.0, allow_inf_nan=False, description="0 is greedy decoding")
    top_k: Annotated[
        Int,
        RowValue("int32", 0, "filter", lowest=0, highest=2**31 - 1),
        FromCheckpoint("top_k", gguf="top_k"),
    ] = option(0, ge=-1, description="keep the k most likely tokens; 0 or -1 keeps all")
    top_p: Annotated[
        Float,
        RowValue("float32", 1.0, "filter"),
        FromCheckpoint("top_p", gguf="top_p"),
    ] = option(
        1.0, gt=0.0, le=1.0, description="keep the most likely tokens of this total probability"
    )
    min_p: Annotated[
        Float,
        RowValue("float32", 0.0, "filter"),
        FromCheckpoint("min_p", gguf="min_p"),
    ] = option(
        0.0, ge=0.0, le=1.0, description="drop tokens below min_p times the highest probability"
    )
    presence_penalty: Annotated[
        Float, RowValue("float32", 0.0, "penalty"), ProcessorOption("penalties", "presence")
    ] = option(
        0.0, ge=-2.0, le=2.0, description="subtracted from the logit of each token in the output"
    )
    frequency_penalty: Annotated[
        Float, RowValue("float32", 0.0, "penalty"), ProcessorOption("penalties", "frequency")
    ] = option(
        0.0,
        ge=-2.0,
        le=2.0,
        description="subtracted from a token's logit once per occurrence in the output",
    )
    repetition_penalty: Annotated[
        Float,
        RowValue("float32", 1.0, "penalty", lowest=1e-30, highest=1e30),
        ProcessorOption("penalties", "repetition"),
        FromCheckpoint("repetition_penalty", gguf="penalty_repeat"),
    ] = option(
        1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="for tokens in prompt or output: a positive logit is divided by this value, a "
        "negative one multiplied by it",
    )


class SamplingParams(RowParams[float, int]):
    """How the tokens of one request are chosen, and when the request ends.

    Fields are checked when the object is made and on every assignment; a wrong field raises
    RequestError. Types are strict: `max_tokens="16"` is refused. None for any field but
    `max_tokens` is the same as leaving the field out. The engine copies the parameters
    when a request is queued, so later changes do not affect a running request.
    """

    max_tokens: Annotated[int | None, FromCheckpoint("max_new_tokens"), HttpName(None)] = Field(
        default=64,
        ge=0,
        description="max number of new tokens, fewer if the context is full before; None: as many "
        "as fit the context and the cache; 0, with prompt_logprobs: the prompt is scored alone",
    )
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="the same seed gives the same samples"
    )
    n: int = Field(default=1, ge=1, le=256, description="completions per prompt")
    best_of: Annotated[int | None, HttpName(None)] = Field(
        default=None,
        ge=1,
        le=256,
        description="number of completions to generate; the n most likely ones are returned",
    )
    stop: Annotated[
        Accepts[str | Sequence[str] | None, tuple[str, ...]], MaxItems(128, chars=4096)
    ] = option((), description="texts that end the completion")
    stop_token_ids: Annotated[Accepts[Sequence[int], tuple[int, ...]], MaxItems(1024)] = option(
        (), description="token ids that end the completion"
    )
    stop_words_ids: Annotated[
        Accepts[Sequence[Sequence[int]], tuple[tuple[int, ...], ...]], MaxItems(128), HttpName(None)
    ] = option((), description="sequences of token ids that end the completion")
    ignore_eos: bool = Field(default=False, description="continue after end-of-sequence tokens")
    include_stop_str_in_output: bool = Field(default=False, description="keep the stop text")
    skip_special_tokens: bool = Field(default=True, description="leave out special tokens")
    logprobs: Annotated[int | None, HttpName(None)] = Field(
        default=None,
        ge=ALL_LOGPROBS,
        le=MAX_LOGPROBS,
        description="return log-probabilities for each new token: of that token and of the N most "
        "likely ones; -1: of the whole vocabulary",
    )
    prompt_logprobs: Annotated[int | None, HttpName(None)] = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="return log-probabilities for each prompt token: of that token and of the N "
        "most likely ones",
    )
    json_schema: Annotated[dict[str, Any] | str | None, HttpName("guided_json")] = Field(
        default=None, description="the output is JSON that follows this schema (a dict or text)"
    )
    json_object: Annotated[bool, HttpName(None)] = Field(
        default=False, description="the output is a JSON object"
    )
    regex: Annotated[str | None, HttpName("guided_regex")] = Field(
        default=None, description="regular expression of the whole output"
    )
    choice: Annotated[
        Accepts[Sequence[str] | None, tuple[str, ...] | None],
        MaxItems(2**17),  # guided_limits.items has a smaller default
        HttpName("guided_choice"),
    ] = option(None, min_length=1, description="the output is one of these texts; None: any output")
    grammar: Annotated[str | None, HttpName("guided_grammar")] = Field(
        default=None, description="the output follows this grammar, written in Lark's notation"
    )

    suppress_repetition_in_generation: Annotated[
        bool, ProcessorOption("penalties", "output_only", uses=False)
    ] = Field(default=False, description="repetition_penalty counts tokens of the output only")
    no_repeat_ngram_size: Annotated[
        int, ProcessorOption("no_repeat_ngram", "size"), FromCheckpoint("no_repeat_ngram_size")
    ] = Field(
        default=0,
        ge=0,
        description="no sequence of N tokens occurs twice in prompt and output; 0: no limit",
    )
    min_tokens: Annotated[int, ProcessorOption("min_tokens", "min_tokens")] = Field(
        default=0, ge=0, description="min number of new tokens before a stop token or stop text"
    )
    logit_bias: Annotated[
        dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]],
        ProcessorOption("logit_bias", "bias"),
        MaxItems(1024),
    ] = Field(default_factory=dict, description="token id -> value added to its logit, -100 to 100")
    allowed_token_ids: Annotated[
        Accepts[Sequence[int] | None, tuple[int, ...] | None],
        ProcessorOption("allowed_token_ids", "token_ids"),
        MaxItems(2**20),
    ] = option(None, min_length=1, description="the only tokens that may be chosen; None: all")
    bad_words: Annotated[
        Accepts[Sequence[str], tuple[Annotated[str, Field(min_length=1)], ...]],
        MaxItems(256, chars=4096),
    ] = option(
        (),
        description="texts whose tokens, at the beginning of a text or after a space, must not "
        "follow one another; the same letters may come from other tokens",
    )
    typical_p: Annotated[
        float, ProcessorOption("typical", "typical_p"), FromCheckpoint("typical_p")
    ] = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="keep the most typical tokens, up to this total probability",
    )
    processors: Annotated[dict[str, dict[str, Any]], MaxItems(64), HttpName(None)] = Field(
        default_factory=dict, description="other logits processors by name, each with its options"
    )

    if not TYPE_CHECKING:  # a type checker derives the keywords from the fields

        def __init__(self, **fields):
            # None leaves a field out, so that a checkpoint's value applies.
            given = {k: v for k, v in fields.items() if v is not None or k == "max_tokens"}
            super().__init__(**given)

    def __setattr__(self, name: str, value: Any) -> None:
        with self._refusing():
            super().__setattr__(name, value)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_and_lists_are_plain(cls, value: object, info: ValidationInfo) -> object:
        name = str(info.field_name)
        if value is None and name != "max_tokens":
            return cls.model_fields[name].get_default(call_default_factory=True)
        if (limit := MAX_ITEMS.get(name)) is not None:
            limit.check(name, value)
        return _plain(value)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop", "stop_words_ids")
    @classmethod
    def _none_is_empty(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if not all(value):
            raise ValueError("no empty value, because it would end every completion at once")
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


def _plain(value: object, levels: int = 4) -> object:
    """Convert NumPy numbers to Python numbers, and lists, ranges, arrays and sets to tuples.

    Other values are returned as they are. A value nested deeper than `levels`, or a range of more
    than a million numbers, is not converted, so that its type is refused: no field has lists of
    more than two levels.
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
"""The fields of SamplingParams that the device holds for each row, with their declarations."""

MAX_ITEMS = declared(SamplingParams, MaxItems)
"""The fields of SamplingParams that take a list or a mapping, with their limits."""

_PENALTIES = tuple((n, one.neutral) for n, one in ROW_VALUES.items() if one.stage == "penalty")


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSampling:
    """The part of a request's SamplingParams that loop and device use, fixed when it is queued."""

    max_tokens: int
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    """The request's own copy, which is never changed. Read the other fields of this record in place
    of the fields of the same subject in `params`.
    """
    stop_token_ids: tuple[int, ...] = ()
    """Every token id that ends the request, with the end-of-sequence ids unless `ignore_eos`."""
    num_logprobs: int | None = None
    """How many top tokens have their log-probabilities returned beside each sampled token; None:
    the request wants no log-probabilities.
    """
    num_prompt_logprobs: int | None = None
    """The same number for the tokens of the prompt."""
    processors: tuple[Any, ...] = ()
    """The row's values for each logits processor it uses (enginebay.contracts.processor.RowValues).
    """
    reads_tokens: bool = False
    """Whether a logits processor or penalty of this request reads all tokens of the row so far."""

    @property
    def min_tokens(self) -> int:
        """Min number of new tokens before a stop token, stop sequence or stop text may end the
        request.
        """
        return self.params.min_tokens

    @property
    def returns_all(self) -> bool:
        """Whether the request wants log-probabilities of the whole vocabulary."""
        return self.num_logprobs is not None and self.num_logprobs > MAX_LOGPROBS

    @property
    def penalises(self) -> bool:
        """Whether the request has a penalty that is not neutral."""
        return True in [getattr(self.params, name) != neutral for name, neutral in _PENALTIES]

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen, after logits processors and penalties."""
        return takes_best(self.params)

    @property
    def variant(self) -> StepVariant:
        """The step variant with the least work that can serve the request."""
        if self.processors or self.penalises:
            return StepVariant.FULL
        is_plain = self.is_greedy and self.num_logprobs is None
        return StepVariant.GREEDY if is_plain else StepVariant.SAMPLE


def takes_best(params: SamplingParams) -> bool:
    """Whether these parameters always choose the most likely token (greedy decoding)."""
    return params.temperature < float(np.finfo(np.float32).tiny) or params.top_k == 1


def as_sampling_params(params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Return SamplingParams for a mapping of its fields; None gives the defaults. RequestError for
    a wrong field or another type.
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
    """One sequence to complete. A prompt with n completions becomes n requests.

    Invariants: `prompt_token_ids` is int32 [tokens] with at least one token; the prompt and, if the
    request generates, one new token fit the engine's context; requests with the same `parent_id`
    (other than "") have the same prompt, so that an engine may compute it once. `key` holds the
    two words of the random key, which is the same for all completions of a prompt; the device folds
    `index` into it.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    sampling: FrozenSampling
    key: tuple[int, int]
    arrival_s: float
    priority: int = 0
    """Used by the priority scheduler: a request with a larger number runs first."""
    parent_id: str = ""
    index: int = 0
    tenant: str = ""
    """Tenant that the request is charged to. Used by schedulers that are fair among tenants."""
    grammar: Grammar | None = None
    """The grammar that the output must follow; None: any output."""
    embeds: Embeds | None = None
    """Embeddings for some positions of the prompt. The token id at each of these positions is the
    vocabulary's size, which is no token.
    """
    cache_salt: str = ""
    """Requests share cached prefixes only with requests that have the same salt."""
    adapter: str = ""
    """Key of the adapter (`enginebay.contracts.adapters`); "": the model alone."""
    pooling: Pooling | None = None
    """How to pool the prompt's hidden states, for a request that wants them instead of tokens; None
    for a request that generates tokens.
    """
    begins_text: bool = False
    """Whether the output is a text of its own, as an answer in a chat is. If not, it continues the
    prompt's text.
    """
    streams: bool = False
    """Whether the caller reads tokens as they are made. This changes no token."""

    @property
    def generates(self) -> bool:
        """Whether the request generates tokens. If not, only its prompt is computed, which may fill
        the whole context.
        """
        return self.pooling is None and self.sampling.max_tokens > 0


def key_of(seed: int) -> tuple[int, int]:
    """Split a seed into the two 32-bit words of a request's random key."""
    return seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF
