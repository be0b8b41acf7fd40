"""Faulty guides: constraints that nobody checks, grammars of other requests, and what is left after
close().
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from enginebay.contracts.constraint import Vocabulary, forms_of
from enginebay.grammar import Grammar
from enginebay.text.guides.guide import Guides, MakeGuides
from enginebay.types import SamplingParams
from enginebay_testing.guides import guide_checks
from tests.zoo.grammars import Choices, Follows, Shared, Texts

Check = tuple[str, Callable[[], None]]


class Wrapped(Guides):
    """A right guide over lists of texts. Each fault changes one of its methods."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.inner = Guides(lambda: Choices(vocabulary))

    def grammar(self, params: SamplingParams) -> Grammar | None:
        return self.inner.grammar(params)

    def close(self) -> None:
        self.inner.close()


class Always(Wrapped):
    """A request without a structure has a grammar."""

    def grammar(self, params: SamplingParams) -> Grammar | None:
        return self.inner.grammar(params) or Texts(("anything",), Follows)


class Never(Wrapped):
    """Holds no choice."""

    def grammar(self, params: SamplingParams) -> Grammar | None:
        return None if params.choice else self.inner.grammar(params)


class FirstField(Wrapped):
    """Of two structures in a request it takes the choice."""

    def grammar(self, params: SamplingParams) -> Grammar | None:
        if params.choice:
            params = SamplingParams(choice=params.choice)
        return self.inner.grammar(params)


class Unlimited(Wrapped):
    """Compiles whatever is given as a choice."""

    def grammar(self, params: SamplingParams) -> Grammar | None:
        if len(forms_of(params)) == 1 and params.choice:
            return Texts(tuple(params.choice), Follows)
        return self.inner.grammar(params)


class CutsChoices(Wrapped):
    """Takes the first hundred texts of a long choice."""

    def grammar(self, params: SamplingParams) -> Grammar | None:
        if len(params.choice or ()) > 100:
            params = SamplingParams(choice=params.choice[:100])
        return self.inner.grammar(params)


class RaisesValueError(Wrapped):
    """Lets an error of a library through."""

    def grammar(self, params: SamplingParams) -> Grammar | None:
        if params.regex == "(a":
            raise ValueError(params.regex)
        return self.inner.grammar(params)


class ByLength(Wrapped):
    """Keeps grammars by the length of their texts."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._kept: dict[int, Grammar | None] = {}

    def grammar(self, params: SamplingParams) -> Grammar | None:
        made = self.inner.grammar(params)
        return self._kept.setdefault(len(str(params.choice)), made) if params.choice else made


class OneConstraint(Wrapped):
    """All completions of equal requests go on with one constraint."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.inner = Guides(lambda: Shared(vocabulary))


class LeavesThread(Wrapped):
    """Starts a thread that does not end."""

    def grammar(self, params: SamplingParams) -> Grammar | None:
        if params.choice:
            threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()
        return self.inner.grammar(params)


class LeavesProcess(Wrapped):
    """Starts a process that does not end."""

    def grammar(self, params: SamplingParams) -> Grammar | None:
        if params.choice:
            code = "import time; time.sleep(20)"
            self.process = subprocess.Popen([sys.executable, "-c", code])
        return self.inner.grammar(params)


class ClosedForGood(Wrapped):
    """Serves nothing after close()."""

    is_closed = False

    def grammar(self, params: SamplingParams) -> Grammar | None:
        assert not self.is_closed, "closed"
        return self.inner.grammar(params)

    def close(self) -> None:
        self.is_closed = True


class ClosedOnce(Wrapped):
    """A second close() in a row is an error."""

    is_open = True

    def grammar(self, params: SamplingParams) -> Grammar | None:
        self.is_open = True
        return self.inner.grammar(params)

    def close(self) -> None:
        assert self.is_open, "closed already"
        self.is_open = False


class LastOfAll(Wrapped):
    """Answers with the constraint that was asked for last, by whichever thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._barrier = threading.Barrier(2)
        self._last: Grammar | None = None

    def grammar(self, params: SamplingParams) -> Grammar | None:
        made = self.inner.grammar(params)
        if threading.current_thread() is threading.main_thread() or not params.choice:
            return made
        self._last = made
        self._barrier.wait(60)
        return self._last


class LeavesOut(Wrapped):
    """The first text of a choice cannot be said."""

    def grammar(self, params: SamplingParams) -> Grammar | None:
        made = self.inner.grammar(params)
        return Texts(tuple(params.choice[1:]), Follows) if params.choice else made


FAULTS: dict[str, MakeGuides] = {
    "a free request has a grammar": Always,
    "no choice is held": Never,
    "the first of two fields": FirstField,
    "no limit of size": Unlimited,
    "a long choice is cut": CutsChoices,
    "ValueError of a library": RaisesValueError,
    "grammars mixed up by length": ByLength,
    "one constraint for equal requests": OneConstraint,
    "a thread left after close": LeavesThread,
    "a process left after close": LeavesProcess,
    "closed for good": ClosedForGood,
    "closed once": ClosedOnce,
    "another thread's grammar": LastOfAll,
    "the first text is left out": LeavesOut,
}
"""By name, what makes a guide over a vocabulary."""

RIGHT: dict[str, MakeGuides] = {"guides over choices": Wrapped}


def checks(part: Any) -> list[Check]:
    """The suite of a guide."""
    return guide_checks(part, closing_s=0.5)
