"""LLM: load a model, generate, stream, chat; and the same for asyncio."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from enginebay.compose.composition import Composed, Progress, build, make_plan
from enginebay.compose.plan import Plan, make_title
from enginebay.config import EngineConfig, make_config, read_toml
from enginebay.engine import Engine
from enginebay.errors import ConfigError, RequestError, StoppedError
from enginebay.llm.abilities import Abilities
from enginebay.llm.events import AsyncEvents, Events
from enginebay.llm.override import overridden
from enginebay.llm.prepare import Param, Params, Prepared, Preparer, check_streamable
from enginebay.llm.priority import ChatTurn, Turn, Turns, split_turn
from enginebay.llm.prompts import Prompt, Prompts, prompts_of
from enginebay.llm.reading import AsyncStream, Stream, in_thread, output_in, pooled_of
from enginebay.llm.requests import Counts, RequestHandle, Requests, with_id
from enginebay.loop.loop import EngineLoop, end_all, running_prompts
from enginebay.ops.shadow import ShadowReport
from enginebay.outputs import RequestOutput
from enginebay.text import Tokenizer
from enginebay.types import Pooling, as_sampling_params
from enginebay.waits import waiting

if TYPE_CHECKING:
    from enginebay.keywords import EngineChoices

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model behind an engine with its own thread. Use it in a `with` block, or call close().

    Methods may be called from several threads at once: their requests run together.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **choices: Unpack[EngineChoices],
    ) -> None:
        """Load `model` ("demo", a folder, a hub id) by choices of EngineConfig or a whole config.

        Raises ConfigError for an unknown or wrong choice, CheckpointError for a model that cannot
        be loaded, and UnsupportedError for a part that cannot serve here.
        """
        named = dict(choices) if model is None else {"model": model, **choices}
        if config is not None and named:
            given = f"config and {', '.join(named)}"
            raise ConfigError(given, "one of them", "Put the choices into the config.")
        self._parts: Composed = build(make_plan(config or make_config(named)), progress)
        plan = self._parts.plan
        self.config = plan.config
        self.tokenizer: Tokenizer = plan.checkpoint.load_tokenizer()
        self.tokenizer.limit_templates(plan.config.template_limits)
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
        # Also when it is never closed, and at exit: the thread must not outlive JAX.
        weakref.finalize(self, self._loop.close)

    @classmethod
    def from_config(cls, path: str | Path, **choices: Unpack[EngineChoices]) -> LLM:
        """An LLM of a TOML file; keywords win over the file."""
        return cls(config=make_config(read_toml(path), choices))

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
        """Fail what is under way; end threads and worker processes; free the engine's memory. Twice
        is fine.
        """
        self._is_closing.set()
        self._loop.close()
        self._parts.engine.close()
        self._preparer.close()

    @property
    def plan(self) -> Plan:
        """What was chosen, and why."""
        return self._parts.plan

    @property
    def engine(self) -> Engine:
        """The engine; it belongs to the engine's thread (see `run_on_engine`)."""
        return self._parts.engine

    @property
    def loop(self) -> EngineLoop:
        """Drives the engine: takes requests, aborts by id, calls observers
        (`loop.observers.add`).
        """
        return self._loop

    def run_on_engine(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread between steps, and return its result."""
        return self._loop.call(function)

    def warmup(self, progress: Progress | None = None) -> int:
        """Compile, and count, every program for serving; with `forbid_compiling` no other will be.

        Interrupting it, or close(), leaves out programs not yet being compiled; serving compiles
        them when used.
        """
        is_left = threading.Event()
        title = make_title(self._parts.plan)

        def report(done: int, total: int, what: str) -> None:
            if is_left.is_set() or self._is_closing.is_set():
                raise StoppedError("warmup() was interrupted")
            if progress is not None:
                progress(f"compiling {title}", done, total)

        def compile_all() -> int:
            with waiting(f"compiling every step of {title}"):
                count: int = self._parts.engine.warmup(report)
            self._parts.engine.compilations.forbidden = self.config.forbid_compiling
            return count

        try:
            return int(self._loop.call(compile_all))
        finally:
            is_left.set()

    @contextlib.contextmanager
    def override(self, *, check: bool = True, **implementations: Any) -> Iterator[Self]:
        """In the block all steps run with other implementations of ops, registered or not.

        `implementations` are named after the ops, as in override(attention=..., rms_norm=...), a
        plugin's ops too. Each is a whole implementation, a name, or an import path; attention may
        be a function in the simple form (enginebay_byhand.simple), or {phase: implementation} for
        some phases. Each must pass a quick check unless `check` is False: IncorrectError.
        RequestError while requests are under way; those at the end of the block end with
        StoppedError. The former programs come back without compiling. Blocks nest.
        """
        end = functools.partial(end_all, self._loop)
        before = self._parts
        with overridden(before, self._loop, end, implementations, check=check) as self._parts:
            try:
                yield self
            finally:
                self._parts = before

    def shadow_report(self) -> ShadowReport | None:
        """What shadow mode has found so far; None when it is off, or rests within override()."""
        report: ShadowReport | None = self._loop.call(lambda: self._parts.engine.shadow_report)
        return report

    # Synchronous.

    def generate(
        self,
        prompts: Prompts | None = None,
        params: Params = None,
        *,
        prompt_embeds: Any = None,
        progress: Progress | None = None,
        **turns: Unpack[Turns],
    ) -> list[RequestOutput]:
        """Complete a text, token ids, Segments, or a list of these; params for all, or one for
        each.

        `prompt_embeds`, in place of `prompts`: an array [tokens, hidden_size] that stands for the
        embeddings of a prompt's tokens, a list of segments of one prompt (such arrays and lists of
        token ids), or a list with such a list for each of several prompts.
        `turns`, for all or one per prompt, change no token: `priority` (larger is more urgent) and
        `tenant` are read by some schedulers, and prompts share a cached prefix only under the same
        `cache_salt`. Returns one RequestOutput per prompt, in order. Nothing is
        queued when any prompt or value is refused. Interrupting ends the requests.
        """
        given = prompts_of(prompts, prompt_embeds)
        prepared = self._preparer.prepare(given, params, **turns)
        return self._run(prepared, progress)

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Pooling = "mean",
        normalize: bool = False,
        **turns: Unpack[Turns],
    ) -> list[np.ndarray]:
        """The model's final hidden states of each prompt, pooled: f32 [hidden_size], in order.

        `pooling`: "mean" over the prompt's tokens, or the "last" token's. With `normalize` each is
        divided by its Euclidean length. They run together with other requests. RequestError for an
        engine without the capability hidden_states; otherwise as generate().
        """
        outputs = self._run(self._preparer.prepare_embed(prompts, pooling, **turns))
        return [pooled_of(output, normalize=normalize) for output in outputs]

    def _run(
        self, prepared: Sequence[Prepared], progress: Progress | None = None
    ) -> list[RequestOutput]:
        events, outputs = Events(), {}
        try:
            self._requests.submit(prepared, events, streams=False)
            for event in events:
                outputs[event.request_id] = output_in(event)
                if progress is not None:
                    progress("generating", len(outputs), len(prepared))
            return [outputs[one.request_id] for one in prepared]
        finally:
            events.close()

    def stream(self, prompt: Prompt, params: Param = None, **turn: Unpack[Turn]) -> Stream:
        """Complete one prompt, by chunks; those of several completions come as they are made.

        The request is checked and queued at once. Closing the stream, from any thread, or letting
        go of it ends it. RequestError with best_of > n: the best are known when all have ended.
        """
        events = Events()
        self.submit(prompt, params, events=events, **turn)
        return Stream(events)

    def chat(
        self, messages: Messages, params: Param = None, **options: Unpack[ChatTurn]
    ) -> RequestOutput:
        """Answer a conversation, messages with "role" and "content", by the model's chat template.

        `options`: those of generate(), and how it is rendered, see `enginebay.text.ChatOptions`.
        With continue_final_message=True and add_generation_prompt=False the answer continues the
        final message. RequestError for messages or a template that cannot be rendered.
        """
        prompt, turn = self._rendered(messages, **options)
        return self.generate([prompt], params, **turn)[0]

    def chat_stream(
        self, messages: Messages, params: Param = None, **options: Unpack[ChatTurn]
    ) -> Stream:
        """chat(), chunk by chunk."""
        prompt, turn = self._rendered(messages, **options)
        return self.stream(prompt, params, **turn)

    def _rendered(self, messages: Messages, **options: Unpack[ChatTurn]) -> tuple[list[int], Turn]:
        """The prompt of a conversation, and what its options say about the request's turn."""
        chat, turn = split_turn(options)
        return self.tokenizer.apply_chat_template(messages, **chat), turn

    # One by one, by id, for a server.

    def submit(
        self, prompt: Prompt, params: Param = None, *, events: Events | AsyncEvents,
        request_id: str | None = None, stream: bool = True,
        **turn: Unpack[Turn],
    ) -> RequestHandle:  # fmt: skip
        """Check and queue one prompt; what comes of it is read from `events`.

        Without `stream` its only event is its RequestEnded. `request_id` names it in events and to
        abort(); None: a new one. RequestError for a prompt or value that cannot be served, an id
        that is under way, closed events, and `stream` with best_of > n; StoppedError after close(),
        or when the engine broke down.
        """
        [prepared] = self._preparer.prepare_one(prompt, params, **turn)
        return self._queue(prepared, events, request_id, streams=stream)

    async def asubmit(
        self, prompt: Prompt, params: Param = None, *, events: Events | AsyncEvents,
        request_id: str | None = None, stream: bool = True,
        **turn: Unpack[Turn],
    ) -> RequestHandle:  # fmt: skip
        """submit() without blocking the event loop; cancelling it queues nothing."""
        prepare = functools.partial(self._preparer.prepare_one, **turn)
        [prepared] = await in_thread(prepare, prompt, params)
        return self._queue(prepared, events, request_id, streams=stream)

    def abort(self, request_id: str) -> bool:
        """End a request and its completions, with reason "abort"; False when none is under way."""
        return self._requests.abort(request_id)

    def counts(self) -> Counts:
        """How many requests wait and run now, those of generate() and streams too."""
        return self._requests.counts(running_prompts(self._loop))

    def _queue(
        self, one: Prepared, events: Events | AsyncEvents, request_id: str | None, *, streams: bool
    ) -> RequestHandle:
        if streams:
            check_streamable([one])
        named = one if request_id is None else with_id(one, request_id)
        return self._requests.submit([named], events, streams=streams)[0].handle

    # asyncio.

    async def agenerate(
        self, prompts: Prompts, params: Params = None, **turns: Unpack[Turns]
    ) -> list[RequestOutput]:
        """generate() without blocking the event loop; cancelling ends the requests."""
        prepare = functools.partial(self._preparer.prepare, **turns)
        return await self._arun(prepare, prompts, params)

    async def aembed(
        self,
        prompts: Prompts,
        *,
        pooling: Pooling = "mean",
        normalize: bool = False,
        **turns: Unpack[Turns],
    ) -> list[np.ndarray]:
        """embed() without blocking the event loop; cancelling ends the requests."""
        prepare = functools.partial(self._preparer.prepare_embed, **turns)
        outputs = await self._arun(prepare, prompts, pooling)
        return [pooled_of(output, normalize=normalize) for output in outputs]

    async def _arun(
        self, prepare: Callable[..., list[Prepared]], *args: Any
    ) -> list[RequestOutput]:
        prepared = await in_thread(prepare, *args)
        events = AsyncEvents()
        try:
            self._requests.submit(prepared, events, streams=False)
            outputs = {event.request_id: output_in(event) async for event in events}
            return [outputs[one.request_id] for one in prepared]
        finally:
            events.close()

    def astream(self, prompt: Prompt, params: Param = None, **turn: Unpack[Turn]) -> AsyncStream:
        """stream() of one completion for asyncio; queued when the first chunk is asked for."""

        async def begin(events: AsyncEvents) -> RequestHandle:
            chosen = as_sampling_params(params)
            if chosen.n != 1:
                given = f"n = {chosen.n} in astream"
                raise RequestError(given, "n = 1", "Start one stream for each completion.")
            return await self.asubmit(prompt, chosen, events=events, **turn)

        return AsyncStream(begin)

    async def achat(
        self, messages: Messages, params: Param = None, **options: Unpack[ChatTurn]
    ) -> RequestOutput:
        """chat() for asyncio."""
        render = functools.partial(self._rendered, **options)
        prompt, turn = await in_thread(render, messages)
        return (await self.agenerate([prompt], params, **turn))[0]
