"""Guided requests end to end: what they give parses, alone and among others, and a step is never
launched without its mask.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from enginebay import LLM, SamplingParams
from enginebay.cli.generate import add_sampling_arguments, sampling_from
from enginebay.contracts.engine import Pending, StepPlan
from enginebay.errors import ConfigError, InputError, InternalError, RequestError
from enginebay.grammar import Constraint, Grammar
from enginebay.outputs import CompletionOutput, RequestOutput
from enginebay.serving.abilities import Abilities
from enginebay.serving.loop import EngineLoop
from enginebay.serving.prepare import Preparer
from enginebay.text.guides.guide import Guides
from tests.brief import BRIEF, LEAST
from tests.pool import few_sizes
from tests.unit.replaceable_parts import Changing, Interrupting, changing
from tests.unit.schemas import bounded_schema
from tests.unit.serving import SIZES, assert_idle, with_

pytestmark = pytest.mark.xdist_group("guided")

PROMPT = "Once upon a time"
PROMPTS = [PROMPT, "The little fox", "A", "In the morning, the baker opened the shop"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
HOT = SamplingParams(max_tokens=100, temperature=1.5, seed=4)
MIXED = [
    with_(HOT, json_schema=PERSON),
    with_(HOT, max_tokens=14),
    with_(HOT, regex="[a-z]{3,9} [0-9]{4}", seed=3),
    SamplingParams(max_tokens=14),
]


@pytest.fixture(scope="module")
def made() -> Iterator[Changing]:
    """One layer of the demo model, whose outputs are as good as random.

    No other processor, which would be compiled too.
    """
    sizes = SIZES | {
        "max_num_batched_tokens": 128
    }  # no prompt is cut, so that none needs a program of its own
    with few_sizes(), changing(LEAST, processors=("guided",), **sizes) as made:
        yield made


@pytest.fixture
def llm(made: Changing) -> Iterator[LLM]:
    yield made.llm
    assert_idle(made.llm)


def preparer_of(llm: LLM) -> Preparer:
    """What makes requests for the loops of a test."""
    plan = llm.plan
    sizes = plan.model.info.vocab_size, SIZES["max_model_len"]
    abilities = Abilities.of(plan)
    return Preparer(llm.tokenizer, plan.checkpoint.token_info, *sizes, abilities=abilities, seed=0)


def first(outputs: Sequence[RequestOutput]) -> CompletionOutput:
    return outputs[0].outputs[0]


@pytest.mark.long
def test_json_of_any_schema_is_valid_where_the_request_was_not_cut(llm: LLM) -> None:
    schemas = [bounded_schema(np.random.default_rng(seed)) for seed in range(8)]
    params = [with_(HOT, json_schema=schema, seed=i) for i, schema in enumerate(schemas)]
    reasons = []
    for schema, output in zip(schemas, llm.generate([PROMPT] * len(schemas), params), strict=True):
        text, reason = output.get_text(), output.outputs[0].finish_reason
        reasons.append(reason)
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema)
    assert reasons.count("stop") >= 6
    assert set(reasons) <= {"stop", "length"}


def test_expressions_choices_and_grammars_are_kept(llm: LLM) -> None:
    lark = 'start: term (("+" | "-") term){0,3}\nterm: /[1-9][0-9]{0,2}/\n'
    asked: list[dict[str, Any]] = [
        {"regex": "(ab|[0-9]){2,8}!"},
        {"choice": ["red", "green as grass"]},
        {"grammar": lark},
        {"json_object": True, "temperature": 0.0},
    ]
    outputs = llm.generate(PROMPTS, [with_(HOT, **fields) for fields in asked])
    texts = [output.get_text() for output in outputs]
    assert [output.outputs[0].finish_reason for output in outputs[:3]] == ["stop"] * 3
    assert re.fullmatch("(ab|[0-9]){2,8}!", texts[0])
    assert texts[1] in {"red", "green as grass"}
    assert re.fullmatch(r"[1-9]\d{0,2}([+-][1-9]\d{0,2}){0,3}", texts[2])
    assert texts[3].startswith("{")


def test_a_batch_of_guided_and_free_rows_gives_each_its_own_tokens(llm: LLM) -> None:
    alone = [first(llm.generate(p, q)) for p, q in zip(PROMPTS, MIXED, strict=True)]
    together = [output.outputs[0] for output in llm.generate(PROMPTS, MIXED)]
    assert together == alone
    backwards = [output.outputs[0] for output in llm.generate(PROMPTS[::-1], MIXED[::-1])]
    assert backwards[::-1] == alone


class Watched:
    """Keeps the plans of an engine's steps."""

    def __init__(self, step: Callable[[StepPlan], Pending]) -> None:
        self.step, self.plans = step, list[StepPlan]()

    def __call__(self, plan: StepPlan) -> Pending:
        self.plans.append(plan)
        return self.step(plan)


