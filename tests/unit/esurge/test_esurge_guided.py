"""Guided requests through eSurge: whole, in parts and in chats, beside free ones, and under the
engine's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import jsonschema
import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError
from enginebay_esurge import RequestOutput, eSurge
from tests.brief import BRIEF
from tests.unit.esurge.small import BUDGET, PROMPT, PROMPTS, Preemptions, token_ids, until, with_
from tests.unit.serving import SIZES

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("esurge")]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
HOT = SamplingParams(max_tokens=60, temperature=1.5, seed=4)
WORDS = "[a-z]{3,9} [0-9]{4}"
CHOICE = ("red", "green as grass")
ENDLESS = with_(HOT, max_tokens=None, regex="(a|b)+", ignore_eos=True)
MIXED = [
    with_(HOT, json_schema=PERSON),
    with_(HOT, max_tokens=14, ignore_eos=True),
    with_(HOT, regex=WORDS, seed=3),
    with_(HOT, choice=CHOICE),
]


def assert_kept(outputs: Sequence[RequestOutput]) -> None:
    """Each of MIXED has got what it asked for."""
    person, free, words, choice = outputs
    assert [one.outputs[0].finish_reason for one in outputs] == ["stop", "length", "stop", "stop"]
    jsonschema.validate(json.loads(person.get_text()), PERSON)
    assert len(free.outputs[0].token_ids) == 14
    assert re.fullmatch(WORDS, words.get_text())
    assert choice.get_text() in CHOICE


def one_by_one(engine: eSurge) -> list[RequestOutput]:
    return [
        engine.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, MIXED, strict=True)
    ]


@pytest.mark.long
def test_generate_gives_guided_and_free_requests_of_a_batch_their_own(
    real_engine: eSurge,
) -> None:  # holds SG1
    alone = one_by_one(real_engine)
    assert_kept(alone)
    real_engine.set_sampling_params_callback(lambda _, about: MIXED[int(about["request_id"])])
    try:
        together = real_engine.generate(PROMPTS, SamplingParams(), request_id=["0", "1", "2", "3"])
    finally:
        real_engine.set_sampling_params_callback(None)
    assert token_ids(together) == token_ids(alone)
    assert_kept(together)


def test_streams_and_chats_are_guided_beside_one_another(real_engine: eSurge) -> None:  # holds SG1
    expected = one_by_one(real_engine)
    streams = [
        real_engine.stream(prompt, params) for prompt, params in zip(PROMPTS, MIXED, strict=True)
    ]
    parts = [list(stream) for stream in streams]
    assert ["".join(part.delta_text for part in updates) for updates in parts] == [
        one.get_text() for one in expected
    ]
    assert token_ids([updates[-1] for updates in parts]) == token_ids(expected)
    messages = [{"role": "user", "content": "Who are you?"}]
    beside = real_engine.stream(PROMPTS[1], MIXED[1])
    said = real_engine.chat(messages, sampling_params=MIXED[0])
    jsonschema.validate(json.loads(said.get_text()), PERSON)
    *_, last = real_engine.chat(messages, sampling_params=MIXED[0], stream=True)
    assert last.outputs == said.outputs
    assert list(beside)[-1].outputs == expected[1].outputs


def test_a_guided_request_that_is_cut_says_so_and_a_wrong_one_is_refused(
    real_engine: eSurge,
) -> None:  # holds SG1
    [whole] = real_engine.generate(PROMPT, MIXED[0])
    [cut] = real_engine.generate(PROMPT, with_(MIXED[0], max_tokens=3))
    assert cut.outputs[0].finish_reason == "length"
    assert cut.outputs[0].token_ids == whole.outputs[0].token_ids[:3]
    [filled] = real_engine.generate(PROMPT, ENDLESS)
    assert filled.num_generated_tokens == BUDGET - len(filled.prompt_token_ids)
    with pytest.raises(RequestError, match=r"regex = \[: "):
        real_engine.stream(PROMPT, with_(HOT, regex="["))


def test_an_aborted_guided_request_gives_what_there_is(
    slow_real_engine: eSurge,
) -> None:  # holds SG1
    stream = slow_real_engine.stream(PROMPT, ENDLESS, request_id="mine")
    begun = next(stream)
    slow_real_engine.abort_request("mine")
    *_, last = stream
    assert last.outputs[0].finish_reason == "abort"
    assert last.get_text().startswith(begun.get_text())
    assert set(last.get_text()) <= {"a", "b"}
    until(lambda: not slow_real_engine.num_running_requests)


@pytest.mark.long
def test_preemption_changes_no_guided_token(real_engine: eSurge) -> None:  # holds SG1
    # Each token has another mask than the one before it.
    params = with_(HOT, max_tokens=None, regex="([ab][cd][ef])+", ignore_eos=True)
    alone = [real_engine.generate(prompt, params)[0] for prompt in PROMPTS]
    preemptions = Preemptions(real_engine)
    together = real_engine.generate(PROMPTS, params)
    assert max(preemptions.fewest) > 0, "some had tokens"
    assert token_ids(together) == token_ids(alone)
    whole_or_cut = "([ab][cd][ef])*([ab][cd]?)?"
    assert all(re.fullmatch(whole_or_cut, one.get_text()) for one in together)


def test_the_engine_of_this_name_serves_them(pooled: None) -> None:  # holds SG1
    engine = {"name": "esurge", "page_size": 16, "num_pages": 25}
    sizes = SIZES | {"max_num_batched_tokens": 16}
    with LLM(BRIEF, engine=engine, processors=("guided",), **sizes) as llm:
        free, guided = llm.generate(PROMPTS[:2], [MIXED[1], MIXED[2]])
        parts = list(llm.stream(PROMPTS[1], MIXED[2]))
    assert re.fullmatch(WORDS, guided.get_text())
    assert "".join(part.delta_text for part in parts) == guided.get_text()
    assert (guided.outputs[0].finish_reason, parts[-1].finish_reason) == ("stop", "stop")
    assert (len(free.outputs[0].token_ids), free.outputs[0].finish_reason) == (14, "length")
