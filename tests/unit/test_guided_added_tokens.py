"""Guided texts may have the text of an added token, such as <tool> or <think>: other tokens spell
it. A grammar may still name the token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from enginebay import LLM, SamplingParams
from enginebay.contracts.constraint import Vocabulary
from enginebay.contracts.text import Tokenizer
from enginebay.errors import RequestError
from enginebay.grammar import Structure
from enginebay.text.guides.guided_grammar import Llguidance
from enginebay.text.tokenizer import TextTokenizer
from tests.pool import few_sizes
from tests.unit.test_continuations import save_model, sentencepiece_like
from tests.unit.test_text import byte_level


def with_added(fast: FastTokenizer) -> FastTokenizer:
    names = [AddedToken(name, special=False, normalized=False) for name in ("<tool>", "two")]
    special = [AddedToken(name, special=True) for name in ("<|end|>", "<s>", "</s>")]
    fast.add_tokens([*names, *special])
    return fast


def bytes_with_added() -> FastTokenizer:
    return with_added(FastTokenizer.from_str(byte_level().inner.backend_tokenizer.to_str()))


def pieces_with_added() -> FastTokenizer:
    return with_added(sentencepiece_like())


def tokenizer_of(fast: FastTokenizer) -> Tokenizer:
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


def text_of(tokenizer: Tokenizer, form: Any, value: Any, *, seed: int) -> str:
    """A text that random allowed tokens make."""
    text = value if isinstance(value, str) else json.dumps(value)
    size = len(tokenizer.inner)
    grammar = Llguidance(Vocabulary(tokenizer, size, (0,))).compile(Structure(form, text))
    constraint, rng = grammar.start(), np.random.default_rng(seed)
    found: list[int] = []
    while not constraint.is_done:
        bits = np.unpackbits(constraint.bits().view(np.uint8), bitorder="little")
        ids = np.flatnonzero(bits)
        if not len(ids):
            break
        found.append(int(rng.choice(ids)))
        constraint.accept(found[-1])
    return tokenizer.decode([*tokenizer.encode("a"), *found], skip_special_tokens=False)[1:]


CASES: list[tuple[str, Any, set[str]]] = [
    ("choice", ["<tool>a"], {"<tool>a"}),
    ("choice", ["<tool>a", "<tool>b"], {"<tool>a", "<tool>b"}),
    ("choice", ["<|end|>"], {"<|end|>"}),
    ("choice", ["two", "x<tool>"], {"two", "x<tool>"}),
    ("regex", "<tool>[ab]", {"<tool>a", "<tool>b"}),
    ("grammar", 'start: "<tool>" /[ab]/', {"<tool>a", "<tool>b"}),
    ("grammar", 'start: "a" <tool>', {"a<tool>"}),
    ("grammar", 'start: "<tool>" <tool>', {"<tool><tool>"}),
    ("grammar", 'start: <|end|> T "x"\nT: /<tool>[ab]|two/', {
        "<|end|><tool>ax", "<|end|><tool>bx", "<|end|>twox"}),
    ("grammar", '// not <tool> but\nstart: "a<" "tool>" <tool> | "<|end|>" <tool>', {
        "a<tool><tool>", "<|end|><tool>"}),
    ("json_schema", {"const": "<tool>"}, {'"<tool>"'}),
    ("json_schema", {"type": "object", "properties": {"<tool>": {"const": 1}},
        "required": ["<tool>"], "additionalProperties": False}, {'{"<tool>":1}'}),
]  # fmt: skip


@pytest.mark.parametrize("make", [bytes_with_added, pieces_with_added])
@pytest.mark.parametrize(("form", "value", "expected"), CASES)
def test_the_text_of_an_added_token_is_made(
    make: Any, form: str, value: Any, expected: set[str]
) -> None:
    tokenizer = tokenizer_of(make())
    for seed in range(4):
        assert text_of(tokenizer, form, value, seed=seed) in expected


@pytest.mark.long
@pytest.mark.parametrize("make", [bytes_with_added, pieces_with_added])
def test_llm_makes_the_text_of_an_added_token(make: Any, tmp_path: Path) -> None:
    save_model(tmp_path, make())
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "processors": ("guided",)}
    each = [
        SamplingParams(
            **{form: value}, temperature=1.5, seed=seed, max_tokens=50, skip_special_tokens=False
        )
        for form, value, _ in CASES
        for seed in range(4)
    ]
    with few_sizes(), LLM(str(tmp_path), **sizes) as llm:
        outputs = llm.generate(["a"] * len(each), each)
    found = [[one.outputs[0].text for one in outputs[i : i + 4]] for i in range(0, len(each), 4)]
    for texts, (form, value, expected) in zip(found, CASES, strict=True):
        assert set(texts) <= expected, (form, value)
    assert {one.outputs[0].finish_reason for one in outputs} == {"stop"}


def test_a_name_is_the_token_and_its_letters_are_not() -> None:
    tokenizer = tokenizer_of(bytes_with_added())
    token = tokenizer.inner.convert_tokens_to_ids("<tool>")
    library = Llguidance(Vocabulary(tokenizer, len(tokenizer.inner), (0,)))

    def first(text: str) -> set[int]:
        bits = library.compile(Structure("grammar", text)).start().bits()
        return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())

    assert first('start: <tool> "<tool>"') == {token}
    assert token not in first('start: "<tool>" <tool>')
    with pytest.raises(RequestError, match="<toll>"):
        first('start: "<tool>" <toll>')
