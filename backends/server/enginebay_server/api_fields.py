"""The request fields of each path: the server honours some, accepts others without an effect, and
refuses the rest with a reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class UnreadField:
    """A field without a meaning here: why, and the values that ask for nothing. Null is such a
    value too.
    """

    why: str
    neutral: Sequence[Any] = ()

    def asks(self, value: Any) -> bool:
        """Return whether a value asks for something."""
        return value is not None and value not in self.neutral


@dataclasses.dataclass(frozen=True, slots=True)
class ApiFields:
    """The fields that clients of one path send."""

    honoured: frozenset[str] = frozenset()
    ignored: Mapping[str, UnreadField] = dataclasses.field(default_factory=dict)
    """Accepted without an effect. The response header names each one whose value asks for one."""
    refused: Mapping[str, UnreadField] = dataclasses.field(default_factory=dict)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CACHING = "every prompt is cached"
ONE_TIER = "all requests run at the same service level"
NO_RECORD = "nothing reads it"
NO_REMOTE = "the server runs no tools and no containers"
NO_AUDIO = "answers are text"
NO_MODERATION = "no model here moderates texts"
BY_TEMPLATE = "the chat template decides whether the model reasons"
ON_TIME = "the answer has the same tokens without it"

_COMMON = {
    "metadata": UnreadField(NO_RECORD, [{}]),
    "prompt_cache_key": UnreadField(CACHING),
    "prompt_cache_options": UnreadField(CACHING, [{}]),
    "prompt_cache_retention": UnreadField(CACHING),
    "safety_identifier": UnreadField(NO_RECORD),
    "service_tier": UnreadField(ONE_TIER, ["auto", "default", "standard_only"]),
    "store": UnreadField("only responses are stored", [False]),
    "verbosity": UnreadField("say in the prompt how long an answer should be", ["medium"]),
    "cache_control": UnreadField(CACHING),
    "client_metadata": UnreadField(NO_RECORD, [{}]),
}

CHAT_FIELDS = ApiFields(
    _names(
        """messages model frequency_penalty logit_bias logprobs max_completion_tokens max_tokens n
        parallel_tool_calls presence_penalty reasoning_effort response_format seed stop stream
        stream_options temperature tool_choice tools top_logprobs top_p user"""
    ),
    _COMMON
    | {
        "prediction": UnreadField(ON_TIME),
        "web_search_options": UnreadField(NO_REMOTE),
    },
    {
        "audio": UnreadField(NO_AUDIO),
        "modalities": UnreadField(NO_AUDIO, [["text"]]),
        "moderation": UnreadField(NO_MODERATION),
        "functions": UnreadField("`tools` has taken its place", [[]]),
        "function_call": UnreadField("`tool_choice` has taken its place", ["none", "auto"]),
    },
)

COMPLETION_FIELDS = ApiFields(
    _names(
        """model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n
        presence_penalty seed stop stream stream_options temperature top_p user"""
    ),
    _COMMON,
    {"suffix": UnreadField("no model here fills a gap in a text", [""])},
)

RESPONSE_FIELDS = ApiFields(
    _names(
        """include input instructions max_output_tokens max_tool_calls metadata model
        parallel_tool_calls previous_response_id reasoning store stream stream_options temperature
        text tool_choice tools top_logprobs top_p user frequency_penalty presence_penalty"""
    ),
    {name: why for name, why in _COMMON.items() if name not in ("metadata", "store")}
    | {
        "access_programs": UnreadField("the named model answers", [{}]),
        "background_options": UnreadField("answers are made while the client waits", [{}]),
        "context_management": UnreadField(
            "a conversation that is too long is refused", [[], {}, {"edits": []}]
        ),
        "image": UnreadField("models here read text alone", [{}]),
        "truncation": UnreadField("a conversation that is too long is refused", ["disabled"]),
    },
    {
        "background": UnreadField("answers are made while the client waits", [False]),
        "conversation": UnreadField("`previous_response_id` goes on with what is stored"),
        "moderation": UnreadField(NO_MODERATION),
        "prompt": UnreadField("the server stores no prompts"),
    },
)

MESSAGE_FIELDS = ApiFields(
    _names(
        """messages model max_tokens output_config output_format stop_sequences stream system
        temperature tool_choice tools top_k top_p"""
    ),
    _COMMON
    | {
        "thinking": UnreadField(BY_TEMPLATE, [{"type": "disabled"}]),
        "container": UnreadField(NO_REMOTE),
        "mcp_servers": UnreadField(NO_REMOTE, [[]]),
        "context_management": UnreadField(
            "the client's messages are answered as they are", [[], {}, {"edits": []}]
        ),
        "diagnostics": UnreadField(NO_RECORD, [{}, {"previous_message_id": None}]),
        "fallbacks": UnreadField("the named model answers", [[]]),
        "fallback_credit_token": UnreadField("the named model answers"),
        "inference_geo": UnreadField("the server runs in one place"),
        "speed": UnreadField(ONE_TIER, ["standard"]),
        "user_profile_id": UnreadField(NO_RECORD),
        # in bodies that pass a gateway, in place of headers
        "betas": UnreadField("fields are read without them", [[]]),
        "anthropic_beta": UnreadField("fields are read without them", [[]]),
        "anthropic_version": UnreadField("there is one version"),
    },
)

OTHER_FIELDS = ApiFields(ignored=_COMMON)
"""Of the other paths that take a body."""

FIELDS_OF_PATH: Mapping[str, ApiFields] = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/responses": RESPONSE_FIELDS,
    "/v1/messages": MESSAGE_FIELDS,
    "/v1/messages/count_tokens": MESSAGE_FIELDS,
}

UNREAD_NAMES = frozenset(
    name for api in FIELDS_OF_PATH.values() for name in (*api.ignored, *api.refused)
)
"""Fields of all paths that may be null on any path."""
