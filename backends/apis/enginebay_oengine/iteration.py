"""Records of one iteration: waiting and running requests, and the scheduler's plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from enginebay.contracts.cache import Lease
from enginebay.errors import InputError
from enginebay.types import MAX_STOP_TOKENS, FinishReason, SamplingParams

NONE_IS_DEFAULT = ("temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos")
"""Fields of InitialSequenceRequest for which None is the default."""


@dataclasses.dataclass(slots=True, eq=False)
class InitialSequenceRequest:
    """A prompt to complete with at most `max_tokens` new tokens, up to a stop token.

    The engine's end-of-sequence tokens are stop tokens as well, unless `ignore_eos`. Equal seeds
    give equal samples; None lets the scheduler choose a seed. max_tokens None: as many as fit. None
    for another field is its default. InputError (a ValueError) for a wrong value.
    """

    id: str
    token_ids: Sequence[int] | np.ndarray
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = 64
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    generated: list[int] = dataclasses.field(default_factory=list, init=False)
    """The tokens sampled so far."""
    num_computed: int = dataclasses.field(default=0, init=False)
    """Tokens whose keys and values are in the pages."""
    slot: int | None = dataclasses.field(default=None, init=False)
    lease: Lease | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None and field.name in NONE_IS_DEFAULT:
                setattr(self, field.name, field.default)
        given = np.asarray(self.token_ids)
        if given.ndim != 1 or not len(given) or not np.issubdtype(given.dtype, np.integer):
            raise InputError(
                f"a prompt {given.dtype}{list(given.shape)}",
                "integers [tokens], at least one",
                "Pass the token ids of one prompt.",
            )
        self.token_ids = given.astype(np.int32)
        SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            seed=self.seed,
        )
        if self.max_tokens == 0:
            raise InputError("max_tokens = 0", "at least 1", "Use LLM to score a prompt alone.")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InputError(
                f"{len(self.stop_token_ids)} stop tokens",
                f"at most {MAX_STOP_TOKENS}",
                "Pass fewer stop_token_ids.",
            )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, all of which are processed before the next one is
        sampled.
        """
        return len(self.token_ids) + len(self.generated)

    @property
    def is_prefilled(self) -> bool:
        """Whether all of these tokens are processed."""
        return self.num_computed >= self.num_tokens

    def tokens(self) -> np.ndarray:
        """Return the tokens of prompt and output, int32 [num_tokens]."""
        return np.concatenate([self.token_ids, np.asarray(self.generated, np.int32)]).astype(
            np.int32
        )

    def restart(self) -> None:
        """Prepare to wait again. Sampled tokens are kept, and processed later like a part of the
        prompt.
        """
        self.num_computed, self.slot, self.lease = 0, None, None


@dataclasses.dataclass(frozen=True, slots=True)
class AllocatedPrefillPages:
    """The slot and the pages that a prompt received when it left the queue."""

    request_id: str
    slot: int
    page_indices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SlotPageAssignment:
    """Page `page_idx` of a slot's sequence is page `mapped_idx` of the cache from now on."""

    slot: int
    page_idx: int
    mapped_idx: int


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationStepTask:
    """A sequence whose prompt is processed and which decodes from now on. Its first new token is at
    `position`.
    """

    id: str
    slot: int
    position: int
    page_indices: tuple[int, ...]
    prefill_token_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class NextIterationPlan:
    """The work of one call of `oEngine.forward`.

    prefill_request: with schedule_prefill, the prompt whose next `num_prefill_tokens` tokens are
    processed. prefill_pages_update: its pages, if it is new. new_decodes_requests: sequences that
    decode from this iteration on. decodes_state_page_updates: pages added to slots, including
    copies of shared pages. decode_slots: with schedule_decodes, the slots that get a token; slots
    that wait for pages are left out. preempted: ids of requests that released their pages and will
    be processed again.
    """

    prefill_request: InitialSequenceRequest | None
    schedule_prefill: bool
    schedule_decodes: bool
    prefill_pages_update: AllocatedPrefillPages | None
    new_decodes_requests: tuple[GenerationStepTask, ...]
    decodes_state_page_updates: tuple[SlotPageAssignment, ...]
    num_prefill_tokens: int = 0
    decode_slots: tuple[int, ...] = ()
    preempted: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that an iteration sampled for a request; `finish_reason` is None while the request
    continues. With the reason "error" there is no token (-1): the logits had NaN or infinity.
    """

    id: str
    slot: int
    token_id: int
    position: int
    finish_reason: FinishReason | None


@dataclasses.dataclass(frozen=True, slots=True)
class IterationResult:
    """The tokens of an iteration, and the partly processed prompt, which the next plan
    continues.
    """

    tokens: tuple[SampledToken, ...]
    active_prefill: InitialSequenceRequest | None
