"""generate: complete one prompt and print the completion as it is generated, or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginebay.cli.command import Command
from enginebay.cli.options import (
    add_engine_arguments,
    add_profile_argument,
    config_from,
    only_adapter,
    setting,
    traced,
)
from enginebay.cli.show import print_shadow, progress
from enginebay.config import EngineConfig, merge
from enginebay.errors import InputError
from enginebay.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from enginebay.row_value import FromCheckpoint, declared
from enginebay.serving.choice import BestOf
from enginebay.serving.priority import RequestKeywords
from enginebay.types import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from enginebay.serving import LLM

DEFAULT_PROMPT = "Once upon a time"


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the prompt, the sampling flags and the engine flags."""
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help=f"text to complete (default: {DEFAULT_PROMPT!r}); - reads stdin",
    )
    parser.add_argument(
        "--prompt-ids", metavar="1,2,3", help="token ids of the prompt, instead of a text"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per completion")
    group = parser.add_argument_group("scheduling; only some schedulers use these flags")
    group.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="priority of the request; a larger number is more urgent",
    )
    group.add_argument("--tenant", metavar="NAME", help="tenant that the request is charged to")
    add_sampling_arguments(parser)
    add_profile_argument(parser)
    add_engine_arguments(parser)


EXPLICIT_FLAGS = ("n", "logprobs", "prompt_logprobs", "json_object")
"""Scalar fields of SamplingParams whose flags are declared one by one."""


def scalar_fields() -> dict[str, type]:
    """Return each SamplingParams field that has a flag of the same name, with the type of its
    value.
    """
    found = {}
    for name, field in SamplingParams.model_fields.items():
        kinds = set(typing.get_args(field.annotation) or (field.annotation,)) - {type(None)}
        if kinds <= {int, float, bool} and name not in EXPLICIT_FLAGS:
            found[name] = kinds.pop()
    return found


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of SamplingParams. Flags of scalar fields use the description and default
    of the field.
    """
    group = parser.add_argument_group("sampling")
    in_checkpoint = declared(SamplingParams, FromCheckpoint)
    for name, kind in scalar_fields().items():
        field = SamplingParams.model_fields[name]
        usual = "as in generation_config.json, else " if name in in_checkpoint else ""
        default = "none" if field.default is None else field.default
        text = f"{_described(name)} (default: {usual}{default})"
        flag = f"--{name.replace('_', '-')}"
        # None where a flag is left out: the checkpoint may set a default for this field.
        if kind is bool:
            action = argparse.BooleanOptionalAction if field.default else "store_true"
            group.add_argument(flag, action=action, default=None, help=text)
        else:
            group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("-n", type=int, default=1, metavar="N", help=_described("n"))
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help=f"one of the {_described('stop')}; may be repeated",
    )
    group.add_argument(
        "--stop-words-ids",
        action="append",
        default=[],
        metavar="1,2,3",
        help=f"one of the {_described('stop_words_ids')}; may be repeated",
    )
    group.add_argument(
        "--processor",
        action="append",
        default=[],
        metavar="NAME[.OPTION=VALUE]",
        help="use a logits processor, with an option such as xtc.threshold=0.2; may be repeated",
    )
    _add_structure_arguments(parser)
    _add_logprobs_arguments(group)


def _described(field: str) -> str:
    """Return the description of a field of SamplingParams, as the text of a flag's help."""
    return str(SamplingParams.model_fields[field].description).replace("%", "%%")


def _add_logprobs_arguments(group: argparse._ArgumentGroup) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        flag = f"--{name.replace('_', '-')}"
        text = f"with --json: {_described(name)}; at most {MAX_LOGPROBS}"
        group.add_argument(flag, type=int, metavar="N", help=text)


