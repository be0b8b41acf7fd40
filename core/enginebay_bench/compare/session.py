"""Runs the variants of a comparison in turn, and records what they answer."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from enginebay.cli.environment import environment
from enginebay.compose.composition import Progress
from enginebay.errors import InputError
from enginebay_bench.compare.page import ShownComparison
from enginebay_bench.compare.process import KernelCheatError, VariantError, VariantProcess
from enginebay_bench.compare.records import SCHEMA, VERSION, Cell, RunRecord, RunWriter, timed
from enginebay_bench.compare.variants import (
    ComparedVariant,
    ForeignKernel,
    foreign_kernels,
)
from enginebay_bench.compare.verdicts import same_answer
from enginebay_bench.workload import Workload, mixed_batch, one_prompt, with_tokens_of
from enginebay_testing import kernel_trial
from enginebay_testing.kernel_trial import KernelRequest, drawn_seed
from enginebay_testing.verdicts import Outcome

PARITY_REQUESTS, PARITY_PROMPT, PARITY_TOKENS = 4, 64, 32
PARITY_SEED = 0
NUM_LOGPROBS = 5
"""Log-probabilities that a program returns for each token. Those of the reference tell a near tie
from a fault.
"""


def compare(
    variants: Sequence[ComparedVariant],
    cells: Sequence[Cell],
    *,
    rounds: int = 10,
    reference: str | None = None,
    output: str | None = None,
    resumed: RunRecord | None = None,
    limit_s: float = 600.0,
    command: str = "",
    report: Progress = lambda *_: None,
    seed: int | None = None,
) -> ShownComparison:
    """Run variants in turn on the same requests, each in a process of its own, and compare them.

    Their tokens are compared with those of `reference`, by default the first. `output`: a file that
    keeps each run at once; `resumed`: what such a file has already. A start, and each run, may take
    `limit_s`. Ctrl-C ends the runs, and what is there is compared. `seed` makes the tokens of the
    prompts; None: a secret one, which the record has.
    """
    record = RunRecord(
        {
            "schema": SCHEMA,
            "version": VERSION,
            "when": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": command,
            "environment": machine(),
            "cells": [dataclasses.asdict(cell) for cell in cells],
            "variants": [variant.record for variant in variants],
            "reference": reference or variants[0].name,
            "rounds": rounds,
            "seed": drawn_seed() if seed is None else seed,
        }
    )
    if resumed is not None:
        for what in ("cells", "variants", "reference", "environment"):
            if resumed.header[what] != json.loads(json.dumps(record.header[what])):
                raise InputError(
                    f"--resume with other {what} than the record has",
                    "the same comparison; only its number of rounds may differ",
                    "Repeat the command of the record, or name another file with --output.",
                )
        record = RunRecord({**resumed.header, "rounds": rounds}, list(resumed.lines))
    writer = RunWriter(record, output)
    try:
        ComparisonSession(variants, writer, limit_s).run(report)
    except KeyboardInterrupt:
        if not record.of("run"):
            raise
    finally:
        writer.close()
    return ShownComparison.of(record)


def machine() -> dict[str, Any]:
    """What figures depend on: versions, system and processor."""
    found = environment(with_devices=False)
    kept = {name: found[name] for name in ("enginebay", "python", "system")}
    packages = {name: v for name, v in found["packages"].items() if v != "not installed"}
    return {**kept, "packages": packages, "processor": _processor(), "cpu_count": os.cpu_count()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def workload(cell: Cell, number: int, num_token_ids: int, seed: int) -> Workload:
    """The requests of a round, which have no prefix in common with those of another round, or of
    another cell. Their lengths are the same in every comparison; `seed` makes their tokens.
    """
    size = cell.prompt_len * 1_000_003 + cell.new_tokens * 1009 + cell.num_requests
    of_round = size * 100_003 + number
    if cell.num_requests == 1:
        asked = one_prompt(of_round, num_token_ids, cell.prompt_len, cell.new_tokens)
    else:
        sizes = (cell.num_requests, cell.prompt_len, cell.new_tokens)
        asked = mixed_batch(of_round, num_token_ids, *sizes)
    return with_tokens_of(asked, (seed, of_round), num_token_ids)


class ComparisonSession:
    """The processes of the variants. Where any runs on an accelerator, one is there at a time,
    because two would share its memory.
    """

    def __init__(
        self, variants: Sequence[ComparedVariant], writer: RunWriter, limit_s: float
    ) -> None:
        """`limit_s` bounds the start of a process and each run."""
        self._variants = {variant.name: variant for variant in variants}
        self._writer, self._record, self._limit_s = writer, writer.record, limit_s
        self._processes: dict[str, VariantProcess] = {}
        self._takes_turns = False
        self._num_token_ids = 0
        self._seed: int = self._record.header.get("seed", 0)  # older records have none
        self._trials: dict[ForeignKernel, Outcome] = {}

    def run(self, report: Progress) -> None:
        """Compare tokens, then time the rounds that are not recorded yet.

        VariantError when the reference fails, or a variant's settings are wrong; another variant
        that fails is left out.
        """
        rounds, cells = self._record.header["rounds"], self._record.cells
        names = list(self._record.variants)
        try:
            for done, name in enumerate(names):
                report("starting and comparing tokens", done, len(names))
                with self._left_out_if_it_fails(name):
                    self._begin(name)
            wanted = [
                (number, cell, name)
                for number in range(1, rounds + 1)
                for cell, name in self._in_turn(cells, names, number)
                if not self._record.is_done(name, cell.name, number)
            ]
            for done, (number, cell, name) in enumerate(wanted):
                report(f"measuring {name}", done, len(wanted))
                if not self._record.of("failed", variant=name):
                    with self._left_out_if_it_fails(name):
                        self._measure(name, cell, number)
            for cell in cells:
                report("comparing the tokens of the rounds", cells.index(cell), len(cells))
                for name in names[1:]:
                    self._compare_rounds(name, cell)
        finally:
            for process in self._processes.values():
                process.close()
            self._processes.clear()

    def _in_turn(
        self, cells: Sequence[Cell], names: Sequence[str], number: int
    ) -> Iterator[tuple[Cell, str]]:
        """The runs of a round. Each round begins with another variant, so that none is always the
        first. Processes that take turns run all cells at once.
        """
        first = number % len(names)
        turned = [*names[first:], *names[:first]]
        if self._takes_turns:
            yield from ((cell, name) for name in turned for cell in cells)
        else:
            yield from ((cell, name) for cell in cells for name in turned)

    @contextlib.contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except VariantError as error:
            if process := self._processes.pop(name, None):
                process.close()
            if name == self._record.header["reference"] or isinstance(error, InputError):
                raise
            verdict = "cheat" if isinstance(error, KernelCheatError) else "failed"
            self._writer.add("failed", variant=name, why=str(error), verdict=verdict)

    def _begin(self, name: str) -> None:
        """Start a variant, and record its facts and the tokens of the parity requests."""
        if self._record.of("failed", variant=name):
            return
        self._try_kernels(self._variants[name].kernels)
        process = self._process(name)
        facts = process.facts
        if self._variants[name].is_ours:
            platform = str(facts.get("platform", "auto"))
            self._try_kernels(foreign_kernels(facts.get("kernels") or {}, platform))
        if not self._record.of("facts", variant=name):
            self._writer.add("facts", variant=name, facts=facts)
        self._takes_turns |= facts.get("platform", "cpu") != "cpu"
        if not self._record.of("parity", variant=name):
            longest = min(PARITY_PROMPT, *(cell.prompt_len for cell in self._record.cells))
            most = min(PARITY_TOKENS, *(cell.new_tokens for cell in self._record.cells))
            asked = mixed_batch(PARITY_SEED, self._num_token_ids, PARITY_REQUESTS, longest, most)
            asked = with_tokens_of(asked, (self._seed, PARITY_SEED), self._num_token_ids)
            found = process.run(_as_run(asked, NUM_LOGPROBS))
            first = self._record.of("parity", variant=self._record.header["reference"])
            wanted = first[0]["requests"] if first else found
            self._writer.add("parity", variant=name, requests=found, wanted=wanted)

    def _try_kernels(self, kernels: Iterable[ForeignKernel]) -> None:
        """Try kernels that are not built in, each once and in a process of its own. VariantError
        for one without a result, which is a KernelCheatError for one that cheats.
        """
        for one in kernels:
            if one not in self._trials:
                asked = KernelRequest(one.op, one.name, self._seed, one.platform)
                self._trials[one] = kernel_trial.tried_apart(asked)
            outcome = self._trials[one]
            what = f"{one.op} kernel {one.name}"
            if outcome.verdict == "CHEAT":
                raise KernelCheatError(f"{what} {outcome.detail}")
            if outcome.verdict in ("ERROR", "TIMEOUT"):
                raise VariantError(f"{what}: {outcome.detail}")

    def _compare_rounds(self, name: str, cell: Cell) -> None:
        """Compare the tokens of all timed runs with the reference's. Where some differ first, ask
        the reference for log-probabilities, which tell a near tie from a fault.
        """
        reference = self._record.header["reference"]
        if self._record.of("parity", variant=name, cell=cell.name):
            return
        for line in self._record.of("run", variant=name, cell=cell.name):
            number = line["round"]
            others = self._record.of("run", variant=reference, cell=cell.name, round=number)
            if not others:
                continue
            pairs = list(zip(line["requests"], others[0]["requests"], strict=True))
            places = [i for i, (mine, its) in enumerate(pairs) if not same_answer(mine, its)]
            if not places:
                continue
            asked = workload(cell, number, self._num_token_ids, self._seed)
            some = Workload(
                tuple(asked.prompts[i] for i in places), tuple(asked.new_tokens[i] for i in places)
            )
            wanted = self._process(reference).run(_as_run(some, NUM_LOGPROBS))
            found = [line["requests"][i] for i in places]
            where = {"cell": cell.name, "round": number}
            self._writer.add("parity", variant=name, requests=found, wanted=wanted, **where)

    def _process(self, name: str) -> VariantProcess:
        """The process of a variant, which is started if it does not run."""
        if self._takes_turns:
            for other in set(self._processes) - {name}:
                self._processes.pop(other).close()
        if name not in self._processes:
            self._processes[name] = VariantProcess(self._variants[name], self._limit_s)
            self._processes[name].start()
            room = self._processes[name].facts.get("max_model_len")
            for cell in self._record.cells:
                if room is not None and cell.prompt_len + cell.new_tokens >= room:
                    raise InputError(
                        f"{cell.name} for {name}",
                        f"fewer than its {room} tokens in total",
                        "Lower --prompt-len or --new-tokens, or raise --max-model-len.",
                    )
            if not self._num_token_ids:
                self._take_vocabulary(name, self._processes[name].facts)
            for cell in self._record.cells:  # compiles what is compiled late, and warms caches
                self._processes[name].run(
                    _as_run(workload(cell, 0, self._num_token_ids, self._seed))
                )
        return self._processes[name]

    def _take_vocabulary(self, name: str, facts: dict[str, Any]) -> None:
        """Make all prompts of the token ids of the reference, which starts first."""
        number = facts.get("num_token_ids")
        if not isinstance(number, int) or number < 1:
            raise InputError(
                f"the reference {name}, which does not tell its number of token ids",
                "an engine of ours, or a peer that says num_token_ids",
                "Name another variant with --reference.",
            )
        self._num_token_ids = number

    def _measure(self, name: str, cell: Cell, number: int) -> None:
        process = self._process(name)
        run = workload(cell, number, self._num_token_ids, self._seed)
        before_s, own_s, start_s = _busy_s(), process.cpu_s() + time.process_time(), time.time()
        found = process.run(_as_run(run))
        others_s = _busy_s() - before_s - (process.cpu_s() + time.process_time() - own_s)
        took_s = (time.time() - start_s) * (os.cpu_count() or 1)
        self._writer.add(
            "run",
            variant=name,
            cell=cell.name,
            round=number,
            requests=timed(found),
            took_s=process.took_s,
            peak_mib=process.peak_mib,
            others=round(min(1.0, max(0.0, others_s / took_s)), 3) if process.is_local else None,
            said=process.said,
        )


def _as_run(asked: Workload, num_logprobs: int = 0) -> dict[str, Any]:
    prompts = [list(prompt) for prompt in asked.prompts]
    return {"prompts": prompts, "new_tokens": list(asked.new_tokens), "logprobs": num_logprobs}


def _busy_s() -> float:
    """CPU seconds of all programs since the start of the machine; 0 where it does not tell."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return 0.0
    user, nice, system = map(int, first[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")
