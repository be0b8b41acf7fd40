"""vInference: generation over the contiguous engine, as states that can be stored and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from enginebay.compose.composition import make_parts
from enginebay.compose.override import overridden_plan
from enginebay.contracts.model import Model, Weights
from enginebay.contracts.text import Message
from enginebay.errors import RequestError
from enginebay.types import SamplingParams
from enginebay.weights import merge_weights
from enginebay_shared.opening import ModelLike, find_tokenizer, passed_tokenizer
from enginebay_vinference.concurrent import Concurrently, PromptProgress
from enginebay_vinference.inference_config import vInferenceConfig
from enginebay_vinference.inputs import SEQUENCE_DIM_MAPPING, adjust, real_rows, refuse_inputs
from enginebay_vinference.loaded_model import LoadedModel, complete_config, make_loaded_model
from enginebay_vinference.metrics import InferenceMetrics
from enginebay_vinference.partition import StatePlacement
from enginebay_vinference.precompile import vInferencePreCompileConfig
from enginebay_vinference.precompiler import Precompiler
from enginebay_vinference.prompts import (
    PromptText,
    TextOrMessages,
    as_texts,
    is_conversation,
    prompt_token_ids,
    read_states,
)
from enginebay_vinference.requests import RequestMaker, check_seed
from enginebay_vinference.saved import load, save
from enginebay_vinference.state import SampleState, check_key
from enginebay_vinference.state_steps import Function, Programs, Use
from enginebay_vinference.stepping import Stepper, has_cache, is_finished, sampling_columns

Item = TypeVar("Item")
Result = TypeVar("Result")
Given = ParamSpec("Given")


class ClosableGenerator(Generator[Item, None, Result]):
    """A generator that runs in one thread at a time. Another thread that requests the next item
    waits.

    Closing it while a thread computes an item lets that call finish; the thread then receives
    StopIteration, and no further call runs.
    """

    def __init__(self, inner: Generator[Item, None, Result]) -> None:
        self._inner = inner
        self._running = threading.Lock()
        self._is_closed = False

    def send(self, value: None) -> Item:
        return self._run(self._inner.send, value)

    def throw(self, *error: Any) -> Item:
        return self._run(self._inner.throw, *error)

    def close(self) -> None:
        self._is_closed = True
        self._close_if_idle()

    def _run(self, step: Callable[..., Item], *arguments: Any) -> Item:
        try:
            with self._running:
                item = step(*arguments)
            if self._is_closed:
                raise StopIteration
            return item
        finally:
            if self._is_closed:  # another thread may have closed it during the step
                self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Close the inner generator, unless a thread runs it: that thread closes it afterwards."""
        if self._running.acquire(blocking=False):
            try:
                self._inner.close()
            finally:
                self._running.release()


def closable(
    make: Callable[Given, Generator[Item, None, Result]],
) -> Callable[Given, Generator[Item, None, Result]]:
    """Decorate a generator function so that any thread may close its generators."""

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Generator[Item, None, Result]:
        return ClosableGenerator(make(*args, **kwargs))

    return made


