"""Untrusted constraints: whatever one needs beyond the limits ends as a refused request, and
nothing else ends with it.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.config import make_config
from enginebay.contracts.constraint import GrammarLibrary, Vocabulary
from enginebay.contracts.text import Tokenizer
from enginebay.errors import ConfigError, RequestError, UnsupportedError
from enginebay.grammar import Constraint, Structure
from enginebay.serving.events import Events, RequestEnded
from enginebay.serving.guided import advance, wait_for_mask
from enginebay.text.guides.grammars import ChosenGrammars, choose_grammars
from enginebay.text.guides.guarded import GuardedLibrary
from enginebay.text.guides.guide import Guides
from enginebay.text.worker.process import LimitedWorker, LimitError, WorkerLimits
from enginebay_esurge import eSurge
from enginebay_models.tokenizer import load_tokenizer
from enginebay_vinference.requests import RequestMaker
from tests.brief import BRIEF, DEMO
from tests.unit.slow_grammar import SlowLibrary

EOS = 2
CHAIN = "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(3000)) + 'r3000: "b"\n'
PATTERNS = {"allOf": [{"pattern": f"(a|b)*a(a|b){{{i + 1}}}"} for i in range(24)]} | {
    "type": "string"
}
NESTED = "((a{1000}){1000}){1000}"
LOOP = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{(i + 1) % 2000}"}} for i in range(2000)},
}
LATE = (
    'r1: (r1){1,1000}\nr3: ("a" & (/\\d/){0,1000000})\n'
    "r0: (%json {}(/(a){1000,}/  r1))?\nstart: r0\n"
)
"""It compiles at once, and the mask behind its first token is not found in minutes."""
SMALL = {
    "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def knot() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"a": schema}
    return schema


def wide() -> dict[str, Any]:
    """A small dict whose JSON would have 2 ** 40 parts."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(40):
        schema = {"anyOf": [schema, schema]}
    return schema


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


def chosen(**choices: Any) -> ChosenGrammars:
    return choose_grammars(make_config(choices))


def guides_of(tokenizer: Tokenizer, grammars: ChosenGrammars) -> Guides:
    return grammars(Vocabulary(tokenizer, 2048, (0, EOS)))


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Iterator[Guides]:
    made = guides_of(tokenizer, chosen())
    yield made
    made.close()


def worker_pid(guides: Guides) -> int | None:
    library = guides._library
    assert isinstance(library, GuardedLibrary)
    return library._worker.pid