def _add_structure_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that constrain the output."""
    group = parser.add_argument_group("form of the output; at most one of these flags")
    group.add_argument(
        "--json-schema",
        metavar="FILE|TEXT",
        help="the output is JSON of this schema, which is a file or a text that begins with {",
    )
    group.add_argument("--json-object", action="store_true", help=_described("json_object"))
    group.add_argument("--regex", metavar="EXPRESSION", help=_described("regex"))
    group.add_argument(
        "--choice",
        action="append",
        default=[],
        metavar="TEXT",
        help="the output is one of the given texts; repeat the flag for each text",
    )
    group.add_argument("--grammar", metavar="FILE", help=_described("grammar"))


def _read_text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        todo = "Pass the path of a text file in UTF-8."
        raise InputError(f"{flag} {path}: {error}", "a readable text file", todo) from None


def _schema(given: str | None) -> str | None:
    """Return the schema of --json-schema, whose value is a JSON text or the path of a file."""
    is_text = given is None or given.lstrip().startswith("{")
    return given if is_text else _read_text(str(given), "--json-schema")


def read_stdin(read: Callable[[], str]) -> str:
    """Return what `read` reads from standard input; InputError when it is not valid text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input: {error}", "UTF-8 text", "Convert the text to UTF-8."
        ) from None


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    """Make SamplingParams from the flags; InputError for a wrong value."""
    for flag, value in (("--logprobs", args.logprobs), ("--prompt-logprobs", args.prompt_logprobs)):
        if value is not None and not args.json:
            raise InputError(f"{flag} {value} without --json", "both", "Add --json.")
    given: Any = {
        name: getattr(args, name) for name in scalar_fields() if getattr(args, name) is not None
    }
    processors: dict[str, Any] = {}
    for text in args.processor:
        processors = merge(processors, setting(text) if "=" in text else {text: {}})
    return SamplingParams(
        **given,
        n=args.n,
        processors=processors,
        stop=tuple(args.stop),
        stop_words_ids=tuple(
            tuple(_ids("--stop-words-ids", given)) for given in args.stop_words_ids
        ),
        logprobs=args.logprobs,
        json_schema=_schema(args.json_schema),
        json_object=args.json_object,
        regex=args.regex,
        choice=tuple(args.choice) or None,
        grammar=None if args.grammar is None else _read_text(args.grammar, "--grammar"),
        prompt_logprobs=args.prompt_logprobs,
    )


def run(name: str, args: argparse.Namespace) -> int:
    """Complete the prompt and print the completions."""
    prompt, params = _prompt(args), sampling_from(args)
    config = config_from(args)
    turn = RequestKeywords(priority=args.priority, tenant=args.tenant, lora=only_adapter(config))
    with ExitStack() as bars, load_llm(bars, config) as llm, traced(args):
        # The first chunk comes before anything is printed, because the engine may refuse the
        # prompt.
        chunks: Iterable[StreamChunk]
        if BestOf.of(params) is None:
            chunks = llm.stream(prompt, params, **turn)
        else:
            [output] = llm.generate([prompt], params, **turn)
            chunks = _chunks(output)
        chunks = after_first(chunks, bars.close)
        if args.json:
            prompt_ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            defaults = llm.plan.sampling_defaults.missing_in(params)
            print_whole(
                chunks,
                params.n,
                lambda one: json.dumps(completion_record(one, prompt_ids, defaults)),
            )
        elif params.n > 1:
            print_whole(chunks, params.n, lambda one: f"[{one.output.index}] {one.output.text}")
        else:
            begin = prompt if isinstance(prompt, str) else ""
            for chunk in chunks:
                print(begin + chunk.delta_text, end="", flush=True)
                begin = ""
            print()
        print_shadow(llm.shadow_report())
    return 0


def load_llm(bars: ExitStack, config: EngineConfig) -> LLM:
    """Load the engine; progress is shown until `bars` is closed."""
    from enginebay.serving import LLM

    return LLM(config=config, progress=bars.enter_context(progress()))


def after_first(chunks: Iterable[StreamChunk], call: Callable[[], None]) -> Iterator[StreamChunk]:
    """Yield the same chunks, and call `call` once, just before the first chunk is yielded."""
    waits_for_first = True
    for chunk in chunks:
        if waits_for_first:
            waits_for_first = False
            call()
        yield chunk
    if waits_for_first:
        call()


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.prompt_ids is not None:
        if args.prompt is not None:
            todo = "Leave --prompt-ids or the prompt out."
            raise InputError("a prompt and --prompt-ids", "one of them", todo)
        return _ids("--prompt-ids", args.prompt_ids)
    if args.prompt == "-":
        return read_stdin(sys.stdin.read)
    return DEFAULT_PROMPT if args.prompt is None else str(args.prompt)