def test_guided_rows_run_one_step_a_call_and_the_others_all_of_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(llm.engine.step)
    monkeypatch.setattr(llm.engine, "step", watched)
    outputs = llm.generate(PROMPTS, MIXED)
    decoding = [plan for plan in watched.plans if plan.is_decode]
    guided = [plan for plan in decoding if any(row.update for row in plan.rows)]
    free = [plan for plan in decoding if not any(row.update for row in plan.rows)]
    assert all(all(row.update for row in plan.rows) for plan in guided)
    assert {plan.num_steps for plan in guided} == {1}
    most = SIZES["decode_steps"]
    assert max(plan.num_steps for plan in free) == most
    lengths = [len(output.outputs[0].token_ids) for output in (outputs[1], outputs[3])]
    # One call more for each: it may have been launched before a stop token was read.
    assert sum(len(plan.rows) for plan in free) <= sum(-(-(n - 1) // most) + 1 for n in lengths)
    num_guided = sum(len(output.outputs[0].token_ids) for output in (outputs[0], outputs[2]))
    assert (
        sum(len(plan.rows) for plan in guided) == num_guided - 2
    )  # each once, but for those of the prefill
    first_rows = [
        row for plan in watched.plans if not plan.is_decode for row in plan.rows if row.samples
    ]
    assert sorted(len(row.update) for row in first_rows) == [0, 0, 1, 1]


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_neither_overlap_nor_preemption_changes_a_token(
    made: Changing, llm: LLM, overlap: bool
) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, MIXED)]
    prepared = preparer_of(llm).prepare(PROMPTS, [with_(p, max_tokens=100) for p in MIXED[::2]] * 2)
    requests = [one.requests[0] for one in prepared]
    config = llm.config.model_copy(update={"overlap_execution": overlap})
    scheduler = Interrupting(made.scheduler.usual, lambda row: row.max_new_left <= 92)

    def serve() -> list[list[int]]:
        loop = EngineLoop(llm.engine, scheduler, config)
        try:
            tickets = loop.submit(requests)
            return [[t for event in _events(ticket) for t in event.token_ids] for ticket in tickets]
        finally:
            loop.close()

    served = llm.run_on_engine(serve)  # the engine's own loop waits meanwhile
    assert scheduler.interrupted
    assert served[0] == expected[0]
    with_prompts = llm.generate(PROMPTS, [*MIXED[::2], *MIXED[::2]])
    assert served == [output.outputs[0].token_ids for output in with_prompts]


def _events(ticket: Any) -> list[Any]:
    events = [ticket.get(300)]
    while events[-1].finish_reason is None:
        events.append(ticket.get(300))
    assert events[-1].error is None
    return events


def test_a_request_that_is_cut_says_so(llm: LLM) -> None:
    cut = first(llm.generate(PROMPT, with_(HOT, json_schema=PERSON, max_tokens=3)))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    whole = first(llm.generate(PROMPT, with_(HOT, json_schema=PERSON)))
    assert whole.token_ids[:3] == cut.token_ids
    exact = first(
        llm.generate(PROMPT, with_(HOT, json_schema=PERSON, max_tokens=len(whole.token_ids)))
    )
    assert exact == whole
    assert whole.finish_reason == "stop"


def test_the_end_of_sequence_comes_where_the_text_may_end_and_is_not_needed(llm: LLM) -> None:
    ends = set(llm.plan.checkpoint.token_info.eos_token_ids)
    fixed = first(llm.generate(PROMPT, SamplingParams(choice=["green as grass"], ignore_eos=True)))
    assert (fixed.text, fixed.finish_reason) == ("green as grass", "stop")
    assert not ends & set(fixed.token_ids)
    open_ended = with_(HOT, regex="(a|b)+", max_tokens=40)
    found = [first(llm.generate(PROMPT, with_(open_ended, seed=seed, ignore_eos=ignore)))
             for ignore in (False, True) for seed in range(3)]  # fmt: skip
    assert all(re.fullmatch("(a|b)+", output.text) for output in found)
    for output in found:
        assert (output.token_ids[-1] in ends) is (output.finish_reason == "stop")
    assert [output.finish_reason for output in found[3:]] == ["length"] * 3


@pytest.mark.long
def test_completions_go_their_own_way_and_stop_texts_still_end_them(llm: LLM) -> None:
    params = with_(HOT, json_schema=PERSON, n=3, temperature=2.0)
    completions = llm.generate(PROMPT, params)[0].outputs
    assert len({completion.text for completion in completions}) == 3
    for completion in completions:
        jsonschema.validate(json.loads(completion.text), PERSON)
    stopped = first(llm.generate(PROMPT, with_(HOT, json_schema=PERSON, stop='","')))
    assert (stopped.finish_reason, '","' in stopped.text) == ("stop", False)
    assert stopped.text.startswith('{"name":"')


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regex": "["}, r"^regex = \[: .*unclosed character class.* Allowed: .*"),
        ({"json_schema": {"not": {}}}, r"^json_schema = .*not supported: not"),
        ({"choice": ["a"], "json_object": True}, "^json_object and choice in one request"),
        ({"choice": ["a"], "processors": {"guided": {}}}, "'guided', both by a field of its own"),
    ],
)
def test_what_cannot_be_held_is_refused_before_anything_is_queued(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], reason: str
) -> None:
    def fail(requests: object) -> list[object]:
        raise AssertionError("something was queued")

    monkeypatch.setattr(llm.loop, "submit", fail)
    with pytest.raises(RequestError, match=reason):
        llm.generate([PROMPT, "A"], [SamplingParams(), SamplingParams(**fields)])