REFUSED = [
    ({"grammar": CHAIN}, (r"limit of stack .*Allowed: 8388608 bytes of stack "
        r"\(guided_limits.stack_bytes\)")),
    ({"json_schema": PATTERNS}, (r"limit of memory .*Allowed: 134217728 bytes "
        r".*\(guided_limits.memory_bytes\)")),
    ({"regex": NESTED}, r"limit of memory .*guided_limits.memory_bytes"),
    ({"json_schema": LOOP}, r"limit of stack .*guided_limits.stack_bytes"),
    ({"json_schema": deep(10_000)}, r"101 levels of lists and objects.*guided_limits.depth"),
    ({"json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000},
        r"101 levels.*guided_limits.depth"),
    ({"json_schema": '{"const":' + "[" * 10_000}, r"101 levels.*guided_limits.depth"),
    ({"json_schema": knot()}, r"101 levels.*guided_limits.depth"),
    ({"json_schema": wide()}, r"10001 lists and objects.*guided_limits.items"),
    ({"json_schema": {"enum": ["x" * 300_000]}}, (r"json_schema of 3\d+ bytes.*262144 "
        r"\(guided_limits.size_bytes")),
    ({"json_schema": '"' + "x" * 300_000},
        r"json_schema of 300001 bytes.*guided_limits.size_bytes"),
    ({"regex": "a" * 300_000}, r"regex of 300000 bytes.*guided_limits.size_bytes"),
    ({"grammar": 'start: "a"\n' + 'x: "b"\n' * 10_000}, (r"grammar with 10001 "
        r"rules.*guided_limits.items")),
    ({"choice": [str(i) for i in range(10_001)]},
        r"choice with 10001 choices.*guided_limits.items"),
    ({"choice": ["é" * 150_000]}, r"choice of 300000 bytes.*guided_limits.size_bytes"),
    ({"grammar": "start: " + " | ".join(f'"c{i}"' for i in range(9000))},
        r"limited by max_items_in_row = 2000"),
    ({"json_schema": {"type": "integer", "multipleOf": 10**9 + 7}},
        "limited by initial_lexer_fuel = 1000000"),
    ({"regex": "(a?){500}a{500}"}, "initial_lexer_fuel = 1000000 or step_lexer_fuel = 200000"),
    ({"json_schema": {"$ref": "#"}}, "this text under the grammar of the request: NoExtensionBias"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "limit"), REFUSED, ids=range(len(REFUSED)))
def test_a_constraint_beyond_a_limit_is_a_refused_request(
    guides: Guides, fields: dict[str, Any], limit: str
) -> None:
    with pytest.raises(RequestError, match=limit) as caught:
        guides.grammar(SamplingParams(**fields))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_is_within_the_limits_is_followed_with_more_stack(guides: Guides) -> None:
    """What the stack of the worker that compiles holds, the worker for masks holds too."""
    chain = "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(900)) + 'r900: "b"\n'
    for fields in (SMALL, {"grammar": chain}, {"json_schema": deep(45)}):
        grammar = guides.grammar(SamplingParams(**fields))
        assert grammar is not None
        constraint = grammar.start()
        before = constraint.bits()
        allowed = np.flatnonzero(np.unpackbits(before.view(np.uint8), bitorder="little"))
        constraint.accept(int(allowed[0]))
        assert constraint.bits().shape == before.shape


def test_a_worker_that_exceeds_a_limit_is_replaced_and_others_are_served(guides: Guides) -> None:
    guides.grammar(SamplingParams(choice=["before"]))
    before = worker_pid(guides)
    with pytest.raises(RequestError, match="limit of stack"):
        guides.grammar(SamplingParams(grammar=CHAIN))
    with pytest.raises(ProcessLookupError):
        os.kill(int(before or 0), 0)
    guides.grammar(SamplingParams(choice=["after"]))
    assert worker_pid(guides) not in (None, before)
    guides.close()
    assert worker_pid(guides) is None
    guides.grammar(SamplingParams(choice=["once more"]))


@pytest.mark.parametrize("limit", ["memory", "depth"])
def test_a_worker_that_notices_a_limit_itself_is_replaced_too(limit: str) -> None:
    limits = WorkerLimits(time_s=30.0, memory_bytes=64 << 20, stack_bytes=8 << 20)
    worker = LimitedWorker("tests.unit.worker_tasks:Tasks", {"base": 3}, limits)
    worker.start()
    before = worker.pid
    with pytest.raises(LimitError, match=limit):
        worker.ask({"do": limit})
    assert worker.pid is None
    assert worker.ask({"do": "add", "value": 4}) == 7
    assert worker.pid != before
    worker.close()


def test_the_limit_of_time(tokenizer: Tokenizer) -> None:
    limits = {"compile_s": 0.5, "memory_bytes": 2 << 30}
    guides = guides_of(tokenizer, chosen(guided_limits=limits))
    with pytest.raises(
        RequestError, match=r"limit of time .*0.5 seconds \(guided_limits.compile_s\)"
    ):
        guides.grammar(SamplingParams(json_schema=PATTERNS))
    with pytest.raises(RequestError, match="limit of time"):
        guides.grammar(SamplingParams(grammar=LATE))
    guides.close()


def test_limits_of_size_are_options(tokenizer: Tokenizer) -> None:
    tight = chosen(guided_limits={"size_bytes": 40, "depth": 3, "items": 2})
    guides = guides_of(tokenizer, tight)
    for fields, limit in [
        ({"regex": "a" * 41}, r"Allowed: 40 \(guided_limits.size_bytes"),
        (
            {"json_schema": deep(3)},
            r"Allowed: 3 \(guided_limits.depth|Allowed: 2 \(guided_limits.items",
        ),
        ({"json_schema": "[[[[1]]]]"}, r"Allowed: \d \(guided_limits"),
        ({"choice": ["a", "b", "c"]}, r"Allowed: 2 \(guided_limits.items"),
        ({"grammar": 'start: a\na: b\nb: "c"'}, r"Allowed: 2 \(guided_limits.items"),
    ]:
        with pytest.raises(RequestError, match=limit):
            guides.grammar(SamplingParams(**fields))
    assert guides._library is None, "nothing was compiled"


STEPS = [
    ({"max_lexer_states": 60}, {"regex": "(a|b)*a(a|b){30}c"}),
    ({"step_max_items": 90}, {"grammar": 'start: s\ns: s s | "a" | "b"'}),
    ({"max_items_in_row": 40}, {"grammar": 'start: s\ns: s s | "a" | "b"'}),
]


@dataclasses.dataclass
class RequestState:
    """What `advance` reads of a request in the loop."""

    constraint: Constraint
    request: Any
    is_late: bool = False


@pytest.mark.parametrize(
    ("options", "fields"), STEPS, ids=[next(iter(options)) for options, _ in STEPS]
)
def test_a_step_beyond_a_limit_ends_its_own_request(
    tokenizer: Tokenizer, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    """It compiles and begins. The loop gives the error to the request, and goes on."""
    grammars = chosen(grammars={"name": "llguidance"} | options)
    make: Any = grammars.library
    library: GrammarLibrary = make(Vocabulary(tokenizer, 2048, (0, EOS)), grammars.options)
    (form, text), (name, most) = *fields.items(), *options.items()
    sampling = types.SimpleNamespace(stop_token_ids=())
    request = types.SimpleNamespace(sampling=sampling, request_id="r")
    tracked = RequestState(library.compile(Structure(form, text)).start(), request)
    ids = [tokenizer.encode(c, add_special_tokens=False)[-1] for c in "aba"]
    steps = (advance(tracked, [i]) or wait_for_mask(tracked, 0.0) for i in ids * 100)  # type: ignore[arg-type]
    error = next((found for found in steps if found is not None), None)
    assert isinstance(error, RequestError)
    assert f"{name} = {most}" in str(error)


def test_options_of_grammars_are_checked_when_the_engine_is_made() -> None:
    with pytest.raises(ConfigError, match=r"grammar 'llguidance': .*step_lexer_fuel"):
        chosen(grammars={"step_lexer_fuel": 0})
    with pytest.raises(ConfigError, match=r"guided_limits"):
        make_config({"guided_limits": {"depth": 0}})
    assert chosen(grammars={"step_max_items": 7}).options.step_max_items == 7  # type: ignore[union-attr]
    assert make_config({"grammars": "llguidance"}).grammars.name == "llguidance"


def test_a_library_of_your_own_is_named_by_its_import_path() -> None:
    own = chosen(grammars="tests.unit.slow_grammar:SlowLibrary")
    assert (own.library, own.options) == (SlowLibrary, None)
    with pytest.raises(ConfigError, match=r"options most for grammar 'tests.*no options"):
        chosen(grammars={"name": "tests.unit.slow_grammar:SlowLibrary", "most": 7})


def test_a_library_that_no_process_can_import_is_unsupported(tokenizer: Tokenizer) -> None:
    settings = {
        "library": "tests.unit.nowhere:Never",
        "tokenizer": "{}",
        "size": 4,
        "eos_token_ids": [],
        "options": None,
    }
    with pytest.raises(UnsupportedError, match="the worker process"):
        GuardedLibrary(settings, chosen().limits).compile(Structure("regex", "a"))


HOSTILE = SamplingParams(max_tokens=4, grammar=CHAIN)
FREE = SamplingParams(max_tokens=4)


def test_llm_refuses_it_and_serves_others(fake_llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"guided_limits.stack_bytes"):
        fake_llm.generate("Once", HOSTILE)
    with pytest.raises(RequestError, match=r"guided_limits.stack_bytes"):
        fake_llm.generate(["Once", "upon"], [FREE, HOSTILE])
    assert len(fake_llm.generate("Once", FREE)[0].outputs[0].token_ids) == 4


def test_a_step_beyond_a_limit_ends_its_own_request_while_others_are_served(
    faked: None, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:  # holds X02
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    monkeypatch.setattr("tests.fake_engine.next_token", lambda *_: letter)
    (options, beyond), length = STEPS[-1], SamplingParams(max_tokens=64, ignore_eos=True)
    asked = {"beyond": beyond, "guided": {"regex": "a*"}, "free": {}}
    sizes: Any = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
    with LLM(BRIEF, grammars={"name": "llguidance"} | options, **sizes) as llm:
        events = Events()
        for name, fields in asked.items():
            params = length.model_copy(update=fields)
            llm.submit("Once", params, events=events, request_id=name, stream=False)
        ended = {event.request_id: event for event in events if isinstance(event, RequestEnded)}
        error = ended["beyond"].error
        assert isinstance(error, RequestError)
        assert "max_items_in_row = 40" in str(error)
        for name in ("guided", "free"):
            output = ended[name].output
            assert output is not None
            assert output.outputs[0].token_ids == [letter] * 64
        assert llm.generate("Once", FREE)[0].finished


def test_esurge_refuses_it_and_serves_others(faked: None) -> None:
    with eSurge(
        BRIEF, max_model_len=128, max_num_seqs=2, dtype="float32", compile_runner=False
    ) as engine:
        with pytest.raises(ValueError, match=r"guided_limits.stack_bytes"):
            engine.generate("Once", HOSTILE)
        assert len(engine.generate("Once", FREE)[0].outputs[0].token_ids) == 4
        library = engine._jobs._preparer._guide._library
        engine.terminate()
        assert isinstance(library, GuardedLibrary)
        assert library._worker.pid is None


def test_vinference_refuses_it_unread() -> None:
    bare = RequestMaker.__new__(RequestMaker)
    bare.default = FREE
    for fields in ({"grammar": CHAIN}, {"json_schema": deep(10_000)}):
        with pytest.raises(ValueError, match="in the vInference API"):
            bare.params(SamplingParams(**fields))


def test_the_command_refuses_it(faked: None, run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "chain.lark").write_text(CHAIN)
    code, _, err = run(
        "generate", "Once", "--grammar", str(tmp_path / "chain.lark"), "--model", str(BRIEF)
    )
    assert code == 2
    assert "guided_limits.stack_bytes" in err
    assert err.count("\n") == 1


def test_templates_of_requests_are_limited_in_llm_and_its_processes_end_with_it(
    faked: None,
) -> None:
    with LLM(
        BRIEF, dtype="float32", max_model_len=128, max_num_seqs=2, template_limits={"time_s": 0.5}
    ) as llm:
        messages = [{"role": "user", "content": "hello"}]
        endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        with pytest.raises(RequestError, match=r"0.5 seconds \(template_limits.time_s\)"):
            llm.chat(messages, FREE, chat_template=endless)
        assert llm.chat(messages, FREE).finished
        worker = llm.tokenizer._chats._worker
        assert worker.pid is not None
    assert worker.pid is None
