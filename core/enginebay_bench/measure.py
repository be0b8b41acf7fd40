"""Runs workloads: compares tokens with the first variant, then times interleaved rounds."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

from enginebay.serving import LLM
from enginebay_bench.workload import Workload, mixed_batch, one_prompt

RoundFigures = dict[str, float]
Round = Callable[[LLM, int], RoundFigures]
"""Runs one round on an engine. The round's number seeds its prompts, so no prefix is cached."""


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """The figures of one variant: medians over rounds, all values, and how many tokens equal the
    first variant's.
    """

    variant: str
    figures: dict[str, float]
    rounds: dict[str, list[float]]
    equal_tokens: int
    compared_tokens: int
    warmup_s: float
    num_compiled: int


def compare_tokens(llms: dict[str, LLM], workload: Workload) -> dict[str, tuple[int, int]]:
    """Return, for each engine, the number of leading tokens that equal the first engine's, and the
    number of all tokens, over all requests.
    """
    outputs = {
        name: [
            o.outputs[0].token_ids
            for o in llm.generate([list(p) for p in workload.prompts], workload.params)
        ]
        for name, llm in llms.items()
    }
    reference = next(iter(outputs.values()))
    return {
        name: (sum(map(_common_prefix, reference, tokens)), workload.num_output_tokens)
        for name, tokens in outputs.items()
    }


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def latency_round(prompt_len: int, new_tokens: int) -> Round:
    """Measure one stream: time to first token, decode rate after it, prompt rate (both in
    tokens/s).
    """

    def run(llm: LLM, number: int) -> RoundFigures:
        vocab = llm.plan.model.info.num_token_ids
        first = _timed(llm, one_prompt(2 * number, vocab, prompt_len, 1))
        whole = _timed(llm, one_prompt(2 * number + 1, vocab, prompt_len, 1 + new_tokens))
        return {
            "ttft_s": first,
            "prefill_tokens_per_s": prompt_len / first,
            "decode_tokens_per_s": new_tokens / (whole - first),
        }

    return run


def throughput_round(num_requests: int, prompt_len: int, new_tokens: int) -> Round:
    """Measure a batch of mixed requests: output tokens/s over the wall time."""

    def run(llm: LLM, number: int) -> RoundFigures:
        workload = mixed_batch(
            number, llm.plan.model.info.num_token_ids, num_requests, prompt_len, new_tokens
        )
        return {"output_tokens_per_s": workload.num_output_tokens / _timed(llm, workload)}

    return run


def _timed(llm: LLM, workload: Workload) -> float:
    start = time.perf_counter()
    llm.generate([list(p) for p in workload.prompts], workload.params)
    return time.perf_counter() - start


def measure(
    llms: dict[str, LLM],
    run: Round,
    parity: Workload,
    rounds: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[VariantResult]:
    """Warm each engine up, compare tokens, then run rounds in turn, engine by engine.

    `progress` gets the variant's name as part of its text. Ctrl-C ends the rounds; the results then
    cover the finished rounds, and only variants that have one. KeyboardInterrupt when no round has
    finished.
    """
    warmups = {}
    for name, llm in llms.items():
        start = time.perf_counter()
        llm.warmup(None if progress is None else functools.partial(_of_variant, progress, name))
        run(llm, 0)
        warmups[name] = time.perf_counter() - start
    equal = compare_tokens(llms, parity)
    values: dict[str, dict[str, list[float]]] = {name: {} for name in llms}
    try:
        for number in range(1, rounds + 1):
            for done, (name, llm) in enumerate(llms.items(), (number - 1) * len(llms)):
                if progress is not None:
                    progress(f"measuring {name}", done, rounds * len(llms))
                for figure, value in run(llm, number).items():
                    values[name].setdefault(figure, []).append(value)
    except KeyboardInterrupt:
        if not any(values.values()):
            raise
    return [
        VariantResult(
            name,
            {figure: statistics.median(v) for figure, v in values[name].items()},
            values[name],
            *equal[name],
            warmups[name],
            llm.engine.compilations.count,
        )
        for name, llm in llms.items()
        if values[name]
    ]


def _of_variant(
    progress: Callable[[str, int, int], None], variant: str, what: str, done: int, total: int
) -> None:
    progress(f"{variant}: {what}", done, total)
