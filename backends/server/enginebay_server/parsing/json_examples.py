"""Examples of tool calls as JSON, as models write them."""

from __future__ import annotations

from enginebay.contracts.output_format import Example, ExampleCall, Piece

PARIS = '{"city": "Paris", "unit": "celsius"}'
TRIP = '{"stops": [{"city": "Köln", "nights": 2}, {"city": "東京", "nights": null}], "by": "train"}'
WEATHER = ExampleCall("get_weather", PARIS)
PLAN = ExampleCall("plan_trip", TRIP)
NOW = ExampleCall("now")


def hermes_call(name: str, arguments: str) -> str:
    """Return a call as Hermes and Qwen write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES = (
    Example((Piece(hermes_call("get_weather", PARIS), calls=(WEATHER,)),)),
    Example(
        (
            Piece("I look both up.\n\n", content="I look both up."),
            Piece(hermes_call("get_weather", PARIS), calls=(WEATHER,)),
            Piece("\n" + hermes_call("plan_trip", TRIP), calls=(PLAN,)),
        )
    ),
    Example(
        (
            Piece(hermes_call("now", "{}"), calls=(NOW,)),
            Piece("\nAnd the weather:\n", content="And the weather:"),
            Piece(hermes_call("get_weather", PARIS), calls=(WEATHER,)),
            Piece("\nDone.", content="Done."),
        )
    ),
    Example(
        (
            Piece('<tool_call>{"name": "now", "arguments": {oops}}</tool_call>'),
            Piece(f'\n<tool_call>{{"name":"plan_trip","arguments":{TRIP}}}', calls=(PLAN,)),
        )
    ),
    Example((Piece("A call begins with <tool_call>, and ends with </tool_call>."),)),
)

LLAMA3 = (
    Example(
        (Piece(f'{{"name": "get_weather", "parameters": {PARIS}}}', calls=(WEATHER,)),),
        at_start=True,
    ),
    Example(
        (
            Piece('{"type": "function", "name": "now", "parameters": {}}', calls=(NOW,)),
            Piece(f'; {{"name": "plan_trip", "parameters": {TRIP}}}', calls=(PLAN,)),
        ),
        at_start=True,
    ),
    Example(
        (
            Piece("Let me look. ", content="Let me look."),
            Piece(
                f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; '
                '{"name": "now", "parameters": {}}',
                calls=(WEATHER, NOW),
            ),
        )
    ),
    Example((Piece('{"temperature": 21, "city": "Paris"} is what I found.'),)),
)

MISTRAL = (
    Example(
        (
            Piece(
                f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, '
                '{"name": "now", "arguments": {}}]',
                calls=(WEATHER, NOW),
            ),
        )
    ),
    Example(
        (
            Piece("I plan it."),
            Piece(f"[TOOL_CALLS]plan_trip[CALL_ID]VvvODy9mT[ARGS]{TRIP}", calls=(PLAN,)),
            Piece(f"[TOOL_CALLS]get_weather[CALL_ID]0nTgq2kLa[ARGS]{PARIS}", calls=(WEATHER,)),
        )
    ),
    Example(
        (
            Piece(f"[TOOL_CALLS]get_weather{PARIS}", calls=(WEATHER,)),
            Piece("[TOOL_CALLS]now{}", calls=(NOW,)),
        )
    ),
    Example((Piece("[TOOL_CALLS] is a mark, and [ARGS] is one, too."),)),
)

BARE = (
    Example(
        (Piece(f'{{"name": "get_weather", "arguments": {PARIS}}}', calls=(WEATHER,)),),
        at_start=True,
    ),
    Example(
        (
            Piece(
                f'[\n  {{"name": "plan_trip", "arguments": {TRIP}}},\n'
                '  {"name": "now", "arguments": {}}\n]',
                calls=(PLAN, NOW),
            ),
        ),
        at_start=True,
    ),
    Example(
        (
            Piece(
                '{"type": "function", "function": {"name": "get_weather", '
                '"arguments": "{\\"city\\": \\"Paris\\", \\"unit\\": \\"celsius\\"}"}}',
                calls=(WEATHER,),
            ),
        ),
        at_start=True,
    ),
    Example((Piece(f'The call is {{"name": "get_weather", "arguments": {PARIS}}}.'),)),
)
