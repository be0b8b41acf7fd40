"""InstalledModel: a model in an engine, from its installation to its release."""

from __future__ import annotations

import functools
import logging
import threading
import time
import uuid
from collections.abc import Sequence

from enginebay.adapters import required
from enginebay.compose.composition import build
from enginebay.compose.plan import Plan
from enginebay.llm.abilities import Abilities
from enginebay.llm.events import Events
from enginebay.llm.prepare import Prepared, Preparer
from enginebay.llm.prompts import Prompt
from enginebay.llm.requests import Requests, with_id
from enginebay.text import Tokenizer
from enginebay.types import SamplingParams
from enginebay_dashinfer.feeder import QueueFeeder
from enginebay_dashinfer.planning import plan_model
from enginebay_dashinfer.result_queue import ResultQueue
from enginebay_dashinfer.runtime_config import AsModelConfig
from enginebay_dashinfer.sampling import GenerationChoices
from enginebay_dashinfer.statistics import StepCounters
from enginebay_dashinfer.statuses import AsStatus, ModelState, RefusedError
from enginebay_esurge.service import Service

log = logging.getLogger("enginebay.dashinfer")


class Loaded:
    """What a model has while it is in memory: the service over its engine, and its requests."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, counters: StepCounters) -> None:
        """Load the weights, allocate the cache, and compile all programs."""
        parts = build(plan)
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
            _check_room(config.max_model_len, self.preparer.max_cached)
        except BaseException:
            parts.engine.close()
            raise
        self.service = Service(parts, drops_cache=False)
        self.service.audience.add(counters)
        self.requests = Requests(tokenizer, self.service)

    def close(self) -> None:
        """End the threads, and free the weights and the cache."""
        self.service.stop()
        self.preparer.close()
        self.service.parts.engine.close()


class InstalledModel:
    """A model of an engine. `state` changes under `lock`; requests may come from any thread."""

    def __init__(self, settings: AsModelConfig) -> None:
        """Choose the parts of the model. Errors as in `planning.plan_model`."""
        self.settings = settings
        self.plan = plan_model(settings)
        self.tokenizer: Tokenizer = self.plan.checkpoint.load_tokenizer()
        self.counters = StepCounters()
        self.lock = threading.RLock()
        self.state = ModelState.INITIAL
        self._loaded: Loaded | None = None
        self._feeder: QueueFeeder | None = None

    @property
    def loaded(self) -> Loaded | None:
        """What the model has in memory; None before the first start and after unload()."""
        return self._loaded

    def start(self) -> None:
        """Initial or stopped -> running. Loads and warms up the model if it is not in memory."""
        with self.lock:
            self._require("start_model", ModelState.INITIAL, ModelState.STOPPED)
            self.load()
            assert self._loaded is not None, "load() sets it"
            self._loaded.service.start()
            self._feeder = QueueFeeder(self.settings.model_name)
            try:
                if self.state is ModelState.INITIAL:
                    self._run_fake_requests()
            except BaseException:
                self._halt()
                raise
            self.state = ModelState.RUNNING

    def stop(self) -> None:
        """Running -> stopped. Requests under way are interrupted; their queues stay readable."""
        with self.lock:
            self._require("stop_model", ModelState.RUNNING)
            self._halt()
            self.state = ModelState.STOPPED

    def release(self) -> None:
        """Initial or stopped -> released. Frees everything."""
        with self.lock:
            self.require_idle("release_model")
            self.unload()
            self.state = ModelState.RELEASED

    def close(self) -> None:
        """Any state -> released: stop and release the model."""
        with self.lock:
            if self.state is ModelState.RUNNING:
                self.stop()
            if self.state is not ModelState.RELEASED:
                self.release()

    def load(self) -> None:
        """Load the model into memory, if it is not there. Nothing stays allocated on an error."""
        with self.lock:
            if self._loaded is None:
                self._loaded = Loaded(self.plan, self.tokenizer, self.counters)

    def unload(self) -> None:
        """Free the weights and the cache of a model that does not run."""
        with self.lock:
            self.require_idle("unload_device_mem")
            loaded, self._loaded = self._loaded, None
            if loaded is not None:
                loaded.close()

    def submit(
        self, prompts: Sequence[Prompt], generations: Sequence[GenerationChoices]
    ) -> list[tuple[str, ResultQueue]]:
        """Queue all prompts or none; returns the id and the queue of each."""
        with self.lock:
            self.require_running("a request")
            assert self._loaded is not None, "a running model is loaded"
            assert self._feeder is not None, "a running model has a feeder"
            return _submit(self._loaded, self._feeder, prompts, generations)

    def require_running(self, call: str) -> None:
        """Raise RefusedError unless the model runs."""
        if self.state is ModelState.STOPPED:
            self._refuse(AsStatus.ALLSPARK_REQUEST_DENIED, call, "a running model")
        self._require(call, ModelState.RUNNING)

    def require_idle(self, call: str) -> None:
        """Raise RefusedError unless the model is initial or stopped."""
        self._require(call, ModelState.INITIAL, ModelState.STOPPED)

    def load_adapter(self, name: str, folder: str) -> None:
        """Read an adapter, for requests with lora_name = `name`."""
        required(self.plan.adapters, f"load_lora({name!r})").load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no request uses."""
        adapters = required(self.plan.adapters, f"unload_lora({name!r})")
        with self.lock:
            loaded = self._loaded
            if loaded is None:
                adapters.unload(name, ())
                return
            service = loaded.service
            service.call(lambda: adapters.unload(name, service.adapters_in_use))

    def abort(self, request_id: str) -> None:
        """End a request; an ended one is ignored."""
        loaded = self._loaded
        if loaded is not None:
            loaded.requests.abort(request_id)

    def _halt(self) -> None:
        """End the threads of a model that runs or begins to run."""
        assert self._loaded is not None, "it was started"
        feeder, self._feeder = self._feeder, None
        self._loaded.service.stop()
        if feeder is not None:
            feeder.close()

    def _run_fake_requests(self) -> None:
        """Run a request of the max length and as many short ones as fit beside it, so that every
        buffer that requests need was allocated once.
        """
        loaded, feeder, began_s = self._loaded, self._feeder, time.monotonic()
        assert loaded is not None, "a started model is loaded"
        assert feeder is not None, "a started model has a feeder"
        longest = self.plan.config.max_model_len or 2
        salt = uuid.uuid4().hex
        params = SamplingParams(max_tokens=2, temperature=1.0, seed=0, ignore_eos=True)
        first = GenerationChoices(params.model_copy(update={"max_tokens": 1}), None, None, None)
        others = [GenerationChoices(params, None, None, None)] * (self.plan.config.max_num_seqs - 1)
        prompts: list[Prompt] = [[0] * (longest - 1), *([0] for _ in others)]
        made = _submit(loaded, feeder, prompts, [first, *others], salt=salt)
        for _, results in made:
            results.wait()
            if results.error is not None:
                raise results.error
        loaded.service.call(loaded.service.parts.engine.ledger.forget)
        self.counters.reset()
        log.info("warmed up %s in %.1f s", self.settings.model_name, time.monotonic() - began_s)

    def _require(self, call: str, *states: ModelState) -> None:
        if self.state not in states:
            allowed = " or ".join(f"a model that is {one.value}" for one in states)
            self._refuse(AsStatus.ALLSPARK_INVALID_CALL_ERROR, call, allowed)

    def _refuse(self, status: AsStatus, call: str, allowed: str) -> None:
        name = self.settings.model_name
        raise RefusedError(
            status,
            f"{call} for model {name!r}, which is {self.state.value}",
            allowed,
            "docs/dashinfer.md shows the states of a model.",
        )