def _ids(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"{flag} {text}", "whole numbers separated by commas", f"Pass {flag} 1,2,3."
        ) from None


def _chunks(output: RequestOutput) -> Iterator[StreamChunk]:
    """Yield a finished output as one chunk per completion; the first chunk has the metrics."""
    for one in output.outputs:
        logprobs = None if one.logprobs is None else tuple(one.logprobs)
        yield StreamChunk(
            request_id=output.request_id,
            index=one.index,
            delta_text=one.text,
            delta_token_ids=tuple(one.token_ids),
            finish_reason=one.finish_reason,
            metrics=None if one.index else output.metrics,
            logprobs=logprobs,
            prompt_logprobs=None
            if one.index or output.prompt_logprobs is None
            else tuple(output.prompt_logprobs),
        )


@dataclasses.dataclass
class ArrivedCompletion:
    """The parts of one completion that have arrived. Metrics arrive with the last chunk. Only the
    first completion has the log-probabilities of the prompt.
    """

    output: CompletionOutput
    metrics: RequestMetrics | None = None
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None

    def add_logprobs(self, chunk: StreamChunk) -> None:
        """Append the log-probabilities of a chunk, if the request asked for any."""
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        if chunk.logprobs is not None:
            output, pairs = self.output, zip(chunk.delta_token_ids, chunk.logprobs, strict=True)
            output.logprobs = [*(output.logprobs or ()), *chunk.logprobs]
            output.cumulative_logprob = sum(
                (one[token_id] for token_id, one in pairs), output.cumulative_logprob or 0.0
            )


def print_whole(
    chunks: Iterable[StreamChunk], n: int, show: Callable[[ArrivedCompletion], str]
) -> list[ArrivedCompletion]:
    """Print one line per completion and return the completions. After Ctrl-C, print what has
    arrived and raise KeyboardInterrupt again.
    """
    completions = [
        ArrivedCompletion(CompletionOutput(i, "", [], finish_reason="abort")) for i in range(n)
    ]
    interrupt: KeyboardInterrupt | None = None
    try:
        for chunk in chunks:
            one = completions[chunk.index]
            one.output.text += chunk.delta_text
            one.output.token_ids += chunk.delta_token_ids
            one.output.finish_reason = chunk.finish_reason or "abort"
            one.add_logprobs(chunk)
            one.metrics = chunk.metrics
    except KeyboardInterrupt as error:
        interrupt = error
    for one in completions:
        print(show(one), flush=True)
    if interrupt is not None:
        raise interrupt
    return completions


def completion_record(
    one: ArrivedCompletion, prompt_token_ids: list[int], sampling_defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of a completion that `--json` prints. JSON has no infinite numbers, so they
    become null; token ids that are keys become strings.

    `sampling_defaults`: the fields that the checkpoint's generation_config.json set. The record has
    no such key when there are none.
    """
    output = one.output
    optional: dict[str, Any] = (
        {"sampling_defaults": dict(sampling_defaults)} if sampling_defaults else {}
    )
    if output.logprobs is not None:
        optional["logprobs"] = [_by_id(best) for best in output.logprobs]
        optional["cumulative_logprob"] = _finite(output.cumulative_logprob or 0.0)
    if one.prompt_logprobs is not None:
        optional["prompt_logprobs"] = [
            None if best is None else _by_id(best) for best in one.prompt_logprobs
        ]
    return {
        "text": one.output.text,
        "token_ids": one.output.token_ids,
        "prompt_token_ids": prompt_token_ids,
        "finish_reason": one.output.finish_reason,
        **optional,
        "metrics": metrics_record(one.metrics),
    }


def _by_id(values: dict[int, float]) -> dict[int, float | None]:
    return {token_id: _finite(value) for token_id, value in values.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def metrics_record(metrics: RequestMetrics | None) -> dict[str, Any] | None:
    """Return the metrics with their rates; NaN becomes None."""
    if metrics is None:
        return None
    values = dataclasses.asdict(metrics) | {
        "time_to_first_token_s": metrics.time_to_first_token_s,
        "tokens_per_second": metrics.tokens_per_second,
    }
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


COMMAND = Command(add_arguments, run)
