"""chat: a conversation on the terminal, one message per line. With messages as arguments or on a
pipe, the command answers each message and exits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from enginebay.cli.command import Command
from enginebay.cli.generate import (
    add_sampling_arguments,
    after_first,
    completion_record,
    load_llm,
    print_whole,
    read_stdin,
    sampling_from,
)
from enginebay.cli.interrupts import go_on
from enginebay.cli.options import (
    add_engine_arguments,
    add_profile_argument,
    config_from,
    only_adapter,
    traced,
)
from enginebay.errors import EnginebayError, InputError, RequestError, unknown_name
from enginebay.outputs import RequestMetrics
from enginebay.types import SamplingParams

if TYPE_CHECKING:
    from enginebay.serving import LLM


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the messages, the sampling flags and the engine flags."""
    parser.add_argument(
        "message",
        nargs="*",
        metavar="MESSAGE",
        help="answer these messages in turn, then exit; without messages, read them from stdin",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer")
    add_sampling_arguments(parser)
    add_profile_argument(parser)
    add_engine_arguments(parser)


def run(name: str, args: argparse.Namespace) -> int:
    """Hold the conversation."""
    params = sampling_from(args)
    if params.n != 1:
        raise InputError(f"-n {params.n} in a conversation", "1", "Leave -n out.")
    if params.best_of not in (None, 1):
        given = f"--best-of {params.best_of} in a conversation, which streams its answers"
        raise InputError(given, "1", "Leave --best-of out.")
    config = config_from(args)
    history = [{"role": "system", "content": args.system}] if args.system else []
    is_terminal = not args.message and not args.json and sys.stdin.isatty() and sys.stdout.isatty()
    with ExitStack() as bars, load_llm(bars, config) as llm, traced(args):
        chat = Conversation(llm, params, history, bars, only_adapter(config))
        if is_terminal:
            bars.close()
            chat.talk()
            return 0
        for message in _turns(args.message, show_prompt=sys.stdin.isatty()):
            chat.answer_json(message) if args.json else chat.answer(message)
    return 0


def _turns(given: list[str], *, show_prompt: bool) -> Iterator[str]:
    if given:
        for message in given:
            print(f"> {message}", file=sys.stderr)
            yield message
        return
    while True:
        if show_prompt:
            print("> ", end="", file=sys.stderr, flush=True)
        line = read_stdin(sys.stdin.readline)
        if not line:
            return
        if line.strip():
            yield line.strip()


@dataclasses.dataclass
class Conversation:
    """The messages so far, and the engine that answers them. `bars` show progress until the first
    answer begins.
    """

    llm: LLM
    params: SamplingParams
    history: list[dict[str, str]]
    bars: ExitStack
    lora: str | None = None

    def answer(self, message: str) -> RequestMetrics | None:
        """Stream the answer to stdout. The history keeps the text of an interrupted answer."""
        self.history.append({"role": "user", "content": message})
        try:
            chunks = self.llm.chat_stream(self.history, self.params, lora=self.lora)
        except EnginebayError:
            self.history.pop()  # the engine refused this message, but may accept the next one
            raise
        text, metrics = "", None
        try:
            for chunk in after_first(chunks, self.bars.close):
                text += chunk.delta_text
                metrics = chunk.metrics
                print(chunk.delta_text, end="", flush=True)
        finally:
            print()
            self.history.append({"role": "assistant", "content": text})
        return metrics

    def answer_json(self, message: str) -> None:
        """Print the answer as one JSON object when it is complete."""
        self.history.append({"role": "user", "content": message})
        prompt_ids = self.llm.tokenizer.apply_chat_template(self.history)
        chunks = after_first(
            self.llm.stream(prompt_ids, self.params, lora=self.lora), self.bars.close
        )
        defaults = self.llm.plan.sampling_defaults.missing_in(self.params)
        (one,) = print_whole(
            chunks, 1, lambda one: json.dumps(completion_record(one, prompt_ids, defaults))
        )
        self.history.append({"role": "assistant", "content": one.output.text})

    def talk(self) -> None:
        """Read messages from a terminal until /exit or Ctrl-D; lines can be edited and recalled."""
        with contextlib.suppress(
            ImportError
        ):  # a Python without readline still reads lines, without editing
            importlib.import_module("readline")
        from enginebay.compose.plan import make_title

        config = self.llm.config
        print(
            f"{config.model}: {make_title(self.llm.plan)}, {config.dtype}, "
            f"{config.max_model_len} tokens"
        )
        print("/help lists commands, Ctrl-C ends an answer, Ctrl-D ends the conversation.")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                go_on()
                print("\n/exit or Ctrl-D ends the conversation.")
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _command(self, line: str) -> None:
        if line == "/clear":
            self.history[:] = [one for one in self.history if one["role"] == "system"]
            print("The conversation starts again.")
        elif line == "/help":
            print("\n".join(f"{name:8} {what}" for name, what in COMMANDS.items()))
            print("Arrow up and Ctrl-R find earlier lines.")
        else:
            print(unknown_name("command", line, COMMANDS, "/help lists them."))

    def _turn(self, message: str) -> None:
        try:
            metrics = self.answer(message)
        except KeyboardInterrupt:
            go_on()
            print("[interrupted]")
        except RequestError as error:
            print(f"{error} /clear starts the conversation again.")
        else:
            if metrics is not None:
                print(f"[{_speed(metrics)}]")


COMMANDS = {
    "/help": "list these commands",
    "/clear": "forget the conversation except the system message",
    "/exit": "end the conversation, like Ctrl-D",
}


def _speed(metrics: RequestMetrics) -> str:
    """Format the number of tokens, the rate and the time to the first token of an answer."""
    rate = metrics.tokens_per_second
    parts = [f"{metrics.num_generated_tokens} tokens"]
    parts += [] if math.isnan(rate) else [f"{rate:.1f} tokens/s"]
    return ", ".join([*parts, f"first token after {metrics.time_to_first_token_s:.2f} s"])


COMMAND = Command(add_arguments, run)
