"""The stream of /v1/responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from enginebay.outputs import StreamChunk
from enginebay_server.blocks import Block, BlockEvent
from enginebay_server.errors import ApiError, to_json
from enginebay_server.generation import Generation
from enginebay_server.response_text import OutputTextReader
from enginebay_server.responses import ResponseRecords
from enginebay_server.sse import StreamWriter
from enginebay_server.usage import Usage

NAMES = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
    "custom": "custom_tool_call_input",
}


class ResponseStream(StreamWriter):
    """Writes the events of one response. At the end, `keep` is called with the response's
    blocks and record.
    """

    def __init__(
        self,
        generation: Generation,
        records: ResponseRecords,
        reader: OutputTextReader,
        keep: Callable[[list[Block], dict[str, Any]], Awaitable[None]],
    ) -> None:
        self._records = records
        self._keep = keep
        self._usage = Usage(generation.num_prompt_tokens)
        self._reader = reader
        self._blocks = reader.blocks
        self._reason: str | None = None
        self._num_events = 0

    def begin(self) -> bytes:
        record = {"response": self._records.begun()}
        return self._event("response.created", record) + self._event("response.in_progress", record)

    def write(self, place: int, chunk: StreamChunk) -> bytes:
        self._usage.add(chunk)
        is_last = chunk.finish_reason is not None
        if is_last:
            self._reason = chunk.finish_reason
        ids, told = chunk.delta_token_ids, chunk.logprobs
        events = self._reader.read(chunk.delta_text, ids, told, is_last=is_last)
        return b"".join(self._block_event(event, entries) for event, entries in events)

    async def end(self) -> bytes:
        if self._reason in ("abort", "error"):
            raise ApiError(503, "the server ended the request", code="request_aborted")
        closing = b"".join(map(self._block_event, self._blocks.finish()))
        record = self._records.ended(self._blocks.all, self._reason, self._usage)
        await self._keep(self._blocks.all, record)
        return closing + self._event(f"response.{record['status']}", {"response": record})

    def fail(self, error: ApiError) -> bytes:
        record = {"code": error.code or error.type, "message": error.message, "param": error.param}
        failed = self._records.failed(self._blocks.all, error, self._usage)
        return self._event("error", record) + self._event("response.failed", {"response": failed})

    def _block_event(self, found: BlockEvent, entries: Sequence[dict[str, Any]] = ()) -> bytes:
        what, block, text = found
        place = {"item_id": self._records.item_id(block), "output_index": block.index}
        name = NAMES["custom" if self._records.is_custom(block) else block.kind]
        if block.kind != "call":
            place["content_index"] = 0
        if what == "add":
            more: dict[str, Any] = {"logprobs": entries} if block.kind == "text" else {}
            return self._event(f"response.{name}.delta", {**place, "delta": text, **more})
        if what == "open":
            return self._opened(block, place)
        return self._closed(block, place, name)

    def _opened(self, block: Block, place: dict[str, Any]) -> bytes:
        item = self._records.item(block, "in_progress")
        added = self._event(
            "response.output_item.added", {"output_index": block.index, "item": item}
        )
        if block.kind == "call":
            return added
        part = self._records.part(Block(block.kind, block.index))
        return added + self._event("response.content_part.added", {**place, "part": part})

    def _closed(self, block: Block, place: dict[str, Any], name: str) -> bytes:
        if block.kind == "call":
            text = {"name": block.name, "arguments": block.text}
            done = {**place, **({"input": block.text} if self._records.is_custom(block) else text)}
            found = self._event(f"response.{name}.done", done)
        else:
            is_text = block.kind == "text"
            more: dict[str, Any] = {"logprobs": block.logprobs} if is_text else {}
            found = self._event(f"response.{name}.done", {**place, "text": block.text, **more})
            part = {**place, "part": self._records.part(block)}
            found += self._event("response.content_part.done", part)
        is_cut = self._reason == "length" and block is self._blocks.all[-1]
        item = self._records.item(block, "incomplete" if is_cut else "completed")
        return found + self._event(
            "response.output_item.done", {"output_index": block.index, "item": item}
        )

    def _event(self, name: str, record: dict[str, Any]) -> bytes:
        """An event with its number and name."""
        number, self._num_events = self._num_events, self._num_events + 1
        data = to_json({"type": name, "sequence_number": number, **record})
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
