"""Single-stream decoding with drafts against without: what they win on text that repeats, and lose
on text that does not.

    python -m tests.benchmarks.speculation --engines vinference,oengine --rounds 5

Three tasks, each as the ratio of two decode rates that were measured in turn, in one process, with
the same programs:

- copy, demo: the demo model goes on after 500 tokens of its own stories, greedily, with the
  proposer `ngram`; each story
  copies the one before but for names, things and places;
- copy, M: a random model of 125 million parameters, whose drafts hold, fail and are missing where
  those of that run
  did, so that the acceptance is that task's whatever a random model writes;
- no repeats, demo and M: hot sampling after a random prompt, where looking up finds next to
  nothing.

Medians over rounds. The machine should be idle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Literal

import numpy as np

from enginebay import LLM, SamplingParams
from enginebay.contracts.proposer import Proposer
from enginebay.outputs import RequestMetrics
from tests.benchmarks.models import write_model

Fate = Literal["held", "wrong", "not drafted"]
"""What became of the draft of a token."""

OPENING, NUM_TOLD = "Once upon a time", 500
WORST_LOSS, LEAST_WIN = 0.9, 1.5


class Traced(Proposer):
    """Another proposer, and what it proposed after how many tokens."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.looks_far = proposer.looks_far
        self.seen: dict[int, list[int]] = {}

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        drafts = self.proposer.propose(token_ids, most)
        self.seen[len(token_ids)] = drafts.tolist()
        return drafts

    def trace(self, num_given: int, tokens: list[int]) -> list[Fate]:
        """What became of each of the tokens after the first `num_given` of them."""
        fates: list[Fate] = ["not drafted"] * (len(tokens) - num_given)
        for at, drafts in self.seen.items():
            for place, (draft, token) in enumerate(
                zip(drafts, tokens[at:], strict=False), at - num_given
            ):
                fates[place] = "held" if draft == token else "wrong"
                if draft != token:
                    break
        return fates


class Forced(Proposer):
    """Drafts that fare as others did: `fates` of the tokens after `num_given` of `tokens`, what the
    model will write.
    """

    looks_far = True

    def __init__(
        self, fates: list[Fate], num_given: int, tokens: list[int], vocab_size: int
    ) -> None:
        self.fates = fates
        self.num_given = num_given
        self.tokens = tokens
        self.vocab_size = vocab_size

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        at = len(token_ids)
        drafts = []
        for fate, token in zip(
            self.fates[at - self.num_given :][:most], self.tokens[at:], strict=False
        ):
            if fate == "not drafted":
                break
            drafts.append(token if fate == "held" else (token + 1) % self.vocab_size)
        return np.asarray(drafts, np.int32)


class Contest:
    """One engine on one model, with and without a proposer in turn."""

    def __init__(self, llm: LLM, rounds: int) -> None:
        self.llm = llm
        self.rounds = rounds

    def run(
        self, prompt: list[int], params: SamplingParams, proposer: Proposer | None
    ) -> tuple[list[int], RequestMetrics]:
        """The new tokens, and what was measured."""
        self.llm.run_on_engine(
            lambda: setattr(self.llm._loop._steps.speculation, "proposer", proposer)
        )
        output = self.llm.generate([prompt], params)[0]
        assert output.metrics is not None, "a request that ended has metrics"
        return output.outputs[0].token_ids, output.metrics

    def report(
        self, task: str, prompt: list[int], params: SamplingParams, proposer: Proposer, goal: float
    ) -> None:
        """Print one row of the table."""
        for one in (None, proposer):  # compiles, and fills the cache of prefixes
            self.run(prompt, params, one)
        rates: tuple[list[float], list[float]] = ([], [])
        for number in range(self.rounds):
            order = (0, 1) if number % 2 else (1, 0)
            for which in order:
                _, metrics = self.run(prompt, params, proposer if which else None)
                rates[which].append(metrics.tokens_per_second)
                if which:
                    told = f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens}"
        plain, drafted = map(statistics.median, rates)
        ratio = statistics.median(b / a for a, b in zip(*rates, strict=True))
        verdict = "met" if ratio >= goal else "missed"
        print(
            f"| {task} | {self.llm.plan.config.draft_tokens} | {plain:.0f} | {drafted:.0f} | "
            f"{told} | {ratio:.2f} | {goal} {verdict} |",
            flush=True,
        )


def main() -> int:
    """Print a table for each engine."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.speculation", description=__doc__
    )
    parser.add_argument("--engines", default="vinference,oengine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a run")
    parser.add_argument("--draft-tokens", type=int, help="default: by the model's size")
    parser.add_argument("--models", default="demo,M", help="of demo, S and M; demo gives the trace")
    parser.add_argument(
        "--folder", type=Path, default=Path(".cache/models"), help="where random models are made"
    )
    args = parser.parse_args()
    for engine in args.engines.split(","):
        print(f"\n## {engine}, {args.tokens} tokens\n")
        print(
            "| task | drafts a pass | tokens/s without | with | held | ratio | "
            "goal |\n|---|---|---|---|---|---|---|"
        )
        fates: list[Fate] = []
        for model in args.models.split(","):
            path = model if model == "demo" else str(write_model(args.folder, model, "float32"))
            with LLM(
                path, engine=engine, proposer="ngram", draft_tokens=args.draft_tokens,
                dtype="float32", max_model_len=1024, max_num_seqs=1, generation_config="none",
            ) as llm:  # fmt: skip
                fates = _tasks(Contest(llm, args.rounds), model, fates, args.tokens)
    return 0


def _tasks(contest: Contest, model: str, fates: list[Fate], num_new: int) -> list[Fate]:
    """All tasks of one model; the fates of its copying run's tokens, or those that were given."""
    llm = contest.llm
    ngram, vocab_size = llm._parts.proposer, llm.plan.model.info.vocab_size
    assert ngram is not None, "it was chosen"
    story = _stories(contest) if model == "demo" else None
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    if story is not None:
        traced = Traced(ngram)
        tokens, _ = contest.run(story, params, traced)
        fates = traced.trace(len(story), story + tokens)
        contest.report(f"copy, {model}", story, params, ngram, LEAST_WIN)
    rng = np.random.default_rng(1)
    prompt = rng.permutation(vocab_size)[:200].tolist()
    if story is None:
        tokens, _ = contest.run(prompt, params, None)
        forced = Forced(fates, len(prompt), prompt + tokens, vocab_size)
        contest.report(f"copy, {model}", prompt, params, forced, LEAST_WIN)
    hot = SamplingParams(max_tokens=num_new, ignore_eos=True, temperature=2.0, seed=1)
    contest.report(f"no repeats, {model}", prompt, hot, ngram, WORST_LOSS)
    return fates


def _stories(contest: Contest) -> list[int]:
    """What the demo model tells by itself."""
    opening = contest.llm.tokenizer.encode(OPENING)
    told, _ = contest.run(opening, SamplingParams(max_tokens=NUM_TOLD, ignore_eos=True), None)
    return opening + told


if __name__ == "__main__":
    sys.exit(main())
