"""Registers the built-in formats of tool calls and of reasoning."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl

_TOOL_CALLS = (
    ("hermes", "json_calls:hermes", 10, "<tool_call> and JSON, as Hermes and Qwen write"),
    ("qwen3_coder", "xml_calls:qwen3_coder", 10, "<function=NAME>, as Qwen3-Coder writes"),
    ("mistral", "json_calls:mistral", 10, "[TOOL_CALLS], names and JSON, as Mistral writes"),
    ("llama3", "json_calls:llama3", 10, "JSON, perhaps behind <|python_tag|>, as Llama 3 writes"),
    ("json", "json_calls:bare_json", -10, "an answer that is the JSON of calls"),
)


@hookimpl
def register_formats(register: Register) -> None:
    """Register the formats. `auto` tries them by priority, the highest first."""
    for name, target, priority, summary in _TOOL_CALLS:
        register(
            name,
            f"enginebay_server.parsing.{target}",
            summary=summary,
            capabilities={"reads": ("tool_calls",), "priority": priority},
        )
    register(
        "template",
        "enginebay_server.parsing.template:template",
        summary="what the model's response_template declares",
        capabilities={"reads": ("tool_calls", "reasoning"), "priority": 100},
    )
    register(
        "think",
        "enginebay_server.parsing.thinking:think",
        summary="reasoning between <think> and </think>",
        capabilities={"reads": ("reasoning",)},
    )
