"""Arguments of Qwen3-Coder's calls have the types that the tools' schemas allow, however a schema
says so.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginebay.contracts.output_format import ModelChat, ParseRequest, ToolArgumentsDelta
from enginebay_server.parsing.xml_calls import qwen3_coder

DEFS = {
    "P": {"type": "object"},
    "loop": {"$ref": "#/$defs/loop"},
    "a/b": {"type": "integer"},
    "colour": {"enum": ["red", "1"]},
    "args": {"properties": {"v": {"type": "integer"}}},
}
OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
CASES: list[tuple[Any, str, Any]] = [
    (OPTIONAL, "5", 5),
    (OPTIONAL, "null", None),
    (OPTIONAL, "None", None),
    (OPTIONAL, "five", "five"),
    (TEXT_OR_NULL, "5", "5"),
    (TEXT_OR_NULL, "null", None),
    (TEXT_OR_NULL, "None", None),
    ({"type": "string"}, "null", "null"),
    ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, "[1]", [1]),
    ({"$ref": "#/$defs/P"}, '{"a": 1}', {"a": 1}),
    ({"$ref": "#/$defs/a~1b"}, "1", 1),
    ({"$ref": "#/$defs/colour"}, "1", "1"),
    ({"$ref": "#/$defs/loop"}, "1", "1"),
    ({"$ref": "#/$defs/none"}, "1", "1"),
    ({"$ref": "http://x/y"}, "1", "1"),
    ({"allOf": [{"$ref": "#/$defs/P"}], "description": "p"}, "{}", {}),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"]}]}, "3", 3),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": True}, "true", True),
    ({"const": None}, "null", None),
    ({"type": "integer"}, "3.0", 3),
    ({"type": "integer"}, "3.5", "3.5"),
    ({"type": "integer"}, "true", "true"),
    ({"type": "number"}, "3.0", 3.0),
    ({"type": "number"}, "3", 3),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "boolean"}, "1", "1"),
    ({"items": {"type": "string"}}, '["a"]', ["a"]),
    ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
    ({"minimum": 3}, "4", 4),
    ({}, "5", "5"),
    (True, "5", "5"),
    ({"type": "colour"}, "5", "5"),
    ({"anyOf": []}, "5", "5"),
]


def argument(parameters: Any, text: str) -> Any:
    tool = {"name": "f", "parameters": parameters}
    parser = qwen3_coder.make_parser(ParseRequest(ModelChat(), [tool]))
    call = f"<tool_call><function=f><parameter=v>{text}</parameter></function></tool_call>"
    deltas = parser.feed(call) + parser.finish()
    return json.loads("".join(d.text for d in deltas if isinstance(d, ToolArgumentsDelta)))["v"]


@pytest.mark.parametrize(("schema", "text", "right"), CASES)
def test_an_argument_has_the_type_that_its_schema_allows(
    schema: Any, text: str, right: Any
) -> None:
    seen = argument({"type": "object", "properties": {"v": schema}, "$defs": DEFS}, text)
    assert (seen, type(seen)) == (right, type(right))


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/args"},
        {"allOf": [{"$ref": "#/$defs/args"}, {"properties": {"w": {}}}]},
        {"anyOf": [{"$ref": "#/$defs/args"}, {"properties": {"v": {"type": "null"}}}]},
        {"additionalProperties": {"type": "integer"}},
    ],
)
def test_the_schema_of_an_argument_is_found_in_each_place(parameters: Any) -> None:
    assert argument({**parameters, "$defs": DEFS}, "5") == 5


def test_references_that_double_at_each_step_are_read_once() -> None:
    defs = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(24)
    }
    schema = {"properties": {"v": {"$ref": "#/$defs/d0"}}, "$defs": defs}
    assert argument({**schema, "$defs": {**defs, "d24": {"type": "integer"}}}, "5") == 5
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(900):
        nested = {"anyOf": [nested]}
    assert argument({"properties": {"v": nested}}, "5") == "5"
