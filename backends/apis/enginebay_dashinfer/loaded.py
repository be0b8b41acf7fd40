"""Loaded: an installed model while it is in memory, and its warm-up."""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Sequence

from enginebay.compose.composition import build
from enginebay.compose.plan import Plan
from enginebay.contracts.text import Tokenizer
from enginebay.serving.abilities import Abilities
from enginebay.serving.prepare import Preparer
from enginebay.serving.prompts import Prompt
from enginebay.serving.requests import Completion, Requests, with_id
from enginebay.types import SamplingParams
from enginebay_dashinfer.feeder import QueueFeeder
from enginebay_dashinfer.memory import ModelMemory
from enginebay_dashinfer.result_queue import ResultQueue
from enginebay_dashinfer.sampling import GenerationChoices
from enginebay_dashinfer.statistics import StepCounters
from enginebay_esurge.service import Service

log = logging.getLogger("enginebay.dashinfer")


class Loaded:
    """What a model has while it is in memory: the service over its engine, and its requests."""

    def __init__(
        self, plan: Plan, tokenizer: Tokenizer, counters: StepCounters, memory: ModelMemory
    ) -> None:
        """Load the weights, allocate the cache, and compile all programs. RefusedError when the
        model does not fit beside the other models in `memory`.
        """
        self.plan = plan
        self._memory = memory
        with memory.taking(self, plan) as sized:
            parts = build(sized)
        config = plan.config
        assert config.max_model_len is not None, "make_plan settles max_model_len"
        try:
            parts.engine.warmup(functools.partial(log.debug, "compiled %d of %d: %s"))
            self.preparer = Preparer(
                tokenizer,
                plan.checkpoint.token_info,
                plan.model.info.vocab_size,
                config.max_model_len,
                abilities=Abilities.of(plan),
                seed=config.seed,
            )
            self.preparer.max_cached = parts.engine.ledger.max_tokens
        except BaseException:
            parts.engine.close()
            memory.release(self)
            raise
        self.service = Service(parts, drops_cache=False)
        self.service.audience.add(counters)
        self.requests = Requests(tokenizer, self.service)

    def close(self) -> None:
        """End the threads, and free the weights and the cache."""
        self.service.stop()
        self.preparer.close()
        self.service.parts.engine.close()
        self._memory.release(self)

    def submit(
        self,
        feeder: QueueFeeder,
        prompts: Sequence[Prompt],
        generations: Sequence[GenerationChoices],
        *,
        salt: str | None = None,
    ) -> list[tuple[str, ResultQueue]]:
        """Queue all prompts or none. Each request has a result queue, which `feeder` fills; returns
        the id and the result queue of each. Only requests with the same `salt` share prefixes.
        """
        prepared: list[Completion] = []
        for prompt, one in zip(prompts, generations, strict=True):
            made = self.preparer.prepare_one(prompt, one.params, lora=one.lora, cache_salt=salt)
            prepared += [with_id(each, uuid.uuid4().hex) for each in made]
        queues = [
            ResultQueue(len(each.prompt_token_ids), one.num_logprobs, each.requests[0].arrival_s)
            for each, one in zip(prepared, generations, strict=True)
        ]
        pairs = [(each.request_id, one) for each, one in zip(prepared, queues, strict=True)]

        def queue_all(events: QueueFeeder) -> None:
            submitted = self.requests.submit(prepared, events, streams=True)
            for (_, results), one in zip(pairs, submitted, strict=True):
                results.reader = one.readers[0]

        feeder.add(dict(pairs), queue_all)
        return pairs


def warm_up(loaded: Loaded, feeder: QueueFeeder) -> None:
    """Run a request of the max length, and then a full batch whose requests grow to it, so that
    every buffer that requests need was allocated once. The batch shares the cached prefix of the
    first request; without a cache of prefixes its prompts are short.
    """
    config, began_s = loaded.plan.config, time.monotonic()
    assert config.max_model_len is not None, "make_plan settles max_model_len"
    longest, num_rows, options = config.max_model_len, config.max_num_seqs, config.engine.options
    # Each row computes one page of its prompt at most. The first row runs until the last begins.
    num_prefills = -(-num_rows * options["page_size"] // config.max_num_batched_tokens)
    num_new = min(longest - 1, 2 + config.decode_steps * num_prefills)
    num_shared = longest - num_new if options["enable_prefix_caching"] else 1
    salt = uuid.uuid4().hex
    for num_prompt, num_tokens, count in ((longest - 1, 1, 1), (num_shared, num_new, num_rows)):
        params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=0, ignore_eos=True)
        choices = [GenerationChoices(params, None, None, None)] * count
        for _, results in loaded.submit(feeder, [[0] * num_prompt] * count, choices, salt=salt):
            results.wait()
            if results.error is not None:
                raise results.error
    loaded.service.call(loaded.service.parts.engine.ledger.forget)
    log.info("warmed up %s in %.1f s", config.model, time.monotonic() - began_s)
