"""ModelIOProcessor: converts a plan to the arrays of a step, and a step's output to tokens,
finished requests and the next tasks.
"""

from __future__ import annotations

import numpy as np

from enginebay.contracts.engine import RowPlan
from enginebay.errors import InputError
from enginebay.types import (
    MAX_STOP_TOKENS,
    NOT_FINITE,
    FinishReason,
    Request,
    SamplingParams,
    key_of,
)
from enginebay_oengine.active_batch import ActiveRequest, ActiveSequenceBatch
from enginebay_oengine.continuous_forward import ModelInputBatch, ModelOutputBatch
from enginebay_oengine.inference_scheduler import InferenceScheduler
from enginebay_oengine.iteration import (
    GenerationStepTask,
    InitialSequenceRequest,
    IterationResult,
    NextIterationPlan,
    SampledToken,
)
from enginebay_oengine.paged_cache import PagedAttentionCacheMetaData
from enginebay_oengine.prompts import make_request
from enginebay_paged.page_steps import (
    POOL,
    DecodePart,
    PrefillPart,
    PromptChunk,
    decode_part,
    prefill_part,
)


class ModelIOProcessor:
    """Conversion between the host's records and the device's arrays, for `oEngine.forward`."""

    @staticmethod
    def build_input(
        iteration_plan: NextIterationPlan,
        metadata: PagedAttentionCacheMetaData,
        decodes_state: ActiveSequenceBatch,
    ) -> ModelInputBatch:
        """Return the arrays of a plan. InputError (a ValueError) for a plan of another cache or
        state.
        """
        if decodes_state.manager.metadata is not metadata:
            raise InputError(
                "a state of another cache",
                "a state of this engine",
                "Call init_decode_state() of this engine.",
            )
        return ModelInputBatch(
            _prefill(iteration_plan, decodes_state), _decode(iteration_plan, decodes_state)
        )

    @staticmethod
    def prepare_model_output(
        output: ModelOutputBatch,
        iteration_plan: NextIterationPlan,
        decodes_state: ActiveSequenceBatch,
        scheduler: InferenceScheduler,
    ) -> IterationResult:
        """Wait for a plan's step, and record its results. Call it once per step, before the next
        plan is made.

        Finished sequences release slot and pages. Sequences whose prompt is processed are queued to
        decode.
        """
        tokens: list[SampledToken] = []
        with decodes_state.context_lock:
            if iteration_plan.schedule_decodes:
                _note_decodes(output, iteration_plan, decodes_state, tokens)
            active = _note_prefill(output, iteration_plan, decodes_state, scheduler, tokens)
        return IterationResult(tuple(tokens), active)


def _request_of(request: InitialSequenceRequest, state: ActiveSequenceBatch) -> Request:
    """The core's Request, which says how the row is sampled."""
    ends = () if request.ignore_eos else state.sizes.eos_token_ids
    stops = tuple(dict.fromkeys((*ends, *request.stop_token_ids)))
    if len(stops) > MAX_STOP_TOKENS:
        allowed = f"at most {MAX_STOP_TOKENS}, end-of-sequence tokens included"
        raise InputError(f"{len(stops)} stop tokens", allowed, "Pass fewer stop_token_ids.")
    params = SamplingParams(
        temperature=request.temperature, top_p=request.top_p, top_k=request.top_k
    )
    most = state.sizes.max_length
    if request.max_tokens is not None:
        most = min(request.num_prompt_tokens + request.max_tokens, most)
    prompt = np.asarray(request.token_ids)
    return make_request(prompt, params, most, stops, key_of(request.seed or 0))


