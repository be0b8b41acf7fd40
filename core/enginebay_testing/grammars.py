"""Conformance suite of grammar libraries: masks match every text that a structure allows,
constraints are independent, and bad structures are refused.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
from collections.abc import Callable, Mapping

import numpy as np

from enginebay.contracts.constraint import GrammarLibrary, Vocabulary, num_words
from enginebay.errors import RequestError
from enginebay.grammar import Constraint, Grammar, Structure
from enginebay_testing.token_texts import TokenTexts, example_vocabulary, token_ids_of

MakeLibrary = Callable[[Vocabulary], GrammarLibrary]

WORDS = ("no", "nothing at all", "yes", "yellow sky")
TEXTS: Mapping[Structure, tuple[str, ...]] = {
    Structure("choice", json.dumps(WORDS)): WORDS,
    Structure("regex", "(on|off)-[01]{1,2}"): tuple(
        f"{word}-{end}" for word in ("on", "off") for end in ("0", "1", "00", "01", "10", "11")
    ),
    Structure("json_schema", '{"enum": ["red", 12, true]}'): ('"red"', "12", "true"),
    Structure("grammar", 'start: "up" | "down" "!"'): ("up", "down!"),
}
"""Structures, and all texts that each structure allows."""

MALFORMED = (
    Structure("regex", "(a"),
    Structure("choice", "[]"),
    Structure("json_schema", '{"type": "strange"}'),
    Structure("grammar", "start: missing"),
)
HOSTILE = (
    Structure("regex", "(" * 200 + "a" + ")" * 200),
    Structure("regex", "(a{1,1000}){1,1000}"),
    Structure("regex", "\x00\ud800"),
    Structure("choice", json.dumps(["a\x00b", "\u2028", "x" * 5000])),
    Structure("json_schema", '{"$ref": "#"}'),
    Structure("grammar", "start: start"),
)
"""Structures that a library may refuse, but that must cause no harm."""

THREADS = 4
DEADLOCK_S = 120.0


def grammar_checks(make: MakeLibrary) -> list[tuple[str, Callable[[], None]]]:
    """Return every check of the suite, by name; `make` makes the library over a vocabulary."""
    checks = (
        masks_allow_the_texts_and_nothing_else,
        each_constraint_goes_its_own_way,
        masks_stay_as_they_were,
        other_tokens_are_refused,
        malformed_structures_are_refused,
        hostile_structures_do_no_harm,
        threads_get_the_same_masks,
    )
    return [(check.__name__, functools.partial(_run, check, make)) for check in checks]


def _run(check: Callable[[GrammarLibrary], None], make: MakeLibrary) -> None:
    check(make(example_vocabulary()))


@functools.cache
def token_texts() -> TokenTexts:
    """Return the token texts of the vocabulary that the checks use."""
    return TokenTexts(example_vocabulary())


def masks_allow_the_texts_and_nothing_else(library: GrammarLibrary) -> None:
    """At every place of every text, the mask allows exactly the tokens that continue towards one of
    the texts, and may_end is set where a text is complete. A library may refuse a form of structure
    that it does not support.
    """
    served = 0
    for structure, texts in TEXTS.items():
        try:
            grammar = library.compile(structure)
        except RequestError:
            continue
        served += 1
        check_texts(grammar, texts, structure.text)
    assert served, f"the library supports none of {', '.join(one.form for one in TEXTS)}"


def check_texts(grammar: Grammar, texts: tuple[str, ...], case: str) -> None:
    """Follow every text of a grammar, split into tokens in two ways."""
    for seed in range(2):
        for text in texts:
            masks_to_text(grammar.start(), text, texts, case, seed)


def masks_to_text(
    constraint: Constraint, text: str, texts: tuple[str, ...], case: str, seed: int = 0
) -> list[np.ndarray]:
    """Accept random allowed tokens until `text` is complete, and return all masks before it."""
    reference, rng = token_texts(), np.random.default_rng(seed)
    begun, masks = "", list[np.ndarray]()
    check_place(constraint, texts, begun, case)
    while begun != text:
        masks.append(constraint.bits())
        able = token_ids_of(masks[-1]) & reference.allowed([text], begun)
        token_id = int(rng.choice(sorted(able)))
        constraint.accept(token_id)
        begun += reference.text(token_id)
        check_place(constraint, texts, begun, case)
    return masks


def check_place(constraint: Constraint, texts: tuple[str, ...], begun: str, case: str) -> None:
    """Check a constraint after the text `begun` against the texts of its grammar.

    Where several characters can come next, every token towards a text must be allowed. Where only
    one character can come next, the library may choose how the text is split into tokens.
    """
    reference, case = token_texts(), f"{case} after {begun!r}"
    bits = constraint.bits()
    assert isinstance(bits, np.ndarray), (
        f"{case}: the mask is a {type(bits).__name__}, expected a NumPy array"
    )
    shape = (num_words(reference.size),)
    assert bits.dtype == np.uint32, f"{case}: the mask has dtype {bits.dtype}, expected uint32"
    assert bits.shape == shape, f"{case}: the mask has shape {bits.shape}, expected {shape}"
    found, expected = token_ids_of(bits), reference.allowed(texts, begun)
    ends = set(example_vocabulary().eos_token_ids)
    assert not found & ends, f"{case}: the mask allows an end-of-sequence token"
    assert found <= expected, (
        f"{case}: the mask allows tokens {sorted(found - expected)[:5]}, which fit no text"
    )
    left = [text for text in texts if text.startswith(begun) and text != begun]
    for text in left:
        assert found & reference.allowed([text], begun), (
            f"{case}: the mask allows no token towards {text!r}"
        )
    if len({text[len(begun)] for text in left}) > 1:
        missing = sorted(expected - found)[:5]
        assert not missing, f"{case}: the mask does not allow tokens {missing}"
    assert constraint.may_end == (begun in texts), f"{case}: may_end is {constraint.may_end}"
    is_done = begun in texts and not left
    assert constraint.is_done == is_done, f"{case}: is_done is {constraint.is_done}"


def served_grammar(library: GrammarLibrary) -> tuple[Grammar, tuple[str, ...]]:
    """Return a grammar of the first structure that the library supports, and its texts."""
    for structure, texts in TEXTS.items():
        try:
            return library.compile(structure), texts
        except RequestError:
            continue
    raise AssertionError("the library supports no structure")


def each_constraint_goes_its_own_way(library: GrammarLibrary) -> None:
    """Each completion of a request, and each restarted request, starts its own constraint; a token
    that one constraint accepts changes no other constraint.
    """
    goes_on_alone(*served_grammar(library))


def goes_on_alone(grammar: Grammar, texts: tuple[str, ...]) -> None:
    """Check that constraints of one grammar are independent."""
    one, other = grammar.start(), grammar.start()
    masks_to_text(one, texts[-1], texts, "a constraint beside another", seed=3)
    masks_to_text(other, texts[0], texts, "a constraint beside one that ended", seed=4)
    check_place(grammar.start(), texts, "", "a constraint that starts after another ended")


def masks_stay_as_they_were(library: GrammarLibrary) -> None:
    """A mask stays unchanged after its constraint has moved on, so that it can be read later."""
    grammar, texts = served_grammar(library)
    alone = masks_to_text(grammar.start(), texts[-1], texts, "the first time")
    copies = [mask.copy() for mask in alone]
    masks_to_text(grammar.start(), texts[-1], texts, "the second time")
    for before, copied in zip(alone, copies, strict=True):
        assert np.array_equal(before, copied), "a mask changed when another constraint moved on"
    constraint = grammar.start()
    before, copied = constraint.bits(), constraint.bits().copy()
    constraint.accept(min(token_ids_of(before)))
    constraint.bits()
    assert np.array_equal(before, copied), "a mask changed when its constraint moved on"


def other_tokens_are_refused(library: GrammarLibrary) -> None:
    """A token that the mask does not allow raises RequestError, at once or at the next mask; other
    constraints of the grammar continue.
    """
    grammar, texts = served_grammar(library)
    reference, vocabulary = token_texts(), example_vocabulary()
    wrong = sorted(set(range(vocabulary.size)) - reference.allowed(texts, ""))
    for token_id in (wrong[len(wrong) // 2], wrong[-1], vocabulary.size + 5):
        constraint = grammar.start()
        try:
            constraint.accept(token_id)
            constraint.bits()
        except RequestError:
            check_place(grammar.start(), texts, "", "a constraint after a refused token")
            continue
        raise AssertionError(f"token {token_id} was accepted, although the mask does not allow it")


def malformed_structures_are_refused(library: GrammarLibrary) -> None:
    """Each malformed structure raises RequestError, and the library keeps working."""
    for structure in MALFORMED:
        try:
            library.compile(structure)
        except RequestError:
            continue
        raise AssertionError(
            f"{structure.form} {structure.text!r} was compiled, expected RequestError"
        )
    served_grammar(library)


def hostile_structures_do_no_harm(library: GrammarLibrary) -> None:
    """Each hostile structure is followed or raises RequestError, and the library keeps working."""
    for structure in HOSTILE:
        try:
            constraint = library.compile(structure).start()
            allowed = token_ids_of(constraint.bits())
            assert allowed or constraint.may_end, f"{structure.text[:40]!r} allows nothing"
            if allowed:
                constraint.accept(min(allowed))
                constraint.bits()
        except RequestError:
            continue
    grammar, texts = served_grammar(library)
    check_place(grammar.start(), texts, "", "after hostile structures")


def threads_get_the_same_masks(library: GrammarLibrary) -> None:
    """Several threads compile and follow grammars of one library at the same time."""

    def check(_: int) -> None:
        grammar, texts = served_grammar(library)
        check_texts(grammar, texts, "in a thread")

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(check, range(THREADS), timeout=DEADLOCK_S):
            pass