class Panic(BaseException):
    """What a library in Rust raises when it panics."""


class Failing(Grammar):
    """One whose constraints fail at the third token, in a way that nobody foresaw."""

    def __init__(self, inner: Grammar, error: BaseException) -> None:
        self.inner, self.error = inner, error

    def start(self) -> Constraint:
        constraint, accepted = self.inner.start(), list[int]()
        error = self.error

        class Fails(Constraint):
            def bits(self) -> np.ndarray:
                return constraint.bits()

            @property
            def may_end(self) -> bool:
                return constraint.may_end

            def accept(self, token_id: int) -> None:
                accepted.append(token_id)
                if len(accepted) == 3:
                    raise error
                constraint.accept(token_id)

        return Fails()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RequestError("too complex"), RequestError),
        (KeyError("lost"), InternalError),
        (Panic("'lost'"), InternalError),
    ],
)
def test_a_constraint_that_fails_ends_its_own_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: type[Exception]
) -> None:
    expected = llm.generate(PROMPTS[1:], MIXED[1:])
    grammar = Guides.grammar

    def failing(guides: Guides, params: SamplingParams) -> Grammar | None:
        found = grammar(guides, params)
        return Failing(found, error) if found is not None and params.n == 2 else found

    monkeypatch.setattr(Guides, "grammar", failing)
    stream = llm.stream(PROMPT, with_(MIXED[0], n=2))
    among = llm.generate(PROMPTS[1:], MIXED[1:])
    with pytest.raises(told, match=r"too complex|a constraint failed: (KeyError|Panic): 'lost'"):
        list(stream)
    assert [o.outputs for o in among] == [o.outputs for o in expected]


def test_flags_of_the_program_are_the_fields(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    add_sampling_arguments(parser)
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(PERSON))
    grammar.write_text('start: "a"')

    def fields(*arguments: str) -> dict[str, Any]:
        return sampling_from(parser.parse_args(arguments)).model_dump(exclude_defaults=True)

    assert fields("--json-schema", str(schema)) == {"json_schema": json.dumps(PERSON)}
    assert fields("--json-schema", '{"type": "null"}') == {"json_schema": '{"type": "null"}'}
    assert fields("--choice", "a", "--choice", "b") == {"choice": ("a", "b")}
    assert fields("--grammar", str(grammar)) == {"grammar": 'start: "a"'}
    assert fields("--regex", "a+", "--json-object") == {"regex": "a+", "json_object": True}
    for flag in ("--json-schema", "--grammar"):
        with pytest.raises(InputError, match=f"{flag} {re.escape(str(tmp_path / 'none'))}: "):
            fields(flag, str(tmp_path / "none"))


@pytest.mark.long
def test_a_library_that_is_not_there_is_told(llm: LLM) -> None:
    with pytest.raises(
        InputError, match=r"unknown grammar 'llguidence'.*Did you mean 'llguidance'"
    ):
        LLM(BRIEF, grammars="llguidence", **SIZES)
    with pytest.raises(ConfigError, match=r"no grammar library\. Allowed: a subclass"):
        LLM(BRIEF, grammars="enginebay.text.guides.grammars:LIBRARIES", **SIZES)
    chosen = llm.plan.processors
    bare = dataclasses.replace(chosen, entries={}, processors=())
    with pytest.raises(RequestError, match="'guided', which the engine was made without"):
        bare.rows({"guided": {}}, None)  # type: ignore[arg-type]


def _random_weights(folder: Path) -> str:
    """The shapes of the demo model, other numbers."""
    rng = np.random.default_rng(7)
    for file in Path(BRIEF).glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(Path(BRIEF) / "model.safetensors")
    drawn = {name: rng.normal(0, 0.1, t.shape).astype(t.dtype) for name, t in tensors.items()}
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "weights"), [("vinference", "demo"), ("oengine", "random")])
def test_two_hundred_of_two_hundred_random_schemas_are_valid(
    engine: str, weights: str, tmp_path: Path
) -> None:
    model = "demo" if weights == "demo" else _random_weights(tmp_path)
    schemas = [bounded_schema(np.random.default_rng(1000 + seed)) for seed in range(200)]
    params = [
        SamplingParams(max_tokens=960, json_schema=schema, temperature=i % 3 / 2, seed=i)
        for i, schema in enumerate(schemas)
    ]
    sizes = {"max_model_len": 1024, "max_num_seqs": 8, "decode_steps": 4}
    with LLM(model, engine=engine, dtype="float32", processors=("guided",), **sizes) as llm:  # type: ignore[arg-type]
        outputs = llm.generate([PROMPT] * len(schemas), params)
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop", (schema, output.get_text())
        jsonschema.validate(json.loads(output.get_text()), schema)
    assert len({output.get_text() for output in outputs}) > 100