def _prefill(plan: NextIterationPlan, state: ActiveSequenceBatch) -> PrefillPart | None:
    request = plan.prefill_request
    if request is None:
        return None
    if request.slot is None or request.lease is None:
        raise InputError(
            f"request {request.id!r}, which has no slot",
            "a plan of create_plan()",
            "Call enqueue_prefill_request() first.",
        )
    start, end = request.num_computed, request.num_computed + plan.num_prefill_tokens
    samples = end == request.num_tokens
    row = RowPlan(request.slot, request.lease, start, end - start, samples)
    chunk = PromptChunk(row, request.tokens()[start:end], _request_of(request, state))
    return prefill_part([chunk], state.sizes.geometry, state.sizes.num_rows)


def _decode(plan: NextIterationPlan, state: ActiveSequenceBatch) -> DecodePart | None:
    pages: dict[int, tuple[int, ...]] = {}
    longest = 0
    with state.context_lock:
        for slot in plan.decode_slots:
            active = state.active_slot_requests_map.get(slot)
            if active is None or active.lease is None:
                raise InputError(
                    f"a plan that decodes slot {slot}, which is free",
                    "slots with a sequence",
                    "Make a new plan with create_plan().",
                )
            pages[slot] = active.lease.pages[POOL]
            longest = max(longest, active.length)
    if not pages:
        return None
    return decode_part(pages, longest, state.sizes.geometry, state.sizes.num_rows)


def _note_decodes(
    output: ModelOutputBatch,
    plan: NextIterationPlan,
    state: ActiveSequenceBatch,
    into: list[SampledToken],
) -> None:
    tokens, complete = np.asarray(output.decodes_token_id), np.asarray(output.decodes_complete)
    for slot in plan.decode_slots:
        active = state.active_slot_requests_map.get(slot)
        token = int(tokens[slot])
        if active is None or active.lease is None:
            continue  # the slot was freed since
        if token < 0 and token != NOT_FINITE:  # the inserted prefix had ended already
            state.vacate(slot)
            continue
        into.append(_note_token(active, slot, token, state, is_complete=bool(complete[slot])))


def _note_token(
    active: ActiveRequest, slot: int, token: int, state: ActiveSequenceBatch, *, is_complete: bool
) -> SampledToken:
    """Record one more token of a sequence. A finished sequence releases its slot and pages; so does
    one whose logits were not finite (NOT_FINITE), which has no token to record.
    """
    assert active.lease is not None, "a sequence that got a token has pages"
    position = active.length
    if token == NOT_FINITE:
        state.vacate(slot)
        return SampledToken(active.id, slot, -1, position, "error")
    state.manager.commit(active.lease, active.length)
    active.length += 1
    if active.request is not None:
        active.request.generated.append(token)
    reason: FinishReason | None = None
    if is_complete:
        stops = state.sizes.eos_token_ids
        if active.request is not None:
            stops = _request_of(active.request, state).sampling.stop_token_ids
        reason = "stop" if token in stops else "length"
        state.vacate(slot)
    return SampledToken(active.id, slot, token, position, reason)


def _note_prefill(
    output: ModelOutputBatch,
    plan: NextIterationPlan,
    state: ActiveSequenceBatch,
    scheduler: InferenceScheduler,
    into: list[SampledToken],
) -> InitialSequenceRequest | None:
    request = plan.prefill_request
    if request is None or request.slot is None:
        return None
    active = state.active_slot_requests_map.get(request.slot)
    if active is None or active.request is not request:
        return None  # the slot was freed since
    request.num_computed += plan.num_prefill_tokens
    assert active.lease is not None, "a prompt that is being processed has pages"
    if not request.is_prefilled:
        state.manager.commit(active.lease, request.num_computed)
        return request
    token, slot = int(np.asarray(output.prefill_token_id)[0]), request.slot
    sampled = _note_token(
        active, slot, token, state, is_complete=bool(np.asarray(output.prefill_complete)[0])
    )
    into.append(sampled)
    if sampled.finish_reason is None:
        task = GenerationStepTask(
            request.id, slot, sampled.position, active.lease.pages[POOL], token
        )
        scheduler.enqueue_decodes_request(task)
    return None
