"""Stop sequences: runs of token ids that end a completion, found as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

Sequences = Sequence[Sequence[int]]
"""Runs of at least one token id each."""


def length_of_match(output: Sequence[int], sequences: Sequences) -> int:
    """The length of the longest sequence that `output` ends with; 0 when it ends with none."""
    return max((len(one) for one in sequences if _ends_with(output, one)), default=0)


def end_of_match(output: Sequence[int], sequences: Sequences, start: int = 0) -> int | None:
    """The first end > `start` at which output[:end] ends with a sequence, so that it may begin
    before `start`; None: there is none.
    """
    for end in range(start + 1, len(output) + 1):
        if any(output[end - 1] == one[-1] and _ends_with(output[:end], one) for one in sequences):
            return end
    return None


def length_of_beginning(output: Sequence[int], sequences: Sequences) -> int:
    """How many of the last tokens may become a sequence: the longest end of `output` that one
    begins with, and goes on after.
    """
    longest = max((len(one) - 1 for one in sequences), default=0)
    for length in range(min(longest, len(output)), 0, -1):
        tail = list(output[len(output) - length :])
        if any(length < len(one) and list(one[:length]) == tail for one in sequences):
            return length
    return 0


class SequenceChecker:
    """Finds stop sequences in a stream of tokens, and gives out none that a sequence still to be
    completed would take.

    Of several sequences the one that ends first counts, of those the longest. What ends within the
    first `min_tokens` does not count.
    """

    def __init__(self, sequences: Sequences, min_tokens: int = 0) -> None:
        self._sequences = sequences
        self._num_early = min_tokens
        self._held: list[int] = []
        self.stopped = False

    def push(self, token_id: int) -> list[int]:
        """The tokens that are sure to be no part of a sequence, of those held and this one."""
        # A sequence that ends here began in what is held, because its beginning was held from its
        # first token on.
        self._held.append(token_id)
        is_early, self._num_early = self._num_early > 0, self._num_early - 1
        length = 0 if is_early else length_of_match(self._held, self._sequences)
        self.stopped = length > 0
        sure = len(self._held) - (length or length_of_beginning(self._held, self._sequences))
        given, self._held = self._held[:sure], [] if self.stopped else self._held[sure:]
        return given

    def flush(self) -> list[int]:
        """The tokens held back, now that nothing follows."""
        given, self._held = self._held, []
        return given


def _ends_with(output: Sequence[int], sequence: Sequence[int]) -> bool:
    start = len(output) - len(sequence)
    return start >= 0 and list(output[start:]) == list(sequence)
