"""Whether a variant's results are right, and whether its work is the same as the reference's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

NEAR = {"float32": 1e-3}
NEAR_NARROW = 0.1
"""Largest difference in nats between the reference's log-probabilities of two tokens that may
change places, by dtype: rounding decides between them.
"""

Answers = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class TokenVerdict:
    """How a variant's tokens compare with the reference's. `text` says where they part."""

    verdict: Literal["reference", "equal", "near ties", "wrong", "failed", "cheat", "unknown"]
    text: str = ""

    @property
    def is_right(self) -> bool:
        """Whether its speed may be ranked."""
        return self.verdict in ("reference", "equal", "near ties")


def token_verdict(reference: Answers, found: Answers, dtype: str) -> TokenVerdict:
    """Compare the tokens of each request up to the first one that differs; texts where a program
    gives no tokens.
    """
    near = []
    for place, (wanted, got) in enumerate(zip(reference, found, strict=True)):
        if got.get("token_ids") is None or wanted.get("token_ids") is None:
            if got.get("text") is None:
                return TokenVerdict("unknown", "the program returns neither tokens nor texts")
            if wanted.get("text") is None:
                return TokenVerdict("unknown", "the reference returns no texts")
            if got["text"] != wanted["text"]:
                at = _first_difference(wanted["text"], got["text"])
                return TokenVerdict(
                    "wrong", f"request {place}: its text differs from character {at} on"
                )
            continue
        at = _first_difference(wanted["token_ids"], got["token_ids"])
        if at is None:
            continue
        gap = _gap(wanted, got, at)
        limit = NEAR.get(dtype, NEAR_NARROW)
        if gap is None or not gap <= limit:
            return TokenVerdict("wrong", _named(place, at, wanted, got))
        near.append(f"request {place}, token {at}, {gap:.2g} nats")
    return TokenVerdict("near ties", "; ".join(near)) if near else TokenVerdict("equal")


def same_answer(mine: Mapping[str, Any], its: Mapping[str, Any]) -> bool:
    """Whether two answers to a request have the same tokens, or texts where one has no tokens."""
    by_tokens = mine.get("token_ids") is not None and its.get("token_ids") is not None
    name = "token_ids" if by_tokens else "text"
    return mine.get(name) == its.get(name)


def _first_difference(wanted: Sequence[Any], got: Sequence[Any]) -> int | None:
    """The first place where two sequences differ, if only in length; None if they are equal."""
    for place, (one, other) in enumerate(zip(wanted, got, strict=False)):
        if one != other:
            return place
    return None if len(wanted) == len(got) else min(len(wanted), len(got))


def _gap(wanted: Mapping[str, Any], got: Mapping[str, Any], at: int) -> float | None:
    """How much less likely the other token is by the reference; None where it does not tell."""
    if at >= min(len(wanted["token_ids"]), len(got["token_ids"])) or not wanted.get("logprobs"):
        return None
    known = {int(token): value for token, value in wanted["logprobs"][at].items()}
    first, other = (known.get(one["token_ids"][at]) for one in (wanted, got))
    return None if first is None or other is None else abs(first - other)


def _named(place: int, at: int, wanted: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    first, other = (one["token_ids"] for one in (wanted, got))
    if at >= min(len(first), len(other)):
        return f"request {place}: {len(other)} tokens in place of {len(first)}"
    return f"request {place}, token {at}: {other[at]} in place of {first[at]}"


def other_work(
    facts: Mapping[str, Any],
    reference: Mapping[str, Any],
    requests: Answers,
    of_reference: Answers,
) -> str:
    """Why the runs of a variant are other work than the reference's, or ""."""
    for fact, what in (("dtype", "dtype"), ("weight_format", "weights")):
        mine, other = facts.get(fact), reference.get(fact)
        if None not in (mine, other) and mine != other:
            return f"{what} {mine}, the reference has {other}"
    for mine, other in zip(requests, of_reference, strict=False):
        numbers = mine["num_tokens"], other["num_tokens"]
        if None in numbers:
            return "its number of tokens is not known"
        if numbers[0] != numbers[1]:
            return f"an answer has {numbers[0]} tokens, the reference's {numbers[1]}"
    for name, what in (("cached", "cached"), ("drafted", "drafted")):
        both = [sum(one[name] for one in some) for some in (requests, of_reference)]
        if both[0] != both[1]:
            return f"{both[0]} tokens were {what}, in the reference {both[1]}"
    return ""
