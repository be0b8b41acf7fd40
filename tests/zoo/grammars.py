"""Faulty grammar libraries: masks that allow too much or too little, constraints that share what is
their own, and refusals that never come.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from enginebay.contracts.constraint import GrammarLibrary, Vocabulary
from enginebay.errors import RequestError
from enginebay.grammar import Constraint, Grammar, Structure
from enginebay.text.guides.guided_grammar import Llguidance
from enginebay_testing.grammars import grammar_checks, token_texts
from enginebay_testing.token_texts import mask_of, token_ids_of

Check = tuple[str, Callable[[], None]]
Make = Callable[[Vocabulary], GrammarLibrary]

END, PADDING_ID = 2, 2080


class Follows(Constraint):
    """A text that is to be one of several. Each fault changes one of its methods."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts, self.begun = texts, ""

    def bits(self) -> np.ndarray:
        return mask_of(token_texts().allowed(self.texts, self.begun), token_texts().size)

    def accept(self, token_id: int) -> None:
        if token_id not in token_texts().allowed(self.texts, self.begun):
            raise RequestError(f"token {token_id}", "a token of the mask", "Take another.")
        self.begun += token_texts().text(token_id)

    @property
    def may_end(self) -> bool:
        return self.begun in self.texts


class Texts(Grammar):
    """Some texts, and what makes a constraint of them."""

    def __init__(
        self, texts: tuple[str, ...], make: Callable[[tuple[str, ...]], Constraint]
    ) -> None:
        self._texts, self._make = texts, make

    def start(self) -> Constraint:
        return self._make(self._texts)


class Choices(GrammarLibrary):
    """A right library, which serves lists of texts and refuses all else."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        make: Callable[[tuple[str, ...]], Constraint] = Follows,
        change: Callable[[tuple[str, ...]], tuple[str, ...]] = tuple,
    ) -> None:
        self._make, self._change = make, change

    def compile(self, structure: Structure) -> Grammar:
        if structure.form != "choice" or not (texts := tuple(json.loads(structure.text))):
            raise RequestError(f"{structure.form}", "a choice of texts", "Choose another library.")
        return Texts(self._change(texts), self._make)


class AllowsEnd(Follows):
    def bits(self) -> np.ndarray:
        return mask_of({*token_ids_of(super().bits()), END}, token_texts().size)


class AllowsPadding(Follows):
    def bits(self) -> np.ndarray:
        return mask_of({*token_ids_of(super().bits()), PADDING_ID}, token_texts().size)


class Lazy(Follows):
    """The first character is checked, the rest of a token is not."""

    def bits(self) -> np.ndarray:
        reference, able = token_texts(), token_ids_of(super().bits())
        firsts = {reference.text(token_id)[0] for token_id in able}
        more = reference.allowed(("nothing of it", "yesterday"), "")
        return mask_of(able | {i for i in more if reference.text(i)[0] in firsts}, reference.size)


class Longest(Follows):
    """Of the tokens that go on, the longest alone is allowed."""

    def bits(self) -> np.ndarray:
        able = token_ids_of(super().bits())
        best = sorted(able, key=lambda token_id: len(token_texts().text(token_id)))[-1:]
        return mask_of(set(best), token_texts().size)


class Wide(Follows):
    def bits(self) -> np.ndarray:
        return super().bits().astype(np.uint64)


class Short(Follows):
    def bits(self) -> np.ndarray:
        return super().bits()[:-1]


class OneMask(Follows):
    """Writes each mask over the one before."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        super().__init__(texts)
        self._mask = super().bits()

    def bits(self) -> np.ndarray:
        self._mask[:] = super().bits()
        return self._mask


class EndsEarly(Follows):
    @property
    def may_end(self) -> bool:
        return any(text.startswith(self.begun) for text in self.texts) and bool(self.begun)


class NeverEnds(Follows):
    @property
    def may_end(self) -> bool:
        return False


class DoneAtOnce(Follows):
    """Is done with the first text that is whole, though longer ones begin with it."""

    @property
    def is_done(self) -> bool:
        return self.may_end


class AcceptsAll(Follows):
    def accept(self, token_id: int) -> None:
        if token_id in token_texts().allowed(self.texts, self.begun):
            super().accept(token_id)


class RaisesKeyError(Follows):
    def accept(self, token_id: int) -> None:
        self.begun += {i: token_texts().text(i) for i in token_ids_of(self.bits())}[token_id]


class Shared(Choices):
    """All completions of a grammar go on with one constraint."""

    def compile(self, structure: Structure) -> Grammar:
        one = super().compile(structure).start()
        return Texts((), lambda _: one)


class OfOneThread(Choices):
    """Compiles in the thread that made it alone."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._thread = threading.get_ident()

    def compile(self, structure: Structure) -> Grammar:
        assert threading.get_ident() == self._thread, "another thread"
        return super().compile(structure)


class Unable(Choices):
    """Raises what it likes for a form that it does not serve."""

    def compile(self, structure: Structure) -> Grammar:
        if structure.form == "grammar":
            raise NotImplementedError(structure.form)
        return super().compile(structure)


class TakesEmpty(Choices):
    """Compiles a choice of nothing."""

    def compile(self, structure: Structure) -> Grammar:
        if structure.text == "[]":
            return Texts((), Follows)
        return super().compile(structure)


class Breaks(Choices):
    """Serves nothing more after a text that is not UTF-8."""

    is_broken = False

    def compile(self, structure: Structure) -> Grammar:
        self.is_broken |= "\ud800" in structure.text
        if self.is_broken:
            raise RequestError("a broken library", "nothing", "Make another.")
        return super().compile(structure)


def of(make: Callable[[tuple[str, ...]], Constraint]) -> Make:
    """A library with constraints of this kind."""
    return lambda vocabulary: Choices(vocabulary, make)


FAULTS: dict[str, Make] = {
    "the mask allows an end-of-sequence token": of(AllowsEnd),
    "padding is in the mask": of(AllowsPadding),
    "the rest of a token is not checked": of(Lazy),
    "the longest token alone": of(Longest),
    "masks of 64 bits": of(Wide),
    "a mask without its last word": of(Short),
    "one mask for all time": of(OneMask),
    "may end in the middle": of(EndsEarly),
    "may never end": of(NeverEnds),
    "done with the shortest text": of(DoneAtOnce),
    "accepts every token": of(AcceptsAll),
    "KeyError for another token": of(RaisesKeyError),
    "one constraint for all completions": Shared,
    "the last text is left out": lambda vocabulary: Choices(
        vocabulary, change=lambda texts: texts[:-1] or texts
    ),
    "compiles in one thread alone": OfOneThread,
    "NotImplementedError for a form": Unable,
    "a choice of nothing is compiled": TakesEmpty,
    "serves nothing after a hostile text": Breaks,
}
"""By name, what makes a library over a vocabulary."""

RIGHT: dict[str, Make] = {"choices": Choices, "llguidance": Llguidance}


def checks(part: Any) -> list[Check]:
    """The suite of a library."""
    return grammar_checks(part)
