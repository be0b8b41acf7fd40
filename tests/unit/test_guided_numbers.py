"""Numbers under JSON schemas: a number may be written if and only if jsonschema finds it valid, at
any edge of a bound; and malformed keywords are refused.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest

from enginebay.contracts.constraint import Vocabulary
from enginebay.errors import RequestError
from enginebay.grammar import Grammar, Structure
from enginebay.text.guides.guided_grammar import Llguidance
from tests.unit.test_text import byte_level

VALUES = (0, 1, -1, 2, 5, 10, 100, 0.5, 0.001, 0.25, 1.5, -0.5, -1.5, 2.5, 99.99, -10, -3, 0.1)
STEPS = (0, 1, -1, 0.5, -0.5, 0.1, -0.1, 0.01, -0.01, 0.001, -0.001, 0.25, -0.25)
MULTIPLES = (1, 2, 3, 0.5, 0.25, 0.1, 10, 1.5)
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


@functools.cache
def library() -> Llguidance:
    return Llguidance(Vocabulary(byte_level(), 305, (0,)))


def grammar_of(schema: Any) -> Grammar:
    return library().compile(Structure("json_schema", json.dumps(schema)))


def allows(grammar: Grammar, text: str) -> bool:
    constraint = grammar.start()
    for token_id in byte_level().encode(text, add_special_tokens=False):
        if not constraint.bits()[token_id // 32] >> np.uint32(token_id % 32) & 1:
            return False
        constraint.accept(token_id)
    return constraint.may_end


def written(value: float) -> list[str]:
    if value == int(value):
        return [str(int(value)), f"{int(value)}.0", *(["-0", "-0.0"] if not value else [])]
    return [f"{value:.9f}".rstrip("0")]


def is_valid(schema: dict[str, Any], text: str) -> bool:
    """Whether a number is valid; multiples are exact, where jsonschema divides floats."""
    others = {name: value for name, value in schema.items() if name != "multipleOf"}
    multiple = Decimal(str(schema.get("multipleOf", text)))
    whole = not multiple or Decimal(text) % multiple == 0
    return whole and jsonschema.Draft202012Validator(others).is_valid(json.loads(text))


def random_schema(rng: np.random.Generator) -> dict[str, Any]:
    low, high = sorted(VALUES[i] for i in rng.integers(0, len(VALUES), 2))
    bounds = dict(zip(BOUNDS, (low, low, high, high), strict=True))
    schema: dict[str, Any] = {"type": str(rng.choice(["number", "integer"]))}
    schema |= {name: value for name, value in bounds.items() if rng.random() < 0.4}
    if rng.random() < 0.3:
        schema["multipleOf"] = MULTIPLES[rng.integers(len(MULTIPLES))]
    return schema


@pytest.mark.parametrize(
    ("first", "count"), [(0, 100), pytest.param(1000, 2000, marks=pytest.mark.long)]
)
def test_no_number_outside_its_bounds_is_allowed(first: int, count: int) -> None:
    num_compiled = 0
    for seed in range(first, first + count):
        schema = random_schema(np.random.default_rng(seed))
        try:
            grammar = grammar_of(schema)
        except RequestError:
            continue  # no value satisfies it
        num_compiled += 1
        edges = {schema[name] for name in BOUNDS if name in schema} | {0}
        near = {round(edge + step, 9) for edge in edges for step in STEPS}
        for text in [text for value in near for text in written(value)]:
            assert is_valid(schema, text) or not allows(grammar, text), (schema, text)
    assert num_compiled > count / 2


def decimal_of(rng: np.random.Generator) -> float:
    """A number of up to 4 decimals, near 0 or far from it."""
    return round(float(rng.normal() * 10.0 ** rng.integers(-1, 4)), int(rng.integers(0, 5)))


def other_schema(rng: np.random.Generator) -> dict[str, Any]:
    """Like random_schema, with bounds and multiples of more decimals."""
    low, high = sorted(decimal_of(rng) for _ in range(2))
    bounds = dict(zip(BOUNDS, (low, low, high, high), strict=True))
    schema: dict[str, Any] = {"type": str(rng.choice(["number", "number", "integer"]))}
    schema |= {name: value for name, value in bounds.items() if rng.random() < 0.4}
    if rng.random() < 0.3:
        schema["multipleOf"] = float(rng.choice([0.01, 0.02, 0.05, 0.125, 0.25, 0.75, 3]))
    return schema


def shortest(value: float) -> str:
    """A number as a model writes it, without an exponent or zeros at the end."""
    return f"{value:.9f}".rstrip("0").rstrip(".") if value else "0"


def cut(value: float) -> list[float]:
    """A number with fewer decimals, nearer to 0."""
    return [math.trunc(value * 10**places) / 10**places for places in range(4)]


@pytest.mark.parametrize(
    ("first", "count"), [(0, 60), pytest.param(5000, 2000, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("make", [random_schema, other_schema])
def test_a_number_may_be_written_exactly_if_it_is_valid(
    make: Callable[[np.random.Generator], dict[str, Any]], first: int, count: int
) -> None:
    num_valid = 0
    for seed in range(first, first + count):
        rng = np.random.default_rng(seed)
        schema = make(rng)
        edges = [schema[name] for name in BOUNDS if name in schema] or [0.0]
        near = [edge + step for edge in edges for step in rng.choice(STEPS, 4)]
        inside = [float(rng.uniform(min(edges) - 1, max(edges) + 1)) for _ in range(3)]
        inside += [float(rng.integers(-20, 20) * schema.get("multipleOf", 0.1))]
        values = {round(value, 9) for one in (*edges, *near, *inside) for value in (one, *cut(one))}
        texts = {shortest(value) for value in values}
        valid = {text for text in texts if is_valid(schema, text)}
        num_valid += len(valid)
        try:
            grammar = grammar_of(schema)
        except RequestError:
            assert not valid, (schema, valid)
            continue
        assert {text for text in texts if allows(grammar, text)} == valid, schema
    assert num_valid > 3 * count


@pytest.mark.parametrize(
    ("schema", "refused", "kept"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0", "0.25"),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "1", "1.25"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.001}, "0", "0.0005"),
        ({"minimum": -3.5, "exclusiveMaximum": -3}, "-3", "-3.25"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0", "-0.25"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "0", "0.25"),
        (
            {"$ref": "#/$defs/a", "maximum": 0.5, "$defs": {"a": {"exclusiveMinimum": 0}}},
            "0",
            "0.1",
        ),
        ({"exclusiveMinimum": 10**6, "maximum": 10**6 + 0.5}, "1000000", "1000000.25"),
    ],
)
def test_an_exclusive_bound_is_not_let_through(
    schema: dict[str, Any], refused: str, kept: str
) -> None:
    grammar = grammar_of({"type": "number", **schema})
    assert not allows(grammar, refused)
    assert allows(grammar, kept)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": ["number", "null"], "maximum": 9.99}, "{}"),
        ({"maximum": 9.99}, "{}"),
        ({"anyOf": [{"type": "number", "maximum": 9.99}, {"type": "null"}]}, "{}"),
        ({"allOf": [{"type": "number", "maximum": 9.99}, {"minimum": 9.9}]}, "{}"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "number", "maximum": 9.99}}}, "{}"),
        ({"type": "array", "items": {"type": "number", "maximum": 9.99}}, "[1,{}]"),
        ({"properties": {"a": {"type": "number", "maximum": 9.99}}}, '{{"a":{}}}'),
    ],
)
def test_a_number_in_any_place_may_have_fewer_decimals_than_its_bound(
    schema: dict[str, Any], text: str
) -> None:
    grammar = grammar_of(schema)
    assert [allows(grammar, text.format(number)) for number in (9.9, 9.99, 9.999)] == [
        True,
        True,
        False,
    ]
    if "null" in json.dumps(schema):
        assert allows(grammar, "null")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "number", "multipleOf": -2}, "multipleOf = -2"),
        ({"type": "array", "items": {"type": "integer", "multipleOf": -1}}, "multipleOf = -1"),
        ({"allOf": []}, "allOf = "),
        ({"type": "array", "prefixItems": []}, "prefixItems = "),
        ({"$defs": 5}, r"\$defs = 5"),
        ({"definitions": [1]}, "definitions = "),
        ({"$defs": {"a": 5}}, r"\$defs with 5"),
        ({"type": "number", "exclusiveMinimum": True}, "exclusiveMinimum = true"),
        ({"type": "number", "maximum": 10**400}, "number out of range"),
        ({"type": "number", "exclusiveMinimum": -(10**400)}, "number out of range"),
    ],
)
def test_a_malformed_keyword_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        grammar_of(schema)


@pytest.mark.parametrize("count", [2000, 10_000])
def test_as_many_choices_as_the_limit_allows(count: int) -> None:
    for form, value in (
        ("choice", [f"it{i}" for i in range(count)]),
        ("json_schema", {"enum": [f"it{i}" for i in range(count)]}),
    ):
        grammar = library().compile(Structure(form, json.dumps(value)))  # type: ignore[arg-type]
        quote = '"' if form == "json_schema" else ""
        assert allows(grammar, f"{quote}it{count - 1}{quote}")
        assert not allows(grammar, f"{quote}it{count}{quote}")


def test_a_choice_may_begin_another_one() -> None:
    grammar = library().compile(Structure("choice", json.dumps(["a", "ab", "a b", "é"])))
    assert [allows(grammar, text) for text in ("a", "ab", "a b", "é", "b", "abb", "")] == [
        *[True] * 4,
        *[False] * 3,
    ]
