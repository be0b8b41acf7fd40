"""LLM: load a model, generate, stream, chat; and the same for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from enginebay.build.compose import Composed, Plan, Progress, build, make_plan
from enginebay.config import EngineConfig, make_config, read_toml
from enginebay.errors import ConfigError, RequestError, explain
from enginebay.llm.assemble import CompletionReader, announce_in, waiting_events
from enginebay.llm.override import Given, overridden
from enginebay.llm.prepare import (
    Abilities,
    Param,
    Params,
    Prepared,
    Preparer,
    Prompt,
    Prompts,
    check_streamable,
)
from enginebay.llm.standing import Priorities, Tenants
from enginebay.loop.loop import EngineLoop, end_all
from enginebay.ops.shadow import ShadowReport
from enginebay.text import Tokenizer
from enginebay.types import RequestOutput, StreamChunk, as_sampling_params

if TYPE_CHECKING:
    from enginebay.keywords import EngineChoices

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model behind an engine, with a thread of its own. Use it in a `with` block, or call close().

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
        """Load `model` ("demo", a folder, or a hub id) with any choice of EngineConfig by keyword, or a whole config.

        Raises ConfigError for an unknown or wrong choice, CheckpointError for a model that cannot be loaded, and
        UnsupportedError for a part that cannot serve here.
        """
        named = dict(choices) if model is None else {"model": model, **choices}
        if config is not None and named:
            raise ConfigError(
                explain(f"config and {', '.join(named)}", "one of them", "Put the choices into the config.")
            )
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
        self._preparer.max_cached = self._parts.engine.ledger.most_tokens
        self._loop = EngineLoop(self._parts.engine, self._parts.scheduler, plan.config, self._parts.proposer)
        weakref.finalize(
            self, self._loop.close
        )  # one that nobody closed, at exit too: the thread must not outlive JAX

    @classmethod
    def from_config(cls, path: str | Path, **choices: Unpack[EngineChoices]) -> LLM:
        """An LLM of a TOML file; keywords win over the file."""
        return cls(config=make_config(read_toml(path), choices))

    def __repr__(self) -> str:
        config = self.config
        parts = f"engine={config.engine.name!r}, platform={config.platform!r}, dtype={config.dtype!r}"
        return f"LLM({config.model!r}, {parts}, max_model_len={config.max_model_len})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Fail what is under way and end the engine's thread and worker processes. Closing twice is fine."""
        self._loop.close()
        self.tokenizer.close()

    @property
    def plan(self) -> Plan:
        """What was chosen, and why."""
        return self._parts.plan

    @property
    def engine(self) -> Any:
        """The engine; it belongs to the engine's thread (see `run_on_engine`)."""
        return self._parts.engine

    @property
    def loop(self) -> EngineLoop:
        """What drives the engine: takes requests, aborts by id, tells observers (`loop.watch.add`)."""
        return self._loop

    def run_on_engine(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread between steps, and return its result."""
        return self._loop.call(function)

    def warmup(self, progress: Progress | None = None) -> int:
        """Compile every program that serving can need; how many there are. With `forbid_compiling` no other will be."""

        def report(done: int, total: int, what: str) -> None:
            if progress is not None:
                progress("compiling", done, total)

        def compile_all() -> int:
            count: int = self._parts.engine.warmup(report)
            self._parts.engine.compilations.forbidden = self.config.forbid_compiling
            return count

        return int(self._loop.call(compile_all))

    @contextlib.contextmanager
    def override(
        self,
        *,
        attention: Any = None,
        embedding: Any = None,
        kv_write: Any = None,
        linear: Any = None,
        rms_norm: Any = None,
        rope: Any = None,
        sample: Any = None,
        check: bool = True,
    ) -> Iterator[Self]:
        """While the block lasts, all steps run with other implementations of ops, registered or not.

        Each is a whole implementation, a name, or an import path; attention may be a function in the simple form
        (enginebay.ops.simple), or {phase: implementation} for some of decode, prefill and mixed. It must pass a quick check
        against the reference, unless `check` is False: IncorrectError. RequestError while requests are under way; those that
        are at the end of the block end with StoppedError. The former programs come back without compiling. Blocks nest.
        """
        given = Given(attention, embedding, kv_write, linear, rms_norm, rope, sample)
        end = functools.partial(end_all, self._loop)
        before = self._parts
        with overridden(before, self._loop, end, given, check=check) as self._parts:
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
        prompts: Prompts,
        params: Params = None,
        *,
        priority: Priorities = 0,
        tenant: Tenants = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: one text, a list of texts, or lists of token ids; params for all, or one per prompt.

        `priority` (larger is more urgent) and `tenant`, for all or one per prompt, are for schedulers that look at them; they
        change no token. Returns one RequestOutput per prompt, in order. Nothing is queued when any prompt or value is
        refused. Interrupting ends the requests.
        """
        prepared = self._preparer.prepare(prompts, params, priority=priority, tenant=tenant)
        groups = self._submit(prepared)
        try:
            outputs = []
            for done, (one, readers) in enumerate(zip(prepared, groups, strict=True), 1):
                for reader in readers:
                    while not reader.done:
                        reader.feed(reader.ticket.get())
                outputs.append(_output(one, readers))
                if progress is not None:
                    progress("generating", done, len(prepared))
            return outputs
        finally:
            self._abandon(groups)

    def stream(
        self,
        prompt: Prompt,
        params: Param = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
    ) -> Iterator[StreamChunk]:
        """Complete one prompt, chunk by chunk; chunks of several completions (n > 1) come as they are made.

        The request is checked and queued at once. Leaving the iterator ends it. RequestError with best_of > n, as which of
        the completions are returned is known when all have ended.
        """
        prepared = self._preparer.prepare_one(prompt, params, priority=priority, tenant=tenant)
        check_streamable(prepared)
        groups = self._submit(prepared)
        chunks = self._stream(groups)
        weakref.finalize(
            chunks, self._abandon, groups
        ).atexit = False  # one that nobody began to read has no `finally`
        return chunks

    def chat(
        self,
        messages: Messages,
        params: Param = None,
        *,
        chat_template: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
    ) -> RequestOutput:
        """Answer a conversation: messages with "role" and "content", put into the model's chat template."""
        prompt = self._chat_prompt(messages, chat_template)
        return self.generate([prompt], params, priority=priority, tenant=tenant)[0]

    def chat_stream(
        self,
        messages: Messages,
        params: Param = None,
        *,
        chat_template: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
    ) -> Iterator[StreamChunk]:
        """chat(), chunk by chunk."""
        prompt = self._chat_prompt(messages, chat_template)
        return self.stream(prompt, params, priority=priority, tenant=tenant)

    # asyncio.

    async def agenerate(
        self, prompts: Prompts, params: Params = None, *, priority: Priorities = 0, tenant: Tenants = None
    ) -> list[RequestOutput]:
        """generate() without blocking the event loop; cancelling ends the requests."""
        prepare = functools.partial(self._preparer.prepare, priority=priority, tenant=tenant)
        prepared = await asyncio.to_thread(prepare, prompts, params)
        groups = self._submit(prepared)
        try:
            for readers in groups:
                for reader in readers:
                    async for _ in _events(reader):
                        pass
            return [_output(one, readers) for one, readers in zip(prepared, groups, strict=True)]
        finally:
            self._abandon(groups)

    async def astream(
        self,
        prompt: Prompt,
        params: Param = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
    ) -> AsyncIterator[StreamChunk]:
        """stream() for asyncio, for one completion."""
        params = as_sampling_params(params)
        if params.n != 1:
            raise RequestError(
                explain(f"n = {params.n} in astream", "n = 1", "Start one stream for each completion.")
            )
        prepare = functools.partial(self._preparer.prepare_one, priority=priority, tenant=tenant)
        prepared = await asyncio.to_thread(prepare, prompt, params)
        check_streamable(prepared)
        groups = self._submit(prepared)
        try:
            async for chunk in _events(groups[0][0]):
                yield chunk
        finally:
            self._abandon(groups)

    async def achat(
        self,
        messages: Messages,
        params: Param = None,
        *,
        chat_template: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
    ) -> RequestOutput:
        """chat() for asyncio."""
        prompt = self._chat_prompt(messages, chat_template)
        return (await self.agenerate([prompt], params, priority=priority, tenant=tenant))[0]

    def _chat_prompt(self, messages: Messages, chat_template: str | None) -> list[int]:
        token_ids: list[int] = self.tokenizer.apply_chat_template(messages, chat_template=chat_template)
        return token_ids

    def _submit(self, prepared: Sequence[Prepared]) -> list[list[CompletionReader]]:
        tickets = iter(self._loop.submit([request for one in prepared for request in one.requests]))
        return [
            [CompletionReader(next(tickets), self.tokenizer, self._loop.abort) for _ in one.requests]
            for one in prepared
        ]

    def _stream(self, groups: list[list[CompletionReader]]) -> Iterator[StreamChunk]:
        arrived: queue.SimpleQueue[CompletionReader] = queue.SimpleQueue()
        readers = groups[0]
        try:
            for reader in readers:
                announce_in(reader, arrived)
            while not all(reader.done for reader in readers):
                reader = arrived.get()
                for event in waiting_events(reader):
                    chunk = reader.feed(event)
                    if chunk is not None:
                        yield chunk
        finally:
            self._abandon(groups)

    def _abandon(self, groups: Sequence[Sequence[CompletionReader]]) -> None:
        for readers in groups:
            for reader in readers:
                if not reader.done:
                    self._loop.abort(reader.ticket.request.request_id)


async def _events(reader: CompletionReader) -> AsyncIterator[StreamChunk]:
    """The chunks of a reader as they come, without a waiting thread."""
    loop = asyncio.get_running_loop()
    news = asyncio.Event()

    def announce() -> None:
        with contextlib.suppress(RuntimeError):  # the event loop was closed, so nobody reads any more
            loop.call_soon_threadsafe(news.set)

    reader.ticket.listen(announce)
    while not reader.done:
        news.clear()
        for event in waiting_events(reader):
            chunk = reader.feed(event)
            if chunk is not None:
                yield chunk
        if not reader.done:
            await news.wait()


def _output(prepared: Prepared, readers: Sequence[CompletionReader]) -> RequestOutput:
    """The finished output of a prompt; its metrics are those of the first completion, counts those of all that were made."""
    made = [reader.completion() for reader in readers]
    choice = prepared.choice
    completions = made if choice is None else choice.returned(made)
    metrics = readers[0 if choice is None else choice.order(made)[0]].metrics
    output = RequestOutput(
        prepared.request_id,
        prepared.prompt,
        prepared.prompt_token_ids,
        completions,
        finished=True,
        metrics=metrics,
        prompt_logprobs=readers[0].prompt_logprobs,
    )
    output.accumulated_text = output.get_text()
    output.num_generated_tokens = sum(len(c.token_ids) for c in made)
    if metrics is not None:
        output.tokens_per_second = metrics.tokens_per_second
        output.first_token_time = metrics.time_to_first_token_s
        output.processing_time = metrics.finished_s - metrics.arrival_s
        output.time_spent_generating = metrics.finished_s - metrics.first_scheduled_s
    return output