class vInference:  # noqa: N801  # the name its users know
    """Generation with one model: a prefill, then chunks of streaming_chunks tokens, as
    SampleStates.

    `model` is a folder, a hub id, "demo", an EngineConfig, a mapping of its fields, or an LLM with
    the contiguous engine, whose weights are then shared. `processor_class` is a transformers
    tokenizer, a processor that has one, or None for the model's own tokenizer. `max_new_tokens`
    applies when `generation_config` is None. `seed` seeds requests without a seed of their own
    (None: random). `input_partition_spec` places token ids and masks on the mesh. All methods are
    thread-safe. `programs` holds the compiled functions; `llm` is the LLM that was passed, or None.
    """

    def __init__(
        self,
        model: ModelLike,
        processor_class: Any,
        generation_config: vInferenceConfig | None = None,
        seed: int | None = None,
        input_partition_spec: PartitionSpec | None = None,
        max_new_tokens: int = 512,
        inference_name: str | None = None,
    ) -> None:
        self._loaded: LoadedModel = make_loaded_model(model)
        self.llm = self._loaded.llm
        plan = self._loaded.plan
        self._processor = processor_class
        self._tokenizer = find_tokenizer(processor_class, plan)
        config = generation_config or vInferenceConfig(max_new_tokens=max_new_tokens)
        self.generation_config = complete_config(config, plan, self._tokenizer)
        self.seed = check_seed(seed)
        self.input_partition_spec = input_partition_spec
        self._name = inference_name or self._loaded.default_name()
        self._metrics: InferenceMetrics | None = None
        rules = self.generation_config.get_partition_rules()
        placement = StatePlacement(self._loaded.engine.parts.placement, rules, input_partition_spec)
        self.programs = Programs(self._loaded.engine, placement)
        assert self.generation_config.pad_token_id is not None, "complete_config sets it"
        self._stepper = Stepper(
            self.programs,
            chunk=self.generation_config.streaming_chunks,
            pad_token_id=self.generation_config.pad_token_id,
        )
        self._precompiler = Precompiler(self._loaded, self.generation_config, self._stepper)
        self._requests = RequestMaker(
            self._loaded, self.generation_config, self._tokenizer, self.seed
        )

    @property
    def SEQUENCE_DIM_MAPPING(self) -> dict[str, int]:
        """The token dimension of each model input."""
        return dict(SEQUENCE_DIM_MAPPING)

    @property
    def inference_name(self) -> str:
        """The name that was passed, or "{model type}-{billions of parameters}B-{date}"."""
        return self._name

    @property
    def metrics(self) -> InferenceMetrics | None:
        """Prometheus metrics; None until enable_metrics() is called."""
        return self._metrics

    @property
    def model(self) -> Model:
        """The model: pure functions, without weights."""
        return self._loaded.plan.model

    @property
    def graphstate(self) -> Weights:
        """The weights by dotted path. Pass a changed subset of them to `generate`."""
        return self._loaded.weights

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was passed, or a passed processor's; else an enginebay Tokenizer."""
        return passed_tokenizer(self._processor, self._tokenizer)

    @property
    def model_prefill_length(self) -> int:
        """Max prompt tokens: max sequence length less max_new_tokens. ValueError below 1."""
        return self._precompiler.max_prefill_length

    @property
    def precompiled(self) -> dict[int, vInferencePreCompileConfig]:
        """The compiled standalone configurations by hash."""
        return self._precompiler.done

    @property
    def num_compilations(self) -> int:
        """Number of programs that this inference's engine has compiled so far."""
        return self._loaded.engine.compilations.count

    def enable_metrics(
        self, registry: Any = None, shared: InferenceMetrics | None = None
    ) -> InferenceMetrics:
        """Start to count prompts and tokens (InferenceMetrics). Later calls return the same
        object.
        """
        if self._metrics is None:
            self._metrics = InferenceMetrics(self._name, registry, shared)
        return self._metrics

    def precompile(self, config: vInferencePreCompileConfig) -> bool:
        """Compile every standalone configuration of `config`, so that generate() compiles nothing.

        Returns True on success, and False for a failure, which is logged and can be retried.
        Compiled configurations are skipped, and concurrent calls for one configuration compile it
        once. UnsupportedError for vision; ValueError for a prefill_length that leaves no room.
        """
        return self._precompiler.precompile(config)

    def adjust_kwargs(
        self, input_ids: Any, attention_mask: Any = None, **model_kwargs: Any
    ) -> tuple[dict[str, Any], vInferencePreCompileConfig]:
        """Return inputs fitted to a compiled configuration, and it; see `inputs.adjust`."""
        return adjust(self._precompiler.fit, input_ids, attention_mask, model_kwargs)

    def init_state(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        sampling_params: SamplingParams | None = None,
        prng_key: jax.Array | None = None,
    ) -> SampleState:
        """Make the state before a batch's prefill, with num_return_sequences rows for each prompt.

        input_ids int [batch, tokens]; attention_mask: 1 on tokens. prng_key: one key, or typed
        keys [rows], one for each row; None derives a key from the seed of sampling_params, or else
        at random.
        """
        inputs, compile_config = self.adjust_kwargs(input_ids, attention_mask)
        compile_config = self._precompiler.resolve(compile_config)
        repeat = self._precompiler.sequences_for(compile_config)
        num_prompts = np.shape(input_ids)[0]
        ids = np.repeat(inputs["input_ids"], repeat, axis=0)
        mask = np.repeat(inputs["attention_mask"], repeat, axis=0)
        params = self._requests.params(sampling_params)
        prompts = list(real_rows(ids[: num_prompts * repeat], mask[: num_prompts * repeat]))
        requests = self._requests.of_tokens(prompts, params)
        shape = self._precompiler.shape_for(compile_config)
        columns = sampling_columns(requests, shape.num_rows, self.generation_config.max_new_tokens)
        key = self._stepper.make_key(self._requests.seed(params)) if prng_key is None else prng_key
        check_key(key, len(prompts))
        return self._stepper.first_state(shape, ids, mask, columns, key, compile_config)

    def execute_prefill(
        self, state: SampleState, *, graphstate: Any = None, graphother: Any = None,
        compile_config: vInferencePreCompileConfig | None = None,
        sampling_params: SamplingParams | None = None, func: Function | None = None,
    ) -> SampleState:  # fmt: skip
        """Process the prompts and sample each row's first token. `state` is spent afterwards.

        graphstate, graphother: weights that replace the model's, see `merge_weights`.
        compile_config: recorded in the state. sampling_params: replace the state's for unfinished
        rows, but its prng_key stays. func: called instead of the compiled function.
        """
        return self._execute(
            "prefill", state, (graphstate, graphother), compile_config, sampling_params, func
        )

    def execute_decode(
        self, state: SampleState, *, graphstate: Any = None, graphother: Any = None,
        compile_config: vInferencePreCompileConfig | None = None,
        sampling_params: SamplingParams | None = None, func: Function | None = None,
    ) -> SampleState:  # fmt: skip
        """Sample up to streaming_chunks more tokens per row; arguments as for execute_prefill()."""
        return self._execute(
            "decode", state, (graphstate, graphother), compile_config, sampling_params, func
        )

    def _execute(
        self, kind: Any, state: SampleState, changes: tuple[Any, Any],
        compile_config: vInferencePreCompileConfig | None, sampling_params: SamplingParams | None,
        func: Function | None,
    ) -> SampleState:  # fmt: skip
        self._stepper.check(state)
        if compile_config is not None:
            state = state.replace(_compile_config=compile_config)
        if sampling_params is not None:
            state = self._stepper.with_sampling(
                state, self._requests.columns(state, self._requests.params(sampling_params))
            )
        return self._stepper.run(kind, state, merge_weights(self._loaded.weights, *changes), func)

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        graphstate: Any = None,
        graphother: Any = None,
        sampling_params: SamplingParams | None = None,
        **model_kwargs: Any,
    ) -> Generator[SampleState, None, SampleState]:
        """Generate for a batch: yield the state after each chunk, and return the last state.

        A yielded state is valid until the next state is requested. Any thread may close the
        generator. Wrong input raises an error before anything runs. `prng_key` is as for
        init_state(); other model_kwargs raise UnsupportedError, because no model uses them.
        """
        key = model_kwargs.pop("prng_key", None)
        refuse_inputs(model_kwargs)
        state = self.init_state(
            input_ids, attention_mask, sampling_params=sampling_params, prng_key=key
        )
        return self._chunks(state, merge_weights(self._loaded.weights, graphstate, graphother))

    def resume(
        self, state: SampleState, *, graphstate: Any = None, graphother: Any = None
    ) -> Generator[SampleState, None, SampleState]:
        """Continue from any state, including a loaded one; yields and returns like generate()."""
        self._stepper.check(state)
        return self._chunks(state, merge_weights(self._loaded.weights, graphstate, graphother))

    @closable
    def _chunks(
        self, state: SampleState, weights: Weights, use: Use | None = None
    ) -> Generator[SampleState, None, SampleState]:
        """Run the prefill if needed, then yield the state after each chunk. Yields a finished
        state once.
        """
        with use or self.programs.use() as held:
            if not has_cache(state):
                state = self._stepper.run("prefill", state, weights, use=held)
            if is_finished(state):
                yield state
            while not is_finished(state):
                state = self._stepper.run("decode", state, weights, use=held)
                yield state
            return state

    def count_tokens(self, messages: str | Sequence[Message], oai_like: bool = False) -> int:  # noqa: FBT001, FBT002
        """Count tokens of a text, or of a conversation after the chat template. `oai_like`: OpenAI
        parts.
        """
        return len(prompt_token_ids(self._tokenizer, messages, oai_like=oai_like))

    def process_prompt(
        self,
        prompt: str | Sequence[str] | Sequence[Message],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        stream: bool = False,  # noqa: FBT001, FBT002  # the documented signature
    ) -> Any:
        """Answer a text or a conversation with a PromptOutput, or with `stream` a generator of
        text that returns the last SampleState. A list of texts returns a list of these, in order.

        TypeError for other types, and for a conversation without a chat template. ValueError for a
        prompt without tokens. A stream raises its errors. The text is the first row's.
        """
        params = self._requests.params(sampling_params)
        if not isinstance(prompt, str) and not is_conversation(prompt):
            return [self.process_prompt(text, params, stream) for text in as_texts(prompt)]
        text, parts = self.start_prompt(prompt, params)
        if stream:
            return parts
        for _ in parts:
            pass
        return text.output()

    def start_prompt(
        self, prompt: Any, params: SamplingParams, is_cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[PromptText, Generator[str, None, SampleState]]:
        """Return a checked prompt's PromptText and text generator, which stops if
        `is_cancelled()`.
        """
        ids = prompt_token_ids(self._tokenizer, prompt)
        if not ids:
            raise RequestError("an empty prompt", "at least one token", "Pass a prompt with text.")
        batch = np.asarray([ids], np.int32)
        state = self.init_state(batch, sampling_params=params.model_copy(update={"stop": ()}))
        mask = np.asarray(state.model_kwargs["attention_mask"])[:1]
        [row] = real_rows(np.asarray(state.sequences)[:1], mask)
        text = PromptText(self._requests.of_text(type(ids)(row), params), self._tokenizer)
        return text, self._text_of(text, state, is_cancelled)

    @closable
    def _text_of(
        self, text: PromptText, state: SampleState, is_cancelled: Callable[[], bool]
    ) -> Generator[str, None, SampleState]:
        weights = self._loaded.weights
        with self.programs.use() as use:
            state = self._stepper.run("prefill", state, weights, use=use)
            rest = () if is_finished(state) else self._chunks(state, weights, use)
            states = itertools.chain([state], rest)
            if self._metrics is None:
                return (yield from read_states(text, states, is_cancelled))
            with self._metrics.prompt() as outputs:
                last = yield from read_states(text, states, is_cancelled)
                outputs.append(text.output())
                return last

    async def process_prompts_concurrently(
        self,
        prompts: Sequence[TextOrMessages],
        max_concurrent_requests: int,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        stream: bool = False,  # noqa: FBT001, FBT002  # the documented signature
        progress_callback: PromptProgress | None = None,
    ) -> Any:
        """Answer many prompts, at most max_concurrent_requests at a time (0 or less: one by one).

        Returns a list of PromptOutput in prompt order; a failed prompt's has an `error`. With
        `stream`: an async generator of (index, "text" | "error" | "final", data). Closing it stops
        all prompts. progress_callback receives (done, all). ValueError for wrong arguments.
        """
        params = self._requests.params(sampling_params)
        together = Concurrently(
            self.start_prompt, params, max_concurrent_requests, progress_callback
        )
        together.check(prompts)
        return together.stream(prompts) if stream else await together.gather(prompts)

    @contextlib.contextmanager
    def override(self, *, check: bool = True, **implementations: Any) -> Iterator[Self]:
        """Use other implementations of ops within the block, as in LLM.override.

        RequestError while generations run. A generation still running at the end of the block
        stops with StoppedError. States may cross the block's borders unchanged.
        """
        loaded, done = self._loaded, self._precompiler.done
        plan = overridden_plan(loaded.plan, implementations, check=check)
        with self.programs.override(make_parts(plan)):
            self._loaded = dataclasses.replace(loaded, plan=plan)
            try:
                yield self
            finally:
                self._loaded = loaded
                self._precompiler.restore(done)

    def save_inference(self, path: str | Path) -> None:
        """Write the configuration and the functions (StableHLO) to a folder, see `saved`.

        RequestError within a block of override().
        """
        self.programs.check_lasting()
        save(self, self.programs, Path(path))

    @classmethod
    def load_inference(cls, path: str | Path, model: ModelLike, processor_class: Any) -> vInference:
        """Load an inference from a folder that save_inference() wrote, ready to generate with
        `model`.

        InputError, before anything runs, for a folder that is damaged or of another model.
        """
        saved = load(Path(path))
        inference = cls(
            model, processor_class, saved.generation_config, seed=saved.seed,
            input_partition_spec=saved.input_partition_spec, inference_name=saved.inference_name,
        )  # fmt: skip
        saved.install(inference.programs, inference._precompiler.make_ready)
        return inference
