"""LLM: load a model, then generate, stream and chat, from threads or with asyncio."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from enginebay.compose.composition import Composed, Progress, build, make_plan
from enginebay.compose.override_block import overridden
from enginebay.compose.plan import Plan, make_title
from enginebay.config import EngineConfig, make_config
from enginebay.contracts.adapters import required
from enginebay.contracts.engine import Engine, LaterCompilation
from enginebay.contracts.text import Tokenizer
from enginebay.errors import ConfigError, RequestError, StoppedError
from enginebay.outputs import RequestOutput
from enginebay.serving.abilities import Abilities
from enginebay.serving.arguments import argument_lines, check_keywords, checks_keywords
from enginebay.serving.events import AsyncEvents, Events
from enginebay.serving.loop import EngineLoop
from enginebay.serving.prepare import Param, Params, Preparer, check_streamable
from enginebay.serving.priority import (
    BatchKeywords,
    ChatKeywords,
    RequestKeywords,
    split_chat_keywords,
)
from enginebay.serving.prompts import Prompt, Prompts, prompts_of
from enginebay.serving.reading import AsyncStream, Stream, in_thread, output_in, pooled_of
from enginebay.serving.requests import Completion, Counts, RequestHandle, Requests, with_id
from enginebay.toml_file import read_settings
from enginebay.types import Pooling, as_sampling_params
from enginebay.waits import waiting

if TYPE_CHECKING:
    from enginebay.keywords import EngineChoices

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded into an engine that runs on a thread of its own. Use it in a `with` block, or
    call close() at the end.

        with LLM("demo", engine="oengine", max_model_len=256) as llm:
            [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=16))
            print(output.outputs[0].text)

    generate, chat and embed return whole results, stream and chat_stream pieces as they come; the
    same with an `a` before the name is for asyncio. Methods may be called from several threads at
    the same time: the engine batches all their requests together.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **choices: Unpack[EngineChoices],
    ) -> None:
        """Load `model`, with options of EngineConfig as keywords, or as a whole `config`.

        Raises ConfigError for an option that is unknown or has a wrong value, CheckpointError for a
        model that cannot be loaded, and UnsupportedError for a plugin that cannot run this model or
        on this machine.
        """
        named = dict(choices) if model is None else {"model": model, **choices}
        if config is not None and named:
            given = f"config and {', '.join(named)}"
            raise ConfigError(given, "one of the two", "Set these options in the config.")
        self._parts: Composed = build(make_plan(config or make_config(named)), progress)
        plan = self._parts.plan
        self.config = plan.config
        self.tokenizer: Tokenizer = plan.checkpoint.load_tokenizer()
        self.tokenizer.limit_templates(plan.config.template_limits)
        self.tokenizer.read_special_tokens(plan.config.special_tokens_in_text)
        assert plan.config.max_model_len is not None, "make_plan settles max_model_len"
        self._preparer = Preparer(
            self.tokenizer,
            plan.checkpoint.token_info,
            plan.model.info.vocab_size,
            plan.config.max_model_len,
            abilities=Abilities.of(plan),
            seed=plan.config.seed,
        )
        self._preparer.max_cached = self._parts.engine.ledger.max_tokens
        self._loop = EngineLoop(
            self._parts.engine, self._parts.scheduler, plan.config, self._parts.proposer
        )
        self._requests = Requests(self.tokenizer, self._loop)
        self._is_closing = threading.Event()
        self.later_compilation: LaterCompilation | None = None
        """What `warmup(background=True)` compiles beside the requests; None without such a call."""
        # Runs also when close() is never called, and at exit: the thread must not outlive JAX.
        weakref.finalize(self, self._loop.close)

    @classmethod
    def from_config(cls, path: str | Path, **choices: Unpack[EngineChoices]) -> LLM:
        """Load the model that a TOML file configures; keywords replace options of the file."""
        return cls(config=make_config(read_settings(path), choices))

    def __repr__(self) -> str:
        config = self.config
        parts = (
            f"engine={config.engine.name!r}, platform={config.platform!r}, dtype={config.dtype!r}"
        )
        return f"LLM({config.model!r}, {parts}, max_model_len={config.max_model_len})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End running requests with StoppedError, end all threads and worker processes, and free
        the engine's memory. A second call does nothing. A thread that hangs is left behind after
        two minutes (enginebay.waits), with the memory that it uses.
        """
        self._is_closing.set()
        if self.later_compilation is not None:
            self.later_compilation.stop()
        if self._loop.close():
            self._parts.engine.close()
        self._preparer.close()

    @property
    def plan(self) -> Plan:
        """The plan: every plugin that was chosen, and the reason for each choice."""
        return self._parts.plan

    @property
    def engine(self) -> Engine:
        """The engine. Only the engine's thread may call its methods (see `run_on_engine`)."""
        return self._parts.engine

    @property
    def loop(self) -> EngineLoop:
        """The loop that drives the engine. `loop.observers.add` adds an Observer of its steps."""
        return self._loop

    def run_on_engine(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread between two steps, and return its result."""
        return self._loop.call(function)

    def warmup(self, progress: Progress | None = None, *, background: bool = False) -> int:
        """Compile every program that serving needs, and return their number. After that, with
        `forbid_compiling`, the engine compiles no other program.

        With `background`, return when a few programs can run every request, and compile the others
        on a thread beside the requests (`later_compilation`). Until then some steps run in a larger
        program or in several parts, with the same tokens. `progress` counts all programs. Returns
        the number of the programs that are compiled.

        When a call is interrupted, or close() is called, the remaining programs are not compiled;
        the engine compiles each of them when a request first needs it.
        """
        is_interrupted, has_returned = threading.Event(), threading.Event()
        title = make_title(self._parts.plan)

        engine = self._parts.engine

        def report(done: int, total: int, what: str) -> None:
            is_ending = is_interrupted.is_set() or self._is_closing.is_set()
            if is_ending and not has_returned.is_set():
                raise StoppedError("warmup() was interrupted")
            if progress is not None:
                progress(f"compiling {title}", done, total)

        def compile_all() -> int:
            if background:
                with waiting(f"compiling the first steps of {title}"):
                    self.later_compilation = engine.begin_warmup(report)
                count = engine.compilations.count
            else:
                with waiting(f"compiling every step of {title}"):
                    count = engine.warmup(report)
            engine.compilations.forbidden = self.config.forbid_compiling
            return count

        try:
            count = int(self._loop.call(compile_all))
        except BaseException:
            is_interrupted.set()
            raise
        has_returned.set()
        if self.later_compilation is not None:
            self.later_compilation.start()
        return count

    @contextlib.contextmanager
    def override(self, *, check: bool = True, **implementations: Any) -> Iterator[Self]:
        """Run all steps inside the `with` block with other implementations of ops.

        Keywords of `implementations` are names of ops, including ops of plugins:
        `override(attention=my_attention, rms_norm="pallas")`. Each value is an implementation
        object, a registered name, or an import path. `attention` also accepts a function in the
        simple form (enginebay.compose.simple_attention), or a dict {phase: implementation}.
        `sampler=` swaps the sampler.

        Each implementation must pass a quick correctness check, unless `check` is False; one that
        fails raises IncorrectError. Raises RequestError when requests are running or waiting at the
        start of the block. Requests that have not ended when the block ends get StoppedError. After
        the block the former programs are used again, without compiling. Blocks may be nested.
        """
        before = self._parts
        with overridden(before, self._loop, implementations, check=check) as self._parts:
            try:
                yield self
            finally:
                self._parts = before

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Read a LoRA adapter in the format of PEFT, for requests with lora=name (docs/lora.md)."""
        required(self.plan.adapters, f"load_adapter({name!r})").load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. RequestError while an unfinished request uses it."""
        adapters = required(self.plan.adapters, f"unload_adapter({name!r})")
        self._loop.call(lambda: adapters.unload(name, self._loop.adapters_in_use))

    def shadow_report(self) -> Any:
        """The comparisons that shadow mode has made so far (enginebay.shadow_report); None
        when shadow mode is off, and inside an override() block.
        """
        return self._loop.call(lambda: self._parts.engine.shadow_report)

    def generate(
        self,
        prompts: Prompts | None = None,
        params: Params = None,
        *,
        prompt_embeds: Any = None,
        progress: Progress | None = None,
        **turns: Unpack[BatchKeywords],
    ) -> list[RequestOutput]:
        """Complete prompts, and return one RequestOutput per prompt, in order.

        `prompts` is a text, a list of token ids, Segments, or a list of any of these. `params` is
        one SamplingParams (or dict) for all prompts, or a list with one per prompt.

        `prompt_embeds` replaces `prompts`: an array [tokens, hidden_size] of embeddings used in
        place of token embeddings, a list of segments of one prompt (arrays and lists of token ids),
        or a list of such lists, one per prompt.

        Each of `turns` is one value for all prompts, or a list with one per prompt. `priority` (a
        larger number is more urgent) and `tenant` are read by some schedulers. Prompts share a
        cached prefix only when they have the same `cache_salt`. `lora` names a loaded adapter.

        Raises RequestError when any prompt or parameter is invalid; then no prompt is queued.
        Interrupting the call ends its requests.
        """
        check_keywords(LLM.generate, turns, BatchKeywords)
        given = prompts_of(prompts, prompt_embeds)
        prepared = self._preparer.prepare(given, params, **turns)
        return self._run(prepared, progress)

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Pooling = "mean",
        normalize: bool = False,
        **turns: Unpack[BatchKeywords],
    ) -> list[np.ndarray]:
        """Return the model's final hidden states of each prompt, pooled to one array f32
        [hidden_size] per prompt, in order.

        `pooling`: "mean" averages over the prompt's tokens, "last" takes the last token.
        `normalize` divides each array by its Euclidean length. `turns` are as in generate(). The
        prompts run together with other requests.

        Raises RequestError for an engine without the capability hidden_states, and as generate()
        does.
        """
        check_keywords(LLM.embed, turns, BatchKeywords)
        outputs = self._run(self._preparer.prepare_embed(prompts, pooling, **turns))
        return [pooled_of(output, normalize=normalize) for output in outputs]

    def _run(
        self, prepared: Sequence[Completion], progress: Progress | None = None
    ) -> list[RequestOutput]:
        events, outputs = Events(), dict[str, RequestOutput]()
        try:
            self._requests.submit(prepared, events, streams=False)
            while len(outputs) < len(prepared):
                for event in events.get():
                    outputs[event.request_id] = output_in(event)
                    if progress is not None:
                        progress("generating", len(outputs), len(prepared))
            return [outputs[one.request_id] for one in prepared]
        finally:
            events.close()

    def stream(
        self, prompt: Prompt, params: Param = None, **turn: Unpack[RequestKeywords]
    ) -> Stream:
        """Complete one prompt, and return an iterator over chunks of new text. With n > 1 the
        chunks of all completions come as they are made.

        The request is checked and queued before this returns. Closing the stream (from any thread)
        or dropping it ends the request. Raises RequestError as generate() does, and for best_of >
        n: the best completions are not known before all have ended.
        """
        check_keywords(LLM.stream, turn, RequestKeywords)
        events = Events()
        self.submit(prompt, params, events=events, **turn)
        return Stream(events)

    def chat(
        self, messages: Messages, params: Param = None, **options: Unpack[ChatKeywords]
    ) -> RequestOutput:
        """Answer a conversation, rendered by the model's chat template. Each message has "role" and
        "content".

        `options` are the `turns` of generate() and the options of the template, see
        `enginebay.contracts.text.ChatOptions`. With continue_final_message=True and
        add_generation_prompt=False the answer continues the last message. Raises RequestError for
        messages that the template cannot render.
        """
        check_keywords(LLM.chat, options, ChatKeywords)
        prompt, turn = self._rendered(messages, **options)
        return self.generate([prompt], params, **turn)[0]

    def chat_stream(
        self, messages: Messages, params: Param = None, **options: Unpack[ChatKeywords]
    ) -> Stream:
        """chat() as a stream: see stream()."""
        check_keywords(LLM.chat_stream, options, ChatKeywords)
        prompt, turn = self._rendered(messages, **options)
        return self.stream(prompt, params, **turn)

    def _rendered(
        self, messages: Messages, **options: Unpack[ChatKeywords]
    ) -> tuple[list[int], RequestKeywords]:
        """The token ids of a conversation, and the options that belong to its request."""
        chat, turn = split_chat_keywords(options)
        chat.setdefault("max_prompt_tokens", self._preparer.max_model_len - 1)
        return self.tokenizer.apply_chat_template(messages, **chat), turn

    @checks_keywords(RequestKeywords)
    def submit(
        self, prompt: Prompt, params: Param = None, *, events: Events | AsyncEvents,
        request_id: str | None = None, stream: bool = True,
        **turn: Unpack[RequestKeywords],
    ) -> RequestHandle:  # fmt: skip
        """Check and queue one prompt. Read its output from `events`.

        With stream=False the only event is a RequestEnded with the whole output. `request_id`
        identifies the request in its events and for abort(); None chooses a new id.

        Raises RequestError for an invalid prompt or parameter, for the id of a request that has not
        ended, for closed `events`, and for stream=True with best_of > n. Raises StoppedError after
        close() or after the engine has failed for good.
        """
        [prepared] = self._preparer.prepare_one(prompt, params, **turn)
        return self._queue(prepared, events, request_id, streams=stream)

    @checks_keywords(RequestKeywords)
    async def asubmit(
        self, prompt: Prompt, params: Param = None, *, events: Events | AsyncEvents,
        request_id: str | None = None, stream: bool = True,
        **turn: Unpack[RequestKeywords],
    ) -> RequestHandle:  # fmt: skip
        """submit() without blocking the asyncio event loop. When it is cancelled, nothing is
        queued.
        """
        [prepared] = await in_thread(lambda: self._preparer.prepare_one(prompt, params, **turn))
        return self._queue(prepared, events, request_id, streams=stream)

    def abort(self, request_id: str) -> bool:
        """End a request; its completions get the finish reason "abort". Returns False when no
        unfinished request has this id.
        """
        return self._requests.abort(request_id)

    def counts(self) -> Counts:
        """The numbers of waiting and running requests of all kinds, such as streams."""
        return self._requests.counts(self._loop.prompt_ids()[1])

    def _queue(
        self,
        one: Completion,
        events: Events | AsyncEvents,
        request_id: str | None,
        *,
        streams: bool,
    ) -> RequestHandle:
        if streams:
            check_streamable([one])
        named = one if request_id is None else with_id(one, request_id)
        return self._requests.submit([named], events, streams=streams)[0].handle

    async def agenerate(
        self, prompts: Prompts, params: Params = None, **turns: Unpack[BatchKeywords]
    ) -> list[RequestOutput]:
        """generate() without blocking the asyncio event loop. Cancelling it ends the requests."""
        check_keywords(LLM.agenerate, turns, BatchKeywords)
        return await self._arun(lambda: self._preparer.prepare(prompts, params, **turns))

    async def aembed(
        self,
        prompts: Prompts,
        *,
        pooling: Pooling = "mean",
        normalize: bool = False,
        **turns: Unpack[BatchKeywords],
    ) -> list[np.ndarray]:
        """embed() without blocking the asyncio event loop. Cancelling it ends the requests."""
        check_keywords(LLM.aembed, turns, BatchKeywords)
        outputs = await self._arun(lambda: self._preparer.prepare_embed(prompts, pooling, **turns))
        return [pooled_of(output, normalize=normalize) for output in outputs]

    async def _arun(self, prepare: Callable[[], list[Completion]]) -> list[RequestOutput]:
        prepared = await in_thread(prepare)
        events = AsyncEvents()
        try:
            self._requests.submit(prepared, events, streams=False)
            outputs = {event.request_id: output_in(event) async for event in events}
            return [outputs[one.request_id] for one in prepared]
        finally:
            events.close()

    def astream(
        self, prompt: Prompt, params: Param = None, **turn: Unpack[RequestKeywords]
    ) -> AsyncStream:
        """stream() for asyncio, of one completion; it is queued when the first chunk is awaited."""
        check_keywords(LLM.astream, turn, RequestKeywords)

        async def begin(events: AsyncEvents) -> RequestHandle:
            chosen = as_sampling_params(params)
            if chosen.n != 1:
                given = f"n = {chosen.n} in astream"
                raise RequestError(given, "n = 1", "Call astream once for each completion.")
            return await self.asubmit(prompt, chosen, events=events, **turn)

        return AsyncStream(begin)

    async def achat(
        self, messages: Messages, params: Param = None, **options: Unpack[ChatKeywords]
    ) -> RequestOutput:
        """chat() without blocking the asyncio event loop. Cancelling it ends the request."""
        check_keywords(LLM.achat, options, ChatKeywords)
        prompt, turn = await in_thread(lambda: self._rendered(messages, **options))
        return (await self.agenerate([prompt], params, **turn))[0]


LLM.__doc__ = f"""{inspect.cleandoc(LLM.__doc__ or "")}

Arguments (EngineConfig says more of each):
{argument_lines(EngineConfig.model_fields)}
    config                   an EngineConfig, in place of all others
    progress                 function (what, done, total) that is called while the model loads
"""
