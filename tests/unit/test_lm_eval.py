"""The adapter for lm-eval, over a stand-in for its only class that is needed: lm-eval itself brings
torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError, UnsupportedError
from enginebay_bench.scoring import Scored
from enginebay_testing.engine_logprobs import log_softmax
from enginebay_testing.reference import ReferenceModel

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("llm")]
MODULE = "enginebay_bench.lm_eval"


class LM:
    """What the adapter needs of lm_eval.api.model.LM: a constructor without arguments."""

    def __init__(self) -> None:
        self._rank = 0


@dataclasses.dataclass(frozen=True)
class Instance:
    args: tuple[Any, ...]


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    model = types.ModuleType("lm_eval.api.model")
    model.LM = LM  # type: ignore[attr-defined]
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", model)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def test_likelihoods_are_the_models(adapter: Any, llm: LLM) -> None:
    lm = adapter.EnginebayLM(llm)
    reference = ReferenceModel(llm.plan)
    context, continuation = "Once upon a", " time there"
    special, whole = llm.tokenizer.encode(""), llm.tokenizer.encode(context + continuation)
    num = len(special) + len(llm.tokenizer.encode(context, add_special_tokens=False))
    expected = log_softmax(reference.logits(whole))[
        np.arange(num - 1, len(whole) - 1), whole[num:]
    ].sum()
    greedy = llm.generate(context, SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0]
    pairs = [
        (context, continuation),
        (context + " ", "time there"),
        ("", "Once"),
        (context, greedy.text),
        (context, "zzzz"),
    ]
    found = lm.loglikelihood([Instance(pair) for pair in pairs])
    assert found[0][0] == pytest.approx(expected, abs=1e-3)
    assert found[1] == found[0]  # a space between them belongs to the continuation
    assert found[2][0] < 0
    assert (found[3][1], found[4][1]) == (True, False)


class EvenScorer:
    """Finds all tokens of a vocabulary equally likely, and keeps what it was asked."""

    max_model_len = 160

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.asked: list[list[int]] = []

    def score(self, token_ids: list[int]) -> Scored:
        self.asked.append(token_ids)
        return Scored(
            tuple(token_ids), (0,), np.zeros((len(token_ids), self.vocab_size), np.float32)
        )


def test_a_long_text_is_scored_in_windows_each_token_once(
    adapter: Any, fake_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = EvenScorer(fake_llm.plan.model.info.vocab_size)
    monkeypatch.setattr(adapter, "scoring", lambda _: contextlib.nullcontext(scorer))
    text = "The fox ran over the hill and saw a hen. " * 20
    token_ids = fake_llm.tokenizer.encode(text, add_special_tokens=False)
    (found,) = adapter.EnginebayLM(fake_llm).loglikelihood_rolling([Instance((text,))])
    assert found == pytest.approx(-len(token_ids) * math.log(scorer.vocab_size), rel=1e-6)
    assert [len(asked) for asked in scorer.asked] == [159] * len(scorer.asked)
    assert len(scorer.asked) > 1
    *whole, last = scorer.asked
    taken = [
        token for asked in whole for token in asked[1:]
    ]  # but the token that each begins after
    assert [*taken, *last[len(taken) - len(token_ids) :]] == token_ids


def test_a_short_text_is_a_continuation_of_nothing(adapter: Any, llm: LLM) -> None:
    lm = adapter.EnginebayLM(llm)
    short = "The fox ran"
    whole = lm.loglikelihood_rolling([Instance((short,))])[0]
    assert whole == pytest.approx(lm.loglikelihood([Instance(("", short))])[0][0], abs=1e-6)


def test_generation_ends_at_the_texts_that_are_given(adapter: Any, fake_llm: LLM) -> None:
    lm = adapter.EnginebayLM(fake_llm)
    text = fake_llm.generate("Once upon a", SamplingParams(max_tokens=12))[0].outputs[0].text
    stop = text[4:6]
    greedy = {"until": [stop], "max_gen_toks": 12, "do_sample": False, "temperature": 1.0}
    requests = [
        Instance(("Once upon a", greedy)),
        Instance(("Once upon a " * 200, {"until": stop, "max_gen_toks": 3})),
    ]
    first, second = lm.generate_until(requests)
    assert first == text[: text.index(stop)]
    assert stop not in second
    with pytest.raises(RequestError, match="num_beams"):
        lm.generate_until([Instance(("a", {"num_beams": 2}))])
    with pytest.raises(RequestError, match="max_gen_toks = 999"):
        lm.generate_until([Instance(("a", {"max_gen_toks": 999}))])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"max_gen_toks": 0},
            (
                "max_gen_toks = 0. Allowed: a whole number of at least 1. Leave max_gen_toks out "
                "for its default, 256."
            ),
        ),
        (
            {"until": 3},
            "until = 3. Allowed: a text, a list of texts, or none. Change it, or leave until out.",
        ),
        (
            {"temprature": 0.5},
            (
                "temprature = 0.5, an unknown field. Allowed: until, max_gen_toks, temperature, "
                "top_p, top_k, do_sample. Did you mean 'temperature'?"
            ),
        ),
        (
            {"do_sample": "perhaps"},
            (
                "do_sample = 'perhaps'. Allowed: true or false. Leave do_sample out for its "
                "default, True."
            ),
        ),
        (
            None,
            (
                "NoneType as TaskArguments. Allowed: fields with their values. Pass a dict, or a "
                "JSON object."
            ),
        ),
    ],
)
def test_wrong_arguments_of_a_task_are_one_line_by_its_names(
    adapter: Any, fake_llm: LLM, arguments: Any, message: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        adapter.EnginebayLM(fake_llm).generate_until([Instance(("a", arguments))])
    assert str(refusal.value) == f"gen_kwargs: {message}"


def test_without_lm_eval_the_module_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(UnsupportedError, match=r"pip install \"enginebay\[eval\]\""):
        importlib.import_module(MODULE)
