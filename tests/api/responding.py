"""Checks responses against the types of the official client: no field is missing, has another type, or is unknown to
it."""

from typing import Any

import httpx
import msgspec
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.one_answer import Reading
from tests.api.serving import Served

EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


async def post(served: Served, given: object = "hi", **fields: object) -> httpx.Response:
    """Sends a raw request. `fields` are added to the body unchanged."""
    return await served.http.post("/v1/responses", json={"input": given, **fields})


READING = Reading(Response, EVENTS, more=frozenset({"bytes", "store"}))
"""OpenAI's API also has `store`, and `bytes` in a delta's log-probabilities, but its client lacks them."""
unstreamed, checked = READING.unstreamed, READING.checked


def streamed(response: httpx.Response) -> list[ResponseStreamEvent]:
    return numbered(READING.streamed(response))


def read_events(data: bytes) -> list[ResponseStreamEvent]:
    return numbered(READING.events(data))


def numbered(events: list[ResponseStreamEvent]) -> list[ResponseStreamEvent]:
    assert [event.sequence_number for event in events] == [*range(len(events))]
    return events


def final(events: list[ResponseStreamEvent]) -> Response:
    """Returns the response at the end of a stream."""
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete", "response.failed")
    assert all(event.type != last.type for event in events[:-1])
    return last.response


def plain(response: Response) -> dict[str, Any]:
    """Returns the response without ids and other fields that differ between any two responses."""
    json = msgspec.json.encode(response.model_dump(exclude={"created_at"}))
    for number, item in enumerate(response.output):
        if item.type == "function_call":
            json = json.replace(item.call_id.encode(), b"CALL %d" % number)
    parsed: dict[str, Any] = msgspec.json.decode(json.replace(response.id.removeprefix("resp_").encode(), b"ID"))
    return parsed
