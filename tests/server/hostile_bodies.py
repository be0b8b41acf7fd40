"""Bodies of the largest allowed size, for every path and field of a server's own document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

HELLO = [{"role": "user", "content": "Hello!"}]
BASES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "a"},
    "/v1/count_tokens": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
"""A valid body of each path; the hostile value replaces one field, or is added."""

ADAPTER_BASES: Mapping[str, dict[str, Any]] = {
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/no/such/folder"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
"""The same of the paths that a server has with --lora-routes. No adapter is found."""

MAX_VALUES = 2**18
"""The default of --max-body-values."""

MESSAGE = b'{"role":"user","content":"a"}'
ITEMS: Mapping[str, bytes] = {
    "ids": b"5",
    "texts": b'"a"',
    "commas": b'",,,,,,,"',
    "lists": b"[]",
    "lists of ids": b"[5,6]",
    "messages": MESSAGE,
    "tools": b'{"type":"function","function":{"name":"f"}}',
}
"""Items of which a list is made that fills the body."""


def hostile_values(size: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and JSON texts of about `size` bytes."""
    yield "a text", b'"' + b"a " * (size // 2) + b'"'
    yield "a text of one letter", b'"' + b"a" * size + b'"'
    yield "a text of escapes", b'"' + b'\\"' * (size // 2) + b'"'
    for name, item in ITEMS.items():
        count = size // (len(item) + 1)
        yield f"a list of {name}", b"[" + b",".join([item] * count) + b"]"
    for name, item in ITEMS.items():  # as many as the limit on values allows
        count = MAX_VALUES // (1 + sum(item.count(byte) for byte in (b",", b"[", b"{")))
        yield f"a list of fewer {name}", b"[" + b",".join([item] * (count - 100)) + b"]"
    long_text = b'"' + b"a " * (2**19 - 4) + b'"'
    yield "a long text", long_text
    yield "long texts", b"[" + b",".join([long_text] * (size // len(long_text) - 1)) + b"]"
    yield "a long message", b'[{"role":"user","content":' + long_text + b"}]"
    yield "a message of one text", b'[{"role":"user","content":"' + b"a " * (size // 2) + b'"}]'
    parts = b",".join([b'{"type":"text","text":"a"}'] * (size // 27))
    yield "a message of parts", b'[{"role":"user","content":[' + parts + b"]}]"
    keys = b",".join(b'"%d":1' % number for number in range(size // 11))
    yield "an object", b"{" + keys + b"}"
    depth = size // 2
    yield "nested lists", b"[" * depth + b"]" * depth


def hostile_bodies(
    document: Mapping[str, Any], size: int, bases: Mapping[str, dict[str, Any]] = BASES
) -> Iterator[tuple[str, str, bytes]]:
    """Yield path, what is hostile, and a body of at most `size` bytes, for every field of the
    document that takes a list, an object or a text, and for a field that no body has.
    """
    values = dict(hostile_values(size - 1024))
    schemas = document["components"]["schemas"]
    for path, base in bases.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]
        schema = schemas[content["application/json"]["schema"]["$ref"].rpartition("/")[2]]
        fields = [name for name, one in schema["properties"].items() if takes_many(one)]
        for field in [*fields, "no_such_field"]:
            others = {name: value for name, value in base.items() if name != field}
            head = json.dumps(others)[:-1].encode()
            for name, value in values.items():
                start = head + (b"," if others else b"") + json.dumps(field).encode() + b":"
                yield path, f"{field} is {name}", start + value + b"}"
        for name in ("a list of ids", "a list of lists", "nested lists", "an object"):
            yield path, f"the body is {name}", values[name]
        yield path, "the body is cut off", values["a list of texts"][:-1]
        yield path, "the body is zeros", bytes(size)


def takes_many(schema: Mapping[str, Any]) -> bool:
    """Whether a field's schema has a list, an object or a text, or leaves its type open."""
    branches = schema.get("anyOf", schema.get("oneOf", [schema]))
    return any(
        "type" not in one or one["type"] in ("array", "object", "string") for one in branches
    )
