"""Untrusted requests: parameters, prompts, messages, chat templates and constraints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from enginebay import LLM, SamplingParams
from enginebay.config import make_config
from enginebay.config_sections import TemplateLimits
from enginebay.contracts.text import Tokenizer
from enginebay_models.tokenizer import load_tokenizer
from tests.brief import BRIEF, DEMO
from tests.hostile.inputs import VALUES, few_or_all, hold, is_refused
from tests.unit.serving import SIZES
from tests.unit.test_guided_limits import chosen, guides_of

CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")
FIELDS = sorted(set(SamplingParams.model_fields) - set(CONSTRAINTS))


@pytest.fixture
def llm(faked: None) -> Iterator[LLM]:
    with LLM(config=make_config({"model": BRIEF, **SIZES})) as made:
        yield made


PARAMETERS = st.dictionaries(st.sampled_from([*FIELDS, "x" * 500]), VALUES, min_size=1, max_size=3)
PROMPTS = st.one_of(
    st.just("Once"), st.just("Once"), VALUES, st.lists(st.integers(-3, 2050), max_size=5)
)


@few_or_all(60, 900)
def test_parameters_and_prompts(llm: LLM, count: int) -> None:
    def generate(pair: tuple[dict[str, Any], Any]) -> None:
        params = SamplingParams(**pair[0])
        params.max_tokens = min(params.max_tokens or 4, 4)
        params.n, params.best_of = min(params.n, 4), None
        params.logprobs = params.prompt_logprobs = None  # the fake engine returns none
        llm.generate(pair[1], params)

    assert hold(st.tuples(PARAMETERS, PROMPTS), generate, count) > count // 2
    assert llm.generate("Once upon", SamplingParams(max_tokens=3))[0].num_generated_tokens == 3


MESSAGES = st.one_of(
    VALUES,
    st.lists(
        st.dictionaries(
            st.sampled_from(["role", "content", "name", "x"]), VALUES | st.just("user"), max_size=4
        ),
        max_size=3,
    ),
)


@few_or_all(10, 200)
def test_messages(llm: LLM, count: int) -> None:
    assert (
        hold(MESSAGES, lambda given: llm.chat(given, SamplingParams(max_tokens=2)), count)
        > count // 2
    )


PIECES = [
    "{{", "}}", "{%", "%}", "{#", " for m in messages ", " endfor ", " if ", " endif ", "messages",
    "m.content", "[0]", ".__class__", "|tojson", "| join", "raise_exception('x')", " macro f() ",
    " endmacro ", "f()", "range(9**9)", "'a' * 10**9", "%", "\n", "é",
    "{% for i in range(10**7) %}{{ i }}{% endfor %}", "{{ messages[9].x.y }}", "{{ 1 / 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ dict(a=1) }}", "{% include 'x' %}",
    "{{ cycler }}", "(" * 3000, "{{ namespace(x=1) }}", "{% set x = messages %}",
    "{{ 9 ** 9 ** 9 }}", "{% break %}", "{{ tools | tojson(indent=10**6) }}",
]  # fmt: skip
TEMPLATES = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), min_size=1, max_size=8).map(
    "".join
)


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = load_tokenizer(DEMO)
    made.limit_templates(TemplateLimits(time_s=0.5, memory_bytes=64 << 20, max_output_chars=1000))
    yield made
    made.close()


@few_or_all(6, 400)
def test_chat_templates(tokenizer: Tokenizer, count: int) -> None:
    messages = [{"role": "user", "content": "hello"}]

    def render(template: str) -> None:
        tokenizer.apply_chat_template(messages, chat_template=template)

    hold(TEMPLATES, render, count)
    assert tokenizer.apply_chat_template(messages, chat_template="{{ messages[0].content }}")


REGEX = st.lists(
    st.sampled_from([*"ab()[]{}*+?|\\^$.-", "{1000}", "(a|b)*a", "\\p{L}", "(?=", "\\1", "é"]),
    max_size=12,
).map("".join)
GRAMMARS = st.lists(
    st.sampled_from(
        [
            "start:",
            " a",
            " b",
            "\n",
            "a:",
            '"x"',
            "/x/",
            "|",
            "(",
            ")",
            "*",
            "+",
            "?",
            "[",
            "~1..9",
            "%json {}",
            "start",
        ]
    ),
    max_size=14,
).map("".join)
SCHEMAS = st.dictionaries(
    st.sampled_from(
        [
            "type",
            "properties",
            "items",
            "anyOf",
            "allOf",
            "$ref",
            "$defs",
            "enum",
            "pattern",
            "minLength",
            "maxItems",
            "const",
        ]
    ),
    VALUES
    | st.sampled_from(
        ["string", "object", "#", {"a": {"$ref": "#"}}, [{"type": "integer"}], "(a|b)*"]
    ),
    max_size=4,
)
CONSTRAINT = st.one_of(
    st.tuples(st.just("regex"), REGEX | VALUES),
    st.tuples(st.just("grammar"), GRAMMARS | VALUES),
    st.tuples(st.just("json_schema"), SCHEMAS | VALUES),
    st.tuples(st.just("choice"), st.lists(st.text(max_size=5), max_size=5) | VALUES),
)


@few_or_all(10, 700)
def test_constraints(tokenizer: Tokenizer, count: int) -> None:
    guides = guides_of(tokenizer, chosen())

    def compile_one(pair: tuple[str, Any]) -> None:
        guides.grammar(SamplingParams(**{pair[0]: pair[1]}))

    try:
        assert hold(CONSTRAINT, compile_one, count) > count // 4
        assert not is_refused(lambda: guides.grammar(SamplingParams(regex="a+")))
    finally:
        guides.close()