def _submit(
    loaded: Loaded,
    feeder: QueueFeeder,
    prompts: Sequence[Prompt],
    generations: Sequence[GenerationChoices],
    *,
    salt: str | None = None,
) -> list[tuple[str, ResultQueue]]:
    prepared: list[Prepared] = []
    for prompt, one in zip(prompts, generations, strict=True):
        made = loaded.preparer.prepare_one(prompt, one.params, lora=one.lora, cache_salt=salt)
        prepared += [with_id(each, uuid.uuid4().hex) for each in made]
    queues = [
        ResultQueue(len(each.prompt_token_ids), one.num_logprobs)
        for each, one in zip(prepared, generations, strict=True)
    ]
    pairs = [(each.request_id, one) for each, one in zip(prepared, queues, strict=True)]

    def queue_all(events: Events) -> None:
        submitted = loaded.requests.submit(prepared, events, streams=True)
        for (_, results), one in zip(pairs, submitted, strict=True):
            results.reader = one.readers[0]

    feeder.add(dict(pairs), queue_all)
    return pairs


def _check_room(max_model_len: int, max_cached: int | None) -> None:
    """Raise RefusedError unless the cache holds a request of the max length."""
    if max_cached is not None and max_cached < max_model_len:
        raise RefusedError(
            AsStatus.ALLSPARK_CACHE_MEMORY_OUT,
            f"a cache with room for {max_cached} tokens of a request",
            f"room for max_length, {max_model_len} tokens",
            "Free memory, raise BFC_MEM_RATIO, or lower max_length.",
        )
