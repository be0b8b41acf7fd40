"""A wrong value is one line with that field's values and what to do, in Python as on the command
line.
"""

from __future__ import annotations

import copy
import json
import pickle
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from enginebay import LLM, EngineConfig, SamplingParams, keywords
from enginebay.config import make_config
from enginebay.errors import OTHER_PROGRAMS, ConfigError, InputError, RequestError, nearest
from enginebay.validation import describe_validation

MAX_LINE = 250


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EngineConfig(dtype="bf16"),  # type: ignore[arg-type]
            "dtype = 'bf16'. Allowed: auto, float32, bfloat16 or float16. Did you mean 'bfloat16'?",
        ),
        (
            lambda: EngineConfig(dtype="fp16"),  # type: ignore[arg-type]
            "dtype = 'fp16'. Allowed: auto, float32, bfloat16 or float16. Did you mean 'float16'?",
        ),
        (
            lambda: EngineConfig(max_num_seqs=0),
            (
                "max_num_seqs = 0. Allowed: a whole number from 1 to 4096. "
                "Leave max_num_seqs out for its default, 32."
            ),
        ),
        (
            lambda: EngineConfig(tensor_parallel_size=2),  # type: ignore[call-arg]
            (
                "tensor_parallel_size = 2, an unknown field. Allowed: model, platform, dtype, "
                f"engine, scheduler and {len(EngineConfig.model_fields) - 5} more. "
                f"Here it is mesh={{'tensor': N}}."
            ),
        ),
        (
            lambda: SamplingParams(top_p=2.0),
            (
                "top_p = 2.0. Allowed: a number above 0, at most 1. "
                "Leave top_p out for its default, 1.0."
            ),
        ),
        (
            lambda: SamplingParams(logit_bias={3: 900.0}),
            (
                "logit_bias.3 = 900.0. Allowed: a number from -100 to 100. Change it, "
                "or leave logit_bias.3 out."
            ),
        ),
        (
            lambda: SamplingParams(choice=[]),
            (
                "choice = (). Allowed: a list of texts that is not empty, or none. "
                "Change it, or leave choice out."
            ),
        ),
        (
            lambda: SamplingParams(max_new_tokens=3),  # type: ignore[call-arg]
            "max_new_tokens = 3, an unknown field. Allowed: max_tokens. Here it is max_tokens.",
        ),
        (
            lambda: setattr(SamplingParams(), "temperature", -1),
            (
                "temperature = -1. Allowed: a number of at least 0. "
                "Leave temperature out for its default, 0.0."
            ),
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_what_its_field_allows(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(InputError) as refusal:
        make()
    assert str(refusal.value) == message


@pytest.mark.parametrize("name", EngineConfig.model_fields)
def test_a_wrong_value_of_any_field_names_no_other_field(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_config({name: object()})
    message = str(refusal.value)
    assert message.startswith(f"{name} = <object")
    assert len(message) < MAX_LINE
    assert not [
        other for other in EngineConfig.model_fields if other != name and f"{other}, " in message
    ]


@pytest.mark.parametrize("name", SamplingParams.model_fields)
def test_a_wrong_value_of_a_request_names_no_other_field(name: str) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{name: object()})
    assert str(refusal.value).startswith(f"{name} = <object")
    assert len(str(refusal.value)) < MAX_LINE


@pytest.mark.parametrize(
    ("model", "fields"),
    [(EngineConfig, {"max_num_seqs": 0}), (SamplingParams, {"top_p": 2.0})],
)
def test_validating_a_dict_or_json_gives_the_error_of_the_constructor(
    model: Any, fields: dict[str, Any]
) -> None:
    messages = set()
    ways: list[Callable[[], object]] = [
        lambda: model(**fields),
        lambda: model.model_validate(fields),
        lambda: model.model_validate_json(json.dumps(fields)),
    ]
    for way in ways:
        with pytest.raises(model.refusal) as refusal:
            way()
        messages.add(str(refusal.value))
    assert len(messages) == 1
    allowed = "Allowed: fields with their values. Pass a dict, or a JSON object."
    for way in (lambda: model.model_validate(3), lambda: model.model_validate_json("{")):
        with pytest.raises(model.refusal) as refusal:
            way()
        assert str(refusal.value).endswith(allowed)
        assert "\n" not in str(refusal.value)


def test_values_of_unbearable_length_are_cut() -> None:
    with pytest.raises(ConfigError) as refusal:
        make_config({"k" * 5000: "v" * 5000})
    assert len(str(refusal.value)) < MAX_LINE + 100


def test_options_that_no_schema_describes_are_refused_all_the_same() -> None:
    class Options(BaseModel):
        size: int = Field(default=3, ge=2)
        call: Callable[[], int] = lambda: 3

    with pytest.raises(ValueError, match="size") as found:
        Options(size=1)
    told = describe_validation(found.value, Options)  # type: ignore[arg-type]
    assert told == "size = 1. Allowed: greater than or equal to 2. Change it, or leave size out."


def test_names_of_other_programs_lead_to_ours() -> None:
    names = ["auto", "float32", "bfloat16", "float16"]
    assert [nearest(n, names) for n in ("BF16", "half", "fp32")] == [
        "bfloat16",
        "float16",
        "float32",
    ]
    assert nearest("gpu", ["cpu", "cuda", "tpu"]) == "cuda"
    fields = {*EngineConfig.model_fields, *SamplingParams.model_fields}
    for other, (_, keyword) in OTHER_PROGRAMS["options"].items():
        assert other not in fields
        assert {word.strip("=,'") for word in keyword.replace("=", " ").split()} & fields, other
    assert not fields & set(OTHER_PROGRAMS["nothing"])


def test_keywords_for_type_checkers_are_the_fields() -> None:
    fields = set(typing.get_type_hints(keywords.EngineFields))
    assert fields == set(EngineConfig.model_fields)


@pytest.mark.parametrize("value", [SamplingParams(stop=".", n=2), EngineConfig(engine="x", seed=3)])
def test_a_repr_has_what_differs_and_makes_the_value_again(value: Any) -> None:
    assert repr(SamplingParams(stop=".", n=2)) == "SamplingParams(n=2, stop=('.',))"
    for other in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), value.model_copy()):
        assert other == value
    assert type(value).model_validate_json(value.model_dump_json()) == value


