"""Grammars on the host: what is compiled, what is refused, and that texts drawn from masks keep to
their grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest

from enginebay.contracts.constraint import Vocabulary, num_words, with_tokens
from enginebay.contracts.processor import Sizes
from enginebay.contracts.text import Tokenizer
from enginebay.errors import RequestError, UnsupportedError
from enginebay.grammar import Constraint, Grammar, Structure
from enginebay.text.guides.guide import MAX_GRAMMARS, Guides, structure_of
from enginebay.text.guides.guided_grammar import Llguidance
from enginebay.text.tokenizer import TextTokenizer
from enginebay.types import SamplingParams
from enginebay_models.tokenizer import load_tokenizer
from enginebay_samplers.guided import Guided
from tests.brief import DEMO
from tests.unit.schemas import bounded_schema

EOS = 2
PADDED = 2100
"""More logits than the tokenizer has tokens."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Guides:
    return Guides(lambda: Llguidance(Vocabulary(tokenizer, PADDED, (0, EOS))))


def grammar_of(guides: Guides, **fields: Any) -> Grammar:
    grammar = guides.grammar(SamplingParams(**fields))
    assert grammar is not None, "a structure was asked for"
    return grammar


def allowed(constraint: Constraint) -> np.ndarray:
    bits = constraint.bits()
    assert bits.dtype == np.uint32
    assert bits.shape == (num_words(PADDED),)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def drawn(constraint: Constraint, rng: np.random.Generator, most: int = 400) -> list[int] | None:
    """Tokens drawn evenly from the masks until the text can only end, or ends by chance; None when
    that never came.
    """
    token_ids: list[int] = []
    for _ in range(most):
        if constraint.is_done or (constraint.may_end and rng.random() < 0.2):
            return token_ids
        token_ids.append(int(rng.choice(allowed(constraint))))
        constraint.accept(token_ids[-1])
    return None


def finished_text(guides: Guides, tokenizer: Tokenizer, seed: int, **fields: Any) -> str:
    grammar, rng = grammar_of(guides, **fields), np.random.default_rng(seed)
    token_ids = next(ids for _ in range(20) if (ids := drawn(grammar.start(), rng)) is not None)
    return tokenizer.decode(token_ids)


@pytest.mark.parametrize("seed", range(40))
def test_random_texts_of_bounded_schemas_are_valid(
    guides: Guides, tokenizer: Tokenizer, seed: int
) -> None:
    schema = bounded_schema(np.random.default_rng(seed))
    text = finished_text(guides, tokenizer, seed, json_schema=schema)
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "regex", [r"[a-z]{2,8}-\d+", "yes|no", r"(é|日本|/)+x", r"(no|yes) [^a-z\n]{1,9}\n"]
)
def test_random_texts_match_their_expression(
    guides: Guides, tokenizer: Tokenizer, regex: str
) -> None:
    for seed in range(5):
        assert re.fullmatch(regex, finished_text(guides, tokenizer, seed, regex=regex))


