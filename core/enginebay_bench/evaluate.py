"""Evaluation: compares a configuration with a reference configuration on a text, at the level of
the model's logits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from enginebay.compose.composition import Progress
from enginebay.compose.stored_bytes import StoredBytes, count_stored_bytes
from enginebay.errors import InputError
from enginebay.serving import LLM
from enginebay_bench.scoring import Scored, scoring
from enginebay_testing.engine_logprobs import log_softmax

ROWS_AT_ONCE = 64
"""Max rows of logits that are converted to f64 together."""


@dataclasses.dataclass(frozen=True)
class EvalSizes:
    """Max number of tokens of a text, tokens per passage (None: as many as fit, at most 512), and
    greedy tokens after each passage.
    """

    num_tokens: int = 2048
    passage_len: int | None = None
    new_tokens: int = 32


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Statistics of KL(reference || subject) in nats over `num_positions`; None where no position
    is finite.
    """

    num_positions: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


@dataclasses.dataclass(frozen=True)
class PassageReport:
    """One passage: its place in the text, its length, and how far the greedy continuations agree.

    `first_divergence` is the index of the first new token that differs, None when all `num_new`
    tokens are equal.
    """

    start: int
    num_tokens: int
    num_new: int
    first_divergence: int | None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Rates are shares of the scored positions; a perplexity is None
    when it is not finite.

    `prefill` covers the text. `decode` covers the greedy continuations up to and including the
    first token that differs, because until there both saw the same tokens. `num_nonfinite` counts
    positions where a logit of the subject or the reference is NaN or infinite; apart from this
    count, they only affect the perplexities.
    """

    num_text_tokens: int
    num_cut_tokens: int
    num_scored: int
    perplexity: float | None
    reference_perplexity: float | None
    prefill: Divergence
    decode: Divergence
    same_argmax: float | None
    num_nonfinite: int
    passages: tuple[PassageReport, ...]
    stored_bytes: StoredBytes
    reference_stored_bytes: StoredBytes


@dataclasses.dataclass(frozen=True)
class Passages:
    """A text in passages: the tokens of each, where it begins in the text, and the number of tokens
    of the whole text.

    Each passage begins with `num_known` special tokens, as the tokenizer puts them before a text.
    """

    token_ids: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    num_known: int
    num_text_tokens: int

    @property
    def num_taken(self) -> int:
        """Return the number of tokens of the text that are in a passage."""
        return sum(len(ids) - self.num_known for ids in self.token_ids)


def split(llm: LLM, text: str, sizes: EvalSizes) -> Passages:
    """Split a text into passages that fit the context; InputError when it is too short to score a
    token.
    """
    context = llm.config.max_model_len
    assert context is not None, "a plan has a max_model_len"
    special = llm.tokenizer.encode("")
    ids = llm.tokenizer.encode(text)
    known = special if ids[: len(special)] == special else []
    ids = ids[len(known) :]
    most = context - sizes.new_tokens - len(known)
    length = min(512, most) if sizes.passage_len is None else sizes.passage_len
    if not 2 <= length <= most:
        raise InputError(
            f"passages of {length} tokens plus {sizes.new_tokens} new tokens in a context of "
            f"{context}",
            f"passages of 2 to {most}" if most >= 2 else "a larger context",
            "Lower --passage-len or --new-tokens, or raise --max-model-len.",
        )
    taken = ids[: sizes.num_tokens]
    starts = tuple(s for s in range(0, len(taken), length) if len(taken) - s + len(known) >= 2)
    if not starts:
        raise InputError(
            f"a text of {len(taken)} tokens to score",
            "at least 2 tokens",
            "Pass a longer text, or raise --num-tokens.",
        )
    pieces = tuple((*known, *taken[s : s + length]) for s in starts)
    return Passages(pieces, starts, len(known), len(ids))


def evaluate(
    make_subject: Callable[[], LLM],
    make_reference: Callable[[], LLM],
    text: str,
    sizes: EvalSizes,
    progress: Progress | None = None,
) -> Evaluation:
    """Score a text with both configurations in turn, and compare the results.

    Only one LLM exists at a time, so that only one model is on the device. The logits of the
    subject are kept on the host meanwhile: tokens of the text and the continuations, times the
    vocabulary, times 4 bytes.
    """
    with make_subject() as subject:
        mine = score_text(subject, text, sizes, "scoring", progress)
    del subject
    with make_reference() as reference:
        if reference.plan.model.info.vocab_size != mine.vocab_size:
            raise InputError(
                f"a reference whose vocabulary has {reference.plan.model.info.vocab_size} tokens",
                f"{mine.vocab_size} tokens, as the subject's vocabulary",
                "Choose a reference model with the same tokenizer.",
            )
        theirs = score_text(
            reference, text, sizes, "scoring the reference", progress, mine.passages
        )
    return compare_scores(
        mine.passages, mine.scored, theirs.scored, mine.stored_bytes, theirs.stored_bytes
    )


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """A text in passages, and the results of one configuration for each of them."""

    passages: Passages
    scored: tuple[Scored, ...]
    stored_bytes: StoredBytes
    vocab_size: int


def score_text(
    llm: LLM,
    text: str,
    sizes: EvalSizes,
    what: str = "scoring",
    progress: Progress | None = None,
    passages: Passages | None = None,
) -> ScoredText:
    """Score a text, or the passages that another configuration scored; InputError as `split`."""
    passages = passages or split(llm, text, sizes)
    vocab_size = llm.plan.model.info.vocab_size
    scored = tuple(_score_all(llm, passages, sizes, what, progress))
    return ScoredText(passages, scored, count_stored_bytes(llm.plan), vocab_size)


def _score_all(
    llm: LLM, passages: Passages, sizes: EvalSizes, what: str, progress: Progress | None
) -> list[Scored]:
    scored = []
    with scoring(llm) as scorer:
        for number, token_ids in enumerate(passages.token_ids, 1):
            scored.append(scorer.score(token_ids, sizes.new_tokens))
            if progress is not None:
                progress(what, number, len(passages.token_ids))
    return scored


def compare_scores(
    passages: Passages,
    mine: Sequence[Scored],
    theirs: Sequence[Scored],
    my_bytes: StoredBytes,
    their_bytes: StoredBytes,
) -> Evaluation:
    """Return the figures of a subject and a reference that scored the same passages."""
    text, decoded = [], []
    reports = []
    for start, subject, reference in zip(passages.starts, mine, theirs, strict=True):
        num, first = len(subject.token_ids), max(passages.num_known, 1) - 1
        diverged = first_divergence(subject.new_token_ids, reference.new_token_ids)
        num_new = len(subject.new_token_ids)
        shared = num_new if diverged is None else diverged + 1
        targets = np.asarray(subject.token_ids[first + 1 :])
        text.append(
            _positions(subject.logits[first : num - 1], reference.logits[first : num - 1], targets)
        )
        rows = slice(num - 1, num - 1 + shared)
        chosen = np.asarray(reference.new_token_ids[:shared])
        decoded.append(_positions(subject.logits[rows], reference.logits[rows], chosen))
        reports.append(PassageReport(start, num - passages.num_known, num_new, diverged))
    whole, continued = _Positions.joined(text), _Positions.joined(decoded)
    finite = np.isfinite(whole.kl)
    return Evaluation(
        num_text_tokens=passages.num_text_tokens,
        num_cut_tokens=passages.num_text_tokens - passages.num_taken,
        num_scored=len(whole.kl),
        perplexity=_perplexity(whole.logprobs),
        reference_perplexity=_perplexity(whole.reference_logprobs),
        prefill=_divergence(whole.kl),
        decode=_divergence(continued.kl),
        same_argmax=float(whole.same_best[finite].mean()) if finite.any() else None,
        num_nonfinite=int((~finite).sum() + (~np.isfinite(continued.kl)).sum()),
        passages=tuple(reports),
        stored_bytes=my_bytes,
        reference_stored_bytes=their_bytes,
    )


def first_divergence(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; None when all are equal."""
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)