def test_parameters_may_be_dicts_and_mixed(fake_llm: LLM) -> None:
    same = fake_llm.generate(["Once", "One"], [{"max_tokens": 5}, SamplingParams(max_tokens=5)])
    assert [len(output.outputs[0].token_ids) for output in same] == [5, 5]
    assert fake_llm.generate("Once", {"max_tokens": 5})[0].get_text() == same[0].get_text()
    assert (
        "".join(c.delta_text for c in fake_llm.stream("Once", {"max_tokens": 5}))
        == same[0].get_text()
    )
    messages = [{"role": "user", "content": "Hello"}]
    assert len(fake_llm.chat(messages, {"max_tokens": 4}).outputs[0].token_ids) == 4
    with pytest.raises(RequestError, match="max_token = 5, an unknown field"):
        fake_llm.generate("Once", {"max_token": 5})


TYPED = """
from enginebay import LLM, SamplingParams
from enginebay_esurge import eSurge

SamplingParams(stop=".", logit_bias={3: 1.0})
LLM("demo", engine={"name": "oengine", "page_size": 8}, mesh={"tensor": 2}).generate("a", {"n": 2})
LLM("demo", tenser_parallel=3)
SamplingParams(stopp=".")
eSurge("demo", schedular="fcfs")
"""


@pytest.mark.slow  # mypy reads the whole package
def test_the_scripts_of_the_examples_are_clean_for_a_strict_type_checker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_root: Path
) -> None:
    api = pytest.importorskip("mypy.api")
    monkeypatch.chdir(repo_root)
    settings = ["--config-file", "pyproject.toml", "--strict", "--cache-dir", str(tmp_path)]
    scripts = sorted(str(path) for path in (repo_root / "docs/examples").glob("*.py"))
    assert len(scripts) >= 5
    found, err, status = api.run([*settings, "--follow-imports", "silent", *scripts])
    assert (found.strip(), err, status) == (
        f"Success: no issues found in {len(scripts)} source files",
        "",
        0,
    )


@pytest.mark.slow  # mypy reads the whole package
def test_a_type_checker_finds_misspelt_keywords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_root: Path
) -> None:
    api = pytest.importorskip("mypy.api")
    file = tmp_path / "typed.py"
    file.write_text(TYPED, encoding="utf-8")
    monkeypatch.chdir(repo_root)
    found, err, _ = api.run(
        ["--config-file", "pyproject.toml", "--cache-dir", str(tmp_path), str(file)]
    )
    assert err == ""
    wrong = [line for line in found.splitlines() if ": error: " in line]
    assert [line.split(":")[1] for line in wrong] == ["7", "8", "9"]
    for line, keyword in zip(wrong, ("tenser_parallel", "stopp", "schedular"), strict=True):
        assert f'Unexpected keyword argument "{keyword}"' in line
