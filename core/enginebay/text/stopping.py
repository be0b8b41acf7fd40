"""Stop sequences: finds sequences of token ids that end a completion, token by token."""

from __future__ import annotations

from collections.abc import Sequence

Sequences = Sequence[Sequence[int]]
"""Stop sequences of at least one token id each."""


def length_of_match(output: Sequence[int], sequences: Sequences) -> int:
    """Return the length of the longest stop sequence that `output` ends with, or 0."""
    return max((len(one) for one in sequences if _ends_with(output, one)), default=0)


def end_of_match(output: Sequence[int], sequences: Sequences, start: int = 0) -> int | None:
    """Return the first `end` > `start` for which output[:end] ends with a stop sequence, or None.
    The sequence may begin before `start`.
    """
    for end in range(start + 1, len(output) + 1):
        if any(output[end - 1] == one[-1] and _ends_with(output[:end], one) for one in sequences):
            return end
    return None


def length_of_beginning(output: Sequence[int], sequences: Sequences) -> int:
    """Return how many of the last tokens may be the beginning of a stop sequence: the length of the
    longest end of `output` with which a longer stop sequence begins.
    """
    longest = max((len(one) - 1 for one in sequences), default=0)
    for length in range(min(longest, len(output)), 0, -1):
        tail = list(output[len(output) - length :])
        if any(length < len(one) and list(one[:length]) == tail for one in sequences):
            return length
    return 0


class SequenceChecker:
    """Finds stop sequences in a stream of tokens, and holds back tokens that may be the beginning
    of a stop sequence.

    If several sequences match, the one that ends first counts, and the longest of those that end at
    the same token. A sequence that ends within the first `min_tokens` tokens does not count.
    """

    def __init__(self, sequences: Sequences, min_tokens: int = 0) -> None:
        self._sequences = sequences
        self._num_early = min_tokens
        self._held: list[int] = []
        self.stopped = False

    def push(self, token_id: int) -> list[int]:
        """Add a token. Of the tokens held back so far and the new one, return those that cannot be
        part of a stop sequence any more.
        """
        # A sequence that ends here begins in the held tokens, because its beginning was held back
        # from its first token on.
        self._held.append(token_id)
        is_early, self._num_early = self._num_early > 0, self._num_early - 1
        length = 0 if is_early else length_of_match(self._held, self._sequences)
        self.stopped = length > 0
        sure = len(self._held) - (length or length_of_beginning(self._held, self._sequences))
        given, self._held = self._held[:sure], [] if self.stopped else self._held[sure:]
        return given

    @property
    def holds(self) -> bool:
        """Whether tokens are held back."""
        return bool(self._held)

    def flush(self) -> list[int]:
        """Return the tokens that are held back, at the end of the stream."""
        given, self._held = self._held, []
        return given


def _ends_with(output: Sequence[int], sequence: Sequence[int]) -> bool:
    start = len(output) - len(sequence)
    return start >= 0 and list(output[start:]) == list(sequence)