def test_random_texts_are_choices_and_words_of_their_grammar(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    choice = ("red", "red wine", 'a "quoted"\n\\', "/é日/i")
    texts = {finished_text(guides, tokenizer, seed, choice=choice) for seed in range(40)}
    assert texts == set(choice)
    lark = 'start: term (("+" | "-") term)*\nterm: /[0-9]{1,3}/ | "(" start ")"\n'
    for seed in range(10):
        text = finished_text(guides, tokenizer, seed, grammar=lark)
        eval(re.sub(r"\b0+(?=\d)", "", text))  # sums that Python reads too, but for leading zeros


def test_json_is_compact_unless_the_schema_says_otherwise(guides: Guides) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for flexible in (False, True):
        constraint = grammar_of(
            guides,
            json_schema=schema
            | ({"x-guidance": {"whitespace_flexible": True}} if flexible else {}),
        ).start()
        constraint.accept(94)
        assert (220 in allowed(constraint)) is flexible or flexible == (
            len(allowed(constraint)) > 1
        )


def test_ends_of_sequence_and_padding_are_never_in_a_mask(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    constraint = grammar_of(guides, regex="a*").start()
    assert constraint.may_end
    assert not constraint.is_done
    ids = allowed(constraint)
    assert len(ids)
    assert not {0, EOS} & set(ids.tolist())
    assert ids.max() < 2048, "ids of no token"
    ending = with_tokens(constraint.bits(), (0, EOS))
    assert set(np.flatnonzero(np.unpackbits(ending.view(np.uint8), bitorder="little"))) == {
        *ids,
        0,
        EOS,
    }
    assert np.array_equal(allowed(constraint), ids)


def test_completions_of_a_grammar_go_their_own_way(guides: Guides) -> None:
    grammar = grammar_of(guides, choice=("ab", "cd"))
    one, other = grammar.start(), grammar.start()
    before = allowed(other)
    one.accept(int(allowed(one)[0]))
    assert np.array_equal(allowed(other), before)
    assert np.array_equal(allowed(grammar.start()), before)


def test_a_token_that_is_not_allowed_is_named(guides: Guides) -> None:
    constraint = grammar_of(guides, choice=("ab",)).start()
    with pytest.raises(RequestError, match="disallowed token 600 under the grammar"):
        constraint.accept(600)


REFUSED = [
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "not supported: uniqueItems"),
    ({"json_schema": {"type": "string", "maxLenght": 3}}, "not supported: maxLenght"),
    ({"json_schema": {"properties": {"a": {"items": {"nullable": True}}}}}, ("nullable.*in "
        "/properties/a/items")),
    ({"json_schema": {"not": {}}}, "not supported: not"),
    ({"json_schema": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, "oneOf"),
    ({"json_schema": {"type": "objec"}}, "Invalid type: objec"),
    ({"json_schema": {"type": "string", "format": "foo"}}, "Unknown format: foo"),
    ({"json_schema": {"$ref": "http://localhost/x"}}, "localhost"),
    ({"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable"),
    ({"json_schema": {"type": "object", "minProperties": 3}}, "minProperties = 3"),
    ({"json_schema": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
    ({"json_schema": "{"}, "json_schema that cannot be read"),
    ({"json_schema": "[1]"}, "it is a list"),
    ({"json_schema": {"const": object()}}, "not JSON serializable"),
    ({"json_schema": {"minimum": float("nan")}}, "cannot be read"),
    ({"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}, (r"levels of lists and objects or "
        r"more. Allowed: 100 \(guided_limits.depth\)")),
    ({"json_schema": {"pattern": "\ud800"}}, "json_schema = "),
    ({"regex": "["}, "unclosed character class"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": ""}, "only the empty text"),
    ({"regex": r"[^\x00-\x{10ffff}]"}, "regex = "),
    ({"regex": "\ud800"}, "regex = "),
    ({"choice": [""]}, "only the empty text"),
    ({"grammar": "nope"}, "Expected token ':'"),
    ({"grammar": '{"grammars": []}'}, "not a Lark text"),
    ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}'},
        "uniqueItems"),
    ({"regex": "a", "json_object": True}, "json_object and regex in one request"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=[reason[:24] for _, reason in REFUSED])
def test_what_cannot_be_held_is_refused_with_its_reason(
    guides: Guides, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        guides.grammar(SamplingParams(**fields))
    assert "Allowed: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_compiled_for_requests_without_a_structure() -> None:
    def fail() -> Llguidance:
        raise AssertionError("a library was made")

    assert Guides(fail).grammar(SamplingParams()) is None


def test_compiled_grammars_are_kept_and_their_number_is_bounded(tokenizer: Tokenizer) -> None:
    library = Llguidance(Vocabulary(tokenizer, PADDED, (EOS,)))
    compiled: list[Structure] = []

    class Counting(Llguidance):
        def __init__(self) -> None:
            pass

        def compile(self, structure: Structure) -> Grammar:
            compiled.append(structure)
            return library.compile(structure)

    guides = Guides(Counting)
    asked = [SamplingParams(choice=[str(i)]) for i in range(MAX_GRAMMARS + 1)]
    assert guides.grammar(asked[0]) is guides.grammar(asked[0])
    for params in asked:
        guides.grammar(params)
    assert len(compiled) == MAX_GRAMMARS + 1
    guides.grammar(asked[-1])
    assert len(compiled) == MAX_GRAMMARS + 1
    guides.grammar(asked[0])  # the oldest was forgotten
    assert len(compiled) == MAX_GRAMMARS + 2


def test_a_schema_as_text_is_the_schema_as_a_dict_in_the_same_order() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    as_text, as_dict = (
        structure_of(SamplingParams(json_schema=s)) for s in (json.dumps(schema), schema)
    )
    assert as_text == as_dict
    assert as_text is not None
    assert as_text.text.index('"b"') < as_text.text.index('"a"')


def test_a_tokenizer_that_is_not_fast_is_refused() -> None:
    class Slow:
        chat_template = None

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [ord(c) for c in text]

        def decode(
            self,
            token_ids: Sequence[int],
            *,
            skip_special_tokens: bool,
            clean_up_tokenization_spaces: bool,
        ) -> str:
            return "".join(map(chr, token_ids))

    with pytest.raises(UnsupportedError, match=r"tokenizer of type Slow.*fast tokenizer"):
        Llguidance(Vocabulary(TextTokenizer(Slow()), 100, (0,)))  # type: ignore[arg-type]


def test_the_device_keeps_the_tokens_of_the_mask() -> None:
    vocab = 77
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, vocab)).astype(np.float32)
    keep = rng.random((3, vocab)) < 0.3
    padded = np.zeros((3, num_words(vocab) * 32), np.uint8)
    padded[:, :vocab] = keep
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    masked = np.asarray(jax.jit(lambda x, own: Guided()(x, own, None))(logits, {"bits": bits}))  # type: ignore[arg-type]
    np.testing.assert_array_equal(masked, np.where(keep, logits, -np.inf))
    assert Guided().fields(Sizes(vocab, 10))["bits"].shape == (num_words(vocab),)


def test_a_refusal_of_a_long_grammar_is_short(guides: Guides) -> None:
    with pytest.raises(RequestError, match="Expected token ':'") as caught:
        guides.grammar(SamplingParams(grammar="x" * 5000))
    assert len(str(caught.value)) < 1500
