"""Every sampling parameter reaches the tokens or is refused by name, in each interface; a name that
is no parameter is refused in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enginebay import LLM
from enginebay.cli.generate import add_sampling_arguments, sampling_from
from enginebay.cli.parsing import CommandParser
from enginebay.cli.program import main
from enginebay.errors import InputError, KeywordError, RequestError
from enginebay.types import SamplingParams, as_sampling_params
from enginebay_dashinfer.sampling import DEFAULTS, to_sampling
from enginebay_esurge import eSurge
from enginebay_oengine.documented_rows import CARRIED
from enginebay_vinference.prompts import as_params
from enginebay_vinference.requests import APPLIED, RequestMaker
from tests.sampling_values import UNKNOWN, some_value
from tests.unit.rowtable import make_table

FIELDS = list(SamplingParams.model_fields)


def params_of_vinference(fields: dict[str, Any]) -> SamplingParams:
    """The parameters of a request of vInference, whose defaults are those of SamplingParams."""
    maker = object.__new__(RequestMaker)
    maker.default = SamplingParams()
    return maker.params(fields)


@pytest.mark.parametrize("field", FIELDS)
def test_vinference_applies_a_field_or_refuses_it_by_name(field: str) -> None:
    value = some_value(field)
    if field in APPLIED - {"n", "best_of"}:
        params = params_of_vinference({field: value})
        assert getattr(params, field) == getattr(SamplingParams(**{field: value}), field)
    else:
        with pytest.raises(RequestError, match=f"^{field}"):
            params_of_vinference({field: value})


@pytest.mark.parametrize("field", FIELDS)
def test_a_row_table_stores_a_field_or_refuses_it_by_name(field: str) -> None:
    table, params = make_table(), SamplingParams(**{field: some_value(field)})
    if field in CARRIED:
        table.begin_sequence("a", [1], params)
        assert getattr(table.request(0).sampling.params, field) == getattr(params, field)
    else:
        with pytest.raises(InputError, match=f"^{field} = .* a row table cannot store"):
            table.begin_sequence("a", [1], params)


@pytest.mark.parametrize("field", FIELDS)
def test_dashinfer_applies_a_field_of_its_own_or_refuses_it_by_name(field: str) -> None:
    if field not in DEFAULTS:
        with pytest.raises(InputError, match=f"unknown field of a generation '{field}'"):
            to_sampling({field: some_value(field)}, 4, 16)
    elif field != "logprobs":  # which is a flag there
        params = to_sampling({"top_k": 0, field: some_value(field)}, 4, 16).params
        assert getattr(params, field) == getattr(
            SamplingParams(**{field: some_value(field)}), field
        )


@pytest.mark.parametrize("field", FIELDS)
def test_the_command_line_has_a_flag_or_refuses_it(
    field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = CommandParser(prog="enginebay generate")
    parser.add_argument("--json", action="store_true")
    add_sampling_arguments(parser)
    flags = {action.dest: action.option_strings[-1] for action in parser._actions}
    if field not in flags:
        flag = f"--{field.replace('_', '-')}"
        assert main(["generate", flag, "1"]) == 2
        assert f"unknown flag {flag}" in capsys.readouterr().err
        return
    for given in ([], ["2"], ["0.5"], ["a"], ["{}"], [__file__]):
        try:
            args = parser.parse_args(["--json", flags[field], *given])
            params = sampling_from(args)
        except InputError:
            continue
        if getattr(params, field) != getattr(SamplingParams(), field):
            return
    raise AssertionError(f"{flags[field]} changes nothing")


def test_the_command_line_refuses_a_flag_that_is_no_parameter() -> None:
    assert main(["generate", "--beam-width", "1"]) == main(["chat", "--beam-width", "1"]) == 2


METHODS: list[Callable[..., Any]] = [
    LLM.generate,
    LLM.stream,
    LLM.chat,
    LLM.embed,
    eSurge.generate,
    eSurge.stream,
    eSurge.chat,
]


@pytest.mark.parametrize("name", [*FIELDS, UNKNOWN])
def test_methods_name_themselves_when_a_parameter_is_passed_outside_of_params(name: str) -> None:
    for method in METHODS:
        with pytest.raises(KeywordError, match=rf"^{method.__qualname__}\(\).* {name}"):
            method(None, ["a"], **{name: 1})


@pytest.mark.parametrize(
    "call",
    [
        lambda fields: SamplingParams(**fields),
        as_sampling_params,
        params_of_vinference,
        lambda fields: as_params(fields, SamplingParams()),
        lambda fields: to_sampling(fields, 4, 16),
    ],
)
def test_a_name_that_is_no_parameter_is_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match=UNKNOWN):
        call({UNKNOWN: 1})