@dataclasses.dataclass(frozen=True)
class _Positions:
    """Figures by position: kl f64 (NaN where a logit is not finite), log-probabilities of the
    token, and whether the best tokens are equal.
    """

    kl: np.ndarray
    logprobs: np.ndarray
    reference_logprobs: np.ndarray
    same_best: np.ndarray

    @staticmethod
    def joined(parts: Sequence[_Positions]) -> _Positions:
        names = [field.name for field in dataclasses.fields(_Positions)]
        return _Positions(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in names)
        )


def _positions(mine: np.ndarray, theirs: np.ndarray, targets: np.ndarray) -> _Positions:
    parts = [
        _few_positions(mine[at], theirs[at], targets[at])
        for at in (
            slice(start, start + ROWS_AT_ONCE) for start in range(0, len(mine), ROWS_AT_ONCE)
        )
    ]
    return _Positions.joined(parts)


def _few_positions(mine: np.ndarray, theirs: np.ndarray, targets: np.ndarray) -> _Positions:
    finite = np.isfinite(mine).all(axis=-1) & np.isfinite(theirs).all(axis=-1)
    with np.errstate(invalid="ignore"):
        subject, reference = log_softmax(mine), log_softmax(theirs)
        kl = (np.exp(reference) * (reference - subject)).sum(axis=-1)
    at = np.arange(len(targets))
    return _Positions(
        np.where(finite, np.maximum(kl, 0.0), np.nan),  # rounding may give a value below 0
        subject[at, targets],
        reference[at, targets],
        mine.argmax(axis=-1) == theirs.argmax(axis=-1),
    )


def _perplexity(logprobs: np.ndarray) -> float | None:
    mean = -float(logprobs.mean())
    return math.exp(mean) if math.isfinite(mean) and mean < 700 else None


def _divergence(kl: np.ndarray) -> Divergence:
    finite = kl[np.isfinite(kl)]
    if not len(finite):
        return Divergence(len(kl), None, None, None, None, None)
    p50, p90, p99 = (float(value) for value in np.percentile(finite, [50, 90, 99]))
    return Divergence(len(kl), float(finite.mean()), p50, p90, p99, float(finite.max()))
