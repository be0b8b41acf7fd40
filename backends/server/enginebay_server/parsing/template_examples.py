"""Examples of output that a response_template describes, with three declarations."""

from __future__ import annotations

from enginebay.contracts.output_format import Example, ExampleCall, ModelChat, ParseRequest, Piece

_ANCHOR = {"start_anchor": "<|im_start|>assistant\n"}
_THINK = {"open": "<think>", "close": "</think>"}
_JSON = {
    **_ANCHOR,
    "fields": {
        "reasoning_content": _THINK,
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
_PYTHON = {
    **_ANCHOR,
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open": "<|tool_call_start|>",
            "close": "<|tool_call_end|>",
            "content": "python-call-list",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
            "transform_each": True,
        },
        "content": {},
    },
}
_PARIS = ExampleCall("get_weather", '{"city": "Paris"}')
_WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
EXAMPLES = (
    Example(
        (
            Piece("<think>\nI need a tool.\n</think>\n\n", reasoning="I need a tool."),
            Piece("I look it up.\n", content="I look it up."),
            Piece(_WEATHER, calls=(_PARIS,)),
        ),
        ParseRequest(ModelChat("", _JSON)),
    ),
    Example(
        (
            Piece(_WEATHER, calls=(_PARIS,)),
            Piece("\nAnd again:\n", content="And again:"),
            Piece(
                '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
                calls=(ExampleCall("now"),),
            ),
            Piece("\nDone.", content="Done."),
        ),
        ParseRequest(ModelChat("", _JSON)),
    ),
    Example(
        (
            Piece("Well.\n</think>", reasoning="Well."),
            Piece("<tool_call>{oops}</tool_call> is no call."),
        ),
        ParseRequest(ModelChat("", _JSON), prompt_end=lambda _: "<|im_start|>assistant\n<think>\n"),
    ),
    Example(
        (
            Piece("Both. ", content="Both."),
            Piece(
                '<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>',
                calls=(_PARIS, ExampleCall("now")),
            ),
        ),
        ParseRequest(ModelChat("", _PYTHON)),
    ),
)
