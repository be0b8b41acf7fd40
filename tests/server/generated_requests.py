"""Generated HTTP requests over every operation of a server's own document: valid, wrong, damaged
and hostile ones, the same for the same seed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import string
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from tests.server.hostile_bodies import ADAPTER_BASES, BASES

ALL_BASES = {**BASES, **ADAPTER_BASES}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Fields that stay as in BASES, so that an answer is short."""

EXTREMES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "a", "\x00", "\ud800", "\u2028\x1b[31m\r\n", "0", "auto", "required",
    "x" * 3000,
    "../../etc/passwd", "{{ 1 / 0 }}", "(a+)+$", "[", [], {}, [[]], [None], [0] * 300, ["a"] * 5,
    [10**30], {"": None}, {"\udfff": 1}, {"type": "json_object"}, {"role": "user"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "tool"}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "obj"}}}],
]  # fmt: skip
MODELS = ["demo", "demo", "demo", "", "no-such-model", "/dev/zero", "\x00", "../demo"]
TEXTS = ["Hello!", "a", "", "Once upon a time", "\U0001f600\u0301", "<|endoftext|>", "\u202e"]
NAMES = [
    "demo",
    "resp_1",
    "..",
    "%00",
    "%0aforged%20line",
    "%1b%5b31m",
    "%ff%fe",
    "%2e%2e%2f",
    "a" * 3000,
]
QUERIES = [
    "",
    "",
    "",
    "?",
    "?model=demo",
    "?model=%0a%1b",
    "?after=x&limit=-1",
    "?limit=" + "9" * 400,
]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "FROB"]
CONTENT_TYPES = [
    "text/plain",
    "application/json; charset=utf-16",
    "multipart/form-data",
    "",
    "\xff",
]
HEADERS = [
    ("x-request-id", "a\x1b[31mb"), ("x-request-id", "x" * 5000), ("x-request-id", "\xe9\xff"),
    ("authorization", "Bearer \xff"), ("accept", "nothing/at-all"), ("origin", "http://\x7f"),
    ("traceparent", "00-zz-zz-01"), ("expect", "100-continue"), ("accept-encoding", "x;q=9"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class GeneratedRequest:
    """A request as it is sent. `target`: path and query, of printable ASCII."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def generated_requests(
    document: Mapping[str, Any], count: int, seed: int
) -> Iterator[GeneratedRequest]:
    """Yield `count` requests: operations with a body ten times as often as those without."""
    rng = random.Random(seed)
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    weights = [10 if "requestBody" in operation else 1 for *_, operation in operations]
    for _ in range(count):
        [(method, path, operation)] = rng.choices(operations, weights)
        name = rng.choice(NAMES)
        target = "".join(name if part.startswith("{") else part for part in _parts(path))
        headers: list[tuple[str, str]] = []
        body = b""
        if "requestBody" in operation:
            body = _body(rng, document, path, operation)
            headers.append(("content-type", "application/json"))
        if rng.random() < 0.05:
            method = rng.choice(METHODS)
        if rng.random() < 0.05:
            headers = [("content-type", rng.choice(CONTENT_TYPES))]
        if rng.random() < 0.2:
            headers.append(rng.choice(HEADERS))
        if rng.random() < 0.02:
            target += "/" + rng.choice(NAMES)
        yield GeneratedRequest(method, target + rng.choice(QUERIES), tuple(headers), body)


def _extreme(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(EXTREMES))


def _parts(path: str) -> list[str]:
    """The fixed texts and the parameters of a path."""
    found = []
    for text, name, _, _ in string.Formatter().parse(path):
        found.append(urllib.parse.quote(text))
        if name is not None:
            found.append("{" + name + "}")
    return found


def _body(
    rng: random.Random, document: Mapping[str, Any], path: str, operation: Mapping[str, Any]
) -> bytes:
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    body = {**copy.deepcopy(ALL_BASES[path]), "model": rng.choice(MODELS)}
    fields = _resolved(document, schema)["properties"]
    names = [name for name in fields if name not in LENGTHS]
    for name in rng.sample(names, rng.choice([0, 1, 1, 2, 3])):
        body[name] = _value(rng, document, fields[name], 4)
    kind = rng.random()
    if kind < 0.45:
        for name in rng.sample([*names, "no_such_field"], rng.choice([1, 1, 2])):
            body[name] = _extreme(rng)
    elif kind < 0.6:
        _change_inside(rng, body)
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    data = text.encode(errors="surrogatepass")
    return _damaged(rng, data) if kind > 0.93 else data


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in schema:
        return schema
    found: Mapping[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _value(
    rng: random.Random, document: Mapping[str, Any], schema: Mapping[str, Any], depth: int
) -> Any:
    """A value that a schema allows, but for its limits."""
    schema = _resolved(document, schema)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _value(rng, document, rng.choice(schema[key]), depth)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if depth == 0 or kind is None:
        return _extreme(rng)
    if kind == "array":
        items = schema.get("items", {})
        return [_value(rng, document, items, depth - 1) for _ in range(rng.randrange(4))]
    if kind == "object":
        fields = {
            name: _value(rng, document, one, depth - 1)
            for name, one in schema.get("properties", {}).items()
            if name in schema.get("required", ()) or rng.random() < 0.3
        }
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping) or not fields:
            fields[rng.choice(["5", "a", "location"])] = rng.choice([1, "a", -100, 1.5])
        return fields
    return {
        "string": lambda: rng.choice(TEXTS),
        "integer": lambda: rng.choice([0, 1, 2, 3, 7, 1999]),
        "number": lambda: rng.choice([0, 0.3, 1, 1.7]),
        "boolean": lambda: rng.random() < 0.5,
        "null": lambda: None,
    }[kind]()


def _change_inside(rng: random.Random, value: Any) -> None:
    """Replace one value anywhere inside a list or an object by an extreme."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        keys = [key for key in keys if key not in LENGTHS]
        if not keys:
            return
        key = rng.choice(keys)
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            value[key] = _extreme(rng)
            return
        value = inner


def _damaged(rng: random.Random, data: bytes) -> bytes:
    """A body that is cut off, has other bytes, or is no JSON."""
    at = rng.randrange(len(data))
    return rng.choice(
        [
            data[:at],
            data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            data + data,
            b"\xef\xbb\xbf" + data,
            b"",
            b"null",
            b"[" * 5000,
            b"\x00" * 100,
            rng.randbytes(200),
            b'{"model": "demo", "model": []}',
        ]
    )
