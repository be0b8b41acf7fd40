"""The OpenAPI document of the server: FastAPI's, with the answers that the server really gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from enginebay import __version__
from enginebay_server.api_fields import FIELDS_OF_PATH, OTHER_FIELDS
from enginebay_server.ingress import PROBES
from enginebay_server.settings import ServerSettings

Record = dict[str, Any]

STREAMS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
GENERATING = STREAMS | {"/v1/embeddings"}
RESPONSE = "/v1/responses/{response_id}"
INGRESS_ERRORS = {
    408: "the body was too slow",
    413: "the body is too large",
    500: "the server failed",
    503: "the server is not ready, or it ends",
}
"""Errors that every path has."""
BODY_ERRORS = {
    400: "a field is wrong",
    404: "an unknown model, or an unknown response",
    415: "the body is no JSON, or compressed",
}
NO_METRICS = {501: "prometheus_client is not installed"}
LATER = {429: "too many requests wait", 504: "the answer took too long"}
MISSING = {404: "it is not known here"}

ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
NULLABLE = {"type": ["string", "null"]}
CHAT_FIELDS = ("id", "object", "created", "model", "choices", "usage")
FIELDS = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": CHAT_FIELDS,
    "/v1/embeddings": ("object", "data", "model", "usage"),
    "/v1/responses": ("id", "object", "created_at", "model", "output", "status", "usage"),
    RESPONSE: ("id", "object"),
    "/v1/responses/{response_id}/input_items": ("object", "data", "has_more"),
    "/v1/messages": ("id", "type", "role", "content", "model", "stop_reason", "usage"),
    "/v1/messages/count_tokens": ("input_tokens",),
    "/tokenize": ("count", "max_model_len", "tokens"),
    "/detokenize": ("prompt",),
    "/v1/models": ("object", "data"),
    "/v1/models/{name}": ("id", "object", "created", "owned_by"),
    "/version": ("version",),
    **dict.fromkeys(ADAPTER_PATHS, ("status", "lora_name")),
    **dict.fromkeys(PROBES, ("status",)),
}
"""Fields that an answer of success always has, by path."""

HELLO = [{"role": "user", "content": "Hello!"}]
EXAMPLES: dict[str, Record] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 16},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16, "stream": True},
    "/v1/embeddings": {"input": ["The cat", "One day"]},
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 16},
    "/v1/messages": {"messages": HELLO, "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "Once upon a time"},
    ADAPTER_PATHS[0]: {"lora_name": "tales", "lora_path": "path/to/adapter"},
    ADAPTER_PATHS[1]: {"lora_name": "tales"},
    "/detokenize": {"tokens": [5, 6]},
}
"""A valid body of each path that takes one."""

EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""An event of a stream."""

PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [NULLABLE, {"type": "array", "items": PART}]},
    },
    "required": ["role"],
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": NULLABLE,
                "code": NULLABLE,
            },
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}
ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "error"],
    "additionalProperties": False,
}


def openapi_document(
    routes: list[BaseRoute], models: Sequence[str], settings: ServerSettings
) -> Record:
    """Return the document of these routes of a server with these models; without `models`, a
    request may name any model.
    """
    found = get_openapi(
        title="enginebay",
        version=__version__,
        summary="OpenAI's API over models that enginebay serves",
        routes=routes,
    )
    schemas: Record = found["components"]["schemas"]
    for body in schemas.values():
        _describe_fields(body.get("properties", {}), models)
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's, which no answer has
        schemas.pop(name, None)
    schemas |= {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}
    for path, method, operation in _operations(found):
        operation["responses"] = _responses(path, method, settings)
        _describe_body(path, operation, schemas, settings)
        if settings.api_keys and path not in PROBES:
            operation["security"] = [{"bearer": []}, {"key": []}]
    if settings.api_keys:
        found["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    _link_responses(found["paths"])
    return found


def _operations(document: Record) -> Iterator[tuple[str, str, Record]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _responses(path: str, method: str, settings: ServerSettings) -> Record:
    """Return the answers of an operation by status."""
    errors = INGRESS_ERRORS | (BODY_ERRORS if method == "post" else {})
    if path in GENERATING:
        errors |= LATER
    if path == "/metrics":
        errors |= NO_METRICS
    if "{" in path or path == "/tokenizer_info":
        errors |= MISSING
    if path in ADAPTER_PATHS:
        errors |= {409: "the name is taken, or requests use the adapter"}
    if settings.api_keys and path not in PROBES:
        errors |= {401: "a missing or unknown key"}
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    found: Record = {"200": {"description": "success", "content": _success(path)}}
    for status, what in sorted(errors.items()):
        schema: Record = {"$ref": f"#/components/schemas/{name}"}
        if status == 503 and path in PROBES:
            schema = {"anyOf": [schema, _object(FIELDS[path])]}
        content = {"application/json": {"schema": schema}}
        found[str(status)] = {"description": what, "content": content}
    return found


def _success(path: str) -> Record:
    """Return the content of an answer of success by media type."""
    if path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    content: Record = {"application/json": {"schema": _object(FIELDS.get(path, ()))}}
    if path in STREAMS:
        content["text/event-stream"] = {"schema": EVENT}
    return content


def _object(fields: tuple[str, ...]) -> Record:
    return {"type": "object", "required": list(fields)}


def _describe_fields(fields: Record, models: Sequence[str]) -> None:
    """Say which models there are, and what a message is, which the types of the body leave open."""
    if "model" in fields and models:
        fields["model"] = {"title": "Model", "enum": [*models, None]}
    for kind in (fields.get("messages", {}), *fields.get("messages", {}).get("anyOf", ())):
        if "items" in kind:
            kind["items"] = MESSAGE


def _describe_body(path: str, operation: Record, schemas: Record, settings: ServerSettings) -> None:
    """Add an example and the fields that are ignored, and say that unknown fields are refused."""
    content = operation.get("requestBody", {}).get("content", {})
    for kind in content.values():
        body = schemas[kind["schema"]["$ref"].rpartition("/")[2]]
        for name in sorted(FIELDS_OF_PATH.get(path, OTHER_FIELDS).ignored):
            body["properties"].setdefault(name, {"title": f"{name} (ignored)"})
        body["additionalProperties"] = settings.unknown_fields == "ignore"
        if path in EXAMPLES:
            kind["examples"] = {"short": {"value": EXAMPLES[path]}}


def _link_responses(paths: Record) -> None:
    """Say that the id of a stored response is a parameter of the paths that read it."""
    if "/v1/responses" not in paths:
        return
    success = paths["/v1/responses"]["post"]["responses"]["200"]
    success["links"] = {
        operation["operationId"]: {
            "operationId": operation["operationId"],
            "parameters": {"response_id": "$response.body#/id"},
        }
        for path, methods in paths.items()
        if path.startswith(RESPONSE)
        for operation in methods.values()
    }
