"""Decodes token ids to text while they arrive, with any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from enginebay.contracts.text import TextDecoder, Tokenizer

UNFINISHED = "\ufffd"
"""The character that decoders return for bytes that are not a character, or not yet."""

MAX_HELD_TOKENS = 8
"""Max tokens to hold back. A character has at most 4 bytes and therefore at most 4 tokens, so more
held tokens do not become a character.
"""


class IncrementalDetokenizer(TextDecoder):
    """Decodes token ids to text while they arrive. The parts join to the text of all ids decoded at
    once.

    Bytes that are not a whole character yet are held back. The text of a token depends on the
    tokens before it (leading spaces, bytes). New tokens are therefore decoded together with the
    tokens of the last part, whose text is then removed: the technique of two offsets known from
    text-generation-inference. A push decodes only its own tokens, held tokens and the last part.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
    ) -> None:
        """The text continues that of the token ids `after`."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._after = after
        """Tokens before the stream, until the first push decodes them."""
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the new text that later tokens cannot change; may be ""."""
        # Lists are replaced, not changed, so that a copy of this object stays as it is.
        self._held = [*self._held, *token_ids]
        if not self._held:
            return ""
        if self._after:
            self._context, self._after = self._context_in(self._after), ()
        decode, skip, context = self._tokenizer.decode, self._skip, self._context
        before = len(decode(context, skip_special_tokens=skip)) if context else 0
        text = decode(context + self._held, skip_special_tokens=skip)[before:]
        if text and not text.endswith(UNFINISHED):
            self._context, self._held = self._held, []
            return text
        if text:
            for cut in range(len(self._held) - 1, max(0, len(self._held) - 4), -1):
                part = self._text_of(self._held[:cut])
                if part and not part.endswith(UNFINISHED):
                    return self._give(cut, part)
        return self._give_up_waiting(text) if len(self._held) > MAX_HELD_TOKENS else ""

    def flush(self) -> str:
        """Return the held text at the end of the stream, with U+FFFD for incomplete characters. A
        later push begins a new text.
        """
        text = self._text_of(self._held) if self._held else ""
        self._context, self._held, self._after = [], [], ()
        return text

    def _context_in(self, token_ids: Sequence[int]) -> list[int]:
        """Return the fewest last tokens that have a text which ends with a whole character; all
        tokens if none has a text, and [] if none of the texts ends so.
        """
        text = ""
        for start in range(len(token_ids) - 1, -1, -1):
            text = self._tokenizer.decode(list(token_ids[start:]), skip_special_tokens=self._skip)
            if text and not text.endswith(UNFINISHED):
                return list(token_ids[start:])
        return [] if text else list(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return (
            self._tokenizer.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""
        )

    def _text_of(self, token_ids: list[int]) -> str:
        """Return the text that the tokens add after the context."""
        return self._decode(self._context + token_ids)[len(self._decode(self._context)) :]

    def _give(self, num_tokens: int, text: str) -> str:
        self._context, self._held = self._held[:num_tokens], self._held[num_tokens:]
        return text

    def _give_up_waiting(self, text: str) -> str:
        """Limit the number of held tokens: drop tokens without text, and return bytes that are not
        a character as they are.

        The held tokens are cut where both sides decode separately to the same text as together, so
        that no character is split.
        """
        if not text:
            self._held = []
            return ""
        for cut in range(len(self._held) - 1, 0, -1):
            part = self._text_of(self._held[:cut])
            if part and part + self._decode(self._held[cut:]) == text:
                return self._give(cut, part)
        return self._give(len(self._held), text)
