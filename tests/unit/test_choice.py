"""best_of: the completions with the highest mean log-probability are returned, best first."""

from __future__ import annotations

from enginebay import SamplingParams
from enginebay.outputs import CompletionOutput
from enginebay.serving.choice import BestOf


def completion(index: int, *values: float) -> CompletionOutput:
    told = [{7: value} for value in values]
    return CompletionOutput(index, f"text {index}", [7] * len(values), sum(values), told, "length")


def test_the_mean_of_a_completion_counts_and_of_equals_the_first() -> None:  # holds G103
    made = [
        completion(0, -1.0, -1.0),  # a higher sum than the next, and a lower mean
        completion(1, -0.5, -0.5, -0.5, -0.5, -0.5),
        completion(2),
        completion(3, -0.5),
    ]
    assert BestOf(4, shows_logprobs=True).order(made) == [1, 3, 0, 2]
    chosen = BestOf(2, shows_logprobs=True).returned(made)
    assert [(one.index, one.text) for one in chosen] == [(0, "text 1"), (1, "text 3")]
    assert chosen[0].cumulative_logprob == -2.5
    hidden = BestOf(2, shows_logprobs=False).returned(made)
    assert [(one.text, one.logprobs, one.cumulative_logprob) for one in hidden] == [
        ("text 1", None, None),
        ("text 3", None, None),
    ]
    assert made[1].logprobs is not None, "what was made stays as it was"


def test_there_is_a_choice_only_when_more_are_made_than_returned() -> None:  # holds G103
    assert BestOf.of(SamplingParams(n=2)) is None
    assert BestOf.of(SamplingParams(n=2, best_of=2)) is None
    assert BestOf.of(SamplingParams(n=2, best_of=3, logprobs=0)) == BestOf(2, shows_logprobs=True)
