"""Checks messages against the types of Anthropic's client: no field is missing, has another type, or is unknown to
it."""

import json
from typing import Any

import httpx
import jiter
import msgspec
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.api.one_answer import Reading
from tests.api.serving import Served

EVENTS: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
MESSAGES = "/v1/messages"
MAX_TOKENS = 200


async def post(served: Served, given: object = "hi", **fields: object) -> httpx.Response:
    """Sends a raw request. `fields` are added to the body unchanged. A string is one turn of the user."""
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
    body = {"messages": turns, "max_tokens": MAX_TOKENS} | fields
    return await served.http.post(MESSAGES, content=json.dumps(body))


READING = Reading(Message, EVENTS, passing=("ping",), more=frozenset())
unstreamed, checked = READING.unstreamed, READING.checked


def streamed(response: httpx.Response) -> list[RawMessageStreamEvent]:
    return in_order(READING.streamed(response))


def read_events(data: bytes) -> list[RawMessageStreamEvent]:
    return in_order(READING.events(data))


def in_order(events: list[RawMessageStreamEvent]) -> list[RawMessageStreamEvent]:
    """Checks that blocks are numbered in the order of their starts, and that each ends."""
    starts = [event.index for event in events if event.type == "content_block_start"]
    ended = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == ended == [*range(len(starts))]
    return events


def final(events: list[RawMessageStreamEvent]) -> Message:
    """Returns the message of a stream, joined as in the official client."""
    first, *rest, last = events
    assert first.type == "message_start"
    assert last.type == "message_stop"
    message, arguments = first.message.to_dict(), dict[int, str]()
    blocks: Any = message["content"]
    for event in rest:
        match event.type:
            case "content_block_start":
                blocks.append(event.content_block.to_dict())
            case "content_block_delta":
                ((kind, piece),) = event.delta.model_dump(exclude={"type"}).items()
                if kind == "partial_json":
                    arguments[event.index] = arguments.get(event.index, "") + piece
                    blocks[event.index]["input"] = jiter.from_json(arguments[event.index].encode(), partial_mode=True)
                else:
                    blocks[event.index][kind] += piece
            case "message_delta":
                assert event is rest[-1]
                message |= event.delta.to_dict() | {"usage": event.usage.to_dict()}
    return checked(msgspec.json.encode(message))


def plain(message: Message) -> dict[str, Any]:
    """Returns the message without ids, which differ between any two messages."""
    fields: dict[str, Any] = message.model_dump(exclude={"id"})
    for number, block in enumerate(fields["content"]):
        if block["type"] == "tool_use":
            block["id"] = number
    return fields


def texts(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def checked_error(response: httpx.Response) -> httpx.Response:
    """Returns the response after a check that its error is in Anthropic's shape."""
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return response
