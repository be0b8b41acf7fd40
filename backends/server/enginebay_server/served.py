"""Served models: the LLMs of a server by name, and the state of their compilation."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from enginebay.config_sections import AUTO
from enginebay.errors import EnginebayError, nearest, shown
from enginebay.serving import LLM
from enginebay.text.token_bytes import TokenBytes
from enginebay_server.decode_rate import ROOFLINE
from enginebay_server.errors import ApiError
from enginebay_server.parsing.choose import choose_formats, model_chat
from enginebay_server.settings import ToolPrompt

log = logging.getLogger("enginebay.server")

MAX_SHOWN = 20

MIN_TEXT_CHARS = 2**20
MAX_CHARS_PER_TOKEN = 16
"""A longer text is refused by its length alone: tokenising it would take seconds and gigabytes."""

WarmupState = Literal["waiting", "compiling", "ready", "lazy", "failed"]


class ServedModel:
    """An LLM under the name that clients use. The owner of the LLM closes it.

    `warmup` is the state of compiling. A model answers requests when it is "lazy" or "ready".
    `base` is the name without an adapter. `lora` is the adapter of the requests to this name, if
    any.
    """

    def __init__(
        self,
        name: str,
        llm: LLM,
        *,
        chat_template: str | None = None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        tool_prompt: ToolPrompt = "auto",
    ) -> None:
        """`chat_template`: Jinja text in place of the model's own template. The parsers are parts
        by name, "auto" or "none". UnknownNameError for an unknown part. `tool_prompt`: "auto"
        describes tools in a system text when the template has no place for them.
        """
        self.name = self.base = name
        self.lora: str | None = None
        self.llm = llm
        self.chat_template = chat_template
        self.formats = choose_formats(
            llm.plan.registry,
            model_chat(llm.tokenizer.inner, chat_template),
            tools=tool_parser,
            reasoning=reasoning_parser,
            describe=tool_prompt == "auto",
        )
        self.created_s = int(time.time())
        self.warmup: WarmupState = "waiting"
        self.progress = (0, 0)
        self.failure: EnginebayError | None = None
        self.words = TokenBytes(llm.tokenizer)

    @property
    def max_prompt_tokens(self) -> int:
        """Max tokens of a prompt, which leave room for a new token."""
        length = self.llm.config.max_model_len
        assert length is not None, "an LLM settles max_model_len"
        return length - 1

    @property
    def max_text_chars(self) -> int:
        """Max characters of a text that is tokenised: MAX_CHARS_PER_TOKEN for each token of the
        context, and at least MIN_TEXT_CHARS.
        """
        return max(MIN_TEXT_CHARS, MAX_CHARS_PER_TOKEN * self.max_prompt_tokens)

    @property
    def adapters(self) -> Collection[str]:
        """The names of the loaded adapters."""
        adapters = self.llm.plan.adapters
        return () if adapters is None else adapters.loaded()

    def with_adapter(self, adapter: str, name: str) -> ServedModel:
        """Return this model as it is now, for requests to `name`, which use an adapter."""
        found = copy.copy(self)
        found.name, found.lora = name, adapter
        return found

    @property
    def is_alive(self) -> bool:
        """Whether the engine accepts requests."""
        return not self.llm.loop.is_closed

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered.

        The engine must be alive, and its programs compiled, or compiled when they are needed.
        """
        return self.is_alive and self.warmup in ("ready", "lazy")

    @property
    def is_compiling(self) -> bool:
        """Whether programs are left to compile, by the warm-up or beside the requests."""
        done, total = self.progress
        return done < total

    @property
    def status(self) -> dict[str, object]:
        """The record of this model in /readiness."""
        done, total = self.progress
        found: dict[str, object] = {"ready": self.is_ready, "warmup": self.warmup}
        if self.is_compiling or self.warmup == "compiling":
            found |= {"compiled": done, "programs": total}
        if self.failure is not None:
            found["error"] = str(self.failure)
        return found

    def compile_all(self, *, background: bool = False) -> None:
        """Compile every program on the caller's thread, and measure the memory for the metrics.
        Updates `warmup` and `progress`. With `background`, return when requests are answered;
        `finish` waits for the rest.
        """
        self.warmup = "compiling"

        def report(_: str, done: int, total: int) -> None:
            self.progress = done, total

        try:
            self.llm.warmup(report, background=background)
        except EnginebayError as error:
            self.warmup, self.failure = "failed", error
            log.warning("the programs of %s were not compiled: %s", self.name, error)
            return
        if not background:
            ROOFLINE.measure(self.llm.plan)
        self.warmup = "ready"

    def finish(self) -> None:
        """Wait until every program is compiled, and measure the memory for the metrics. Returns
        sooner when the LLM is closed.
        """
        later = self.llm.later_compilation
        if later is not None and later.wait():
            ROOFLINE.measure(self.llm.plan)

    def compile_in_background(self) -> threading.Thread:
        """Run compile_all() on a new thread, and return the thread."""
        thread = threading.Thread(target=self.compile_all, name="enginebay-warmup", daemon=True)
        thread.start()
        return thread


class ServedModels:
    """The models of one server by name. The first one answers requests without a name."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        assert models, "a server has at least one model"
        self.by_name = {model.name: model for model in models}
        assert len(self.by_name) == len(models), "each model has a name of its own"

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.by_name.values())

    def find(self, name: str | None) -> ServedModel:
        """Return a model by name, ready or not. ADAPTER and MODEL:ADAPTER name an adapter.
        ApiError 404 for an unknown name.
        """
        if name is None:
            return next(iter(self.by_name.values()))
        if name in self.by_name:
            return self.by_name[name]
        for model in self:
            for adapter in (name, name.removeprefix(f"{model.name}:")):
                if adapter in model.adapters:
                    return model.with_adapter(adapter, name)
        served = [*self.by_name, *(adapter for model in self for adapter in model.adapters)]
        near = nearest(name, served)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ApiError(
            404,
            f"the model {shown(name)} is not served here. Served: {shown_names(served)}.{hint}",
            param="model",
            code="model_not_found",
        )

    def ready(self, name: str | None, retry_after_s: int) -> ServedModel:
        """Return a model that is ready, by name; ApiError 503 while it is not."""
        model = self.find(name)
        if not model.is_ready:
            done, total = model.progress
            if not model.is_alive:
                raise ApiError(
                    503, f"the engine of {model.name} has stopped", code="engine_stopped"
                )
            if model.failure is not None:
                raise ApiError(503, f"{model.name}: {model.failure}", code="model_not_ready")
            raise ApiError(
                503,
                f"the programs of {model.name} are being compiled ({done} of {total or '?'}). "
                "Ask /readiness when they are done.",
                code="model_not_ready",
                retry_after_s=retry_after_s,
            )
        return model


def shown_names(names: Sequence[str]) -> str:
    """Return names for an error message: at most MAX_SHOWN of them."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more
