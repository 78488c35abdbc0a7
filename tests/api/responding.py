"""Checks responses against the types of the official client: no field is missing, of another type, or unknown to it."""

from typing import Any

import httpx
import msgspec
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.api.serving import Served

EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


async def ask(served: Served, given: object = "hi", **fields: object) -> httpx.Response:
    """Sends a raw request; `fields` go into the body as they are."""
    return await served.http.post("/v1/responses", json={"input": given, **fields})


def whole(response: httpx.Response) -> Response:
    assert response.status_code == 200, response.text
    return checked(response.content)


def checked(json: bytes) -> Response:
    parsed = Response.model_validate_json(json, strict=True)
    assert_nothing_more(parsed)
    return parsed


def streamed(response: httpx.Response) -> list[ResponseStreamEvent]:
    """Returns the events of a whole stream. They are numbered in order, and each comes under its own name."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_events(response.content)


def read_events(data: bytes) -> list[ResponseStreamEvent]:
    *parts, rest = data.split(b"\n\n")
    assert rest == b""
    events = []
    for number, part in enumerate(parts):
        name, json = part.split(b"\n")
        event = EVENTS.validate_json(json.removeprefix(b"data: "), strict=True)
        assert name == b"event: " + event.type.encode()
        assert event.sequence_number == number
        assert_nothing_more(event)
        events.append(event)
    return events


def final(events: list[ResponseStreamEvent]) -> Response:
    """Returns the response that the stream ends with."""
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete", "response.failed")
    assert all(event.type != last.type for event in events[:-1])
    return last.response


def plain(response: Response) -> dict[str, Any]:
    """Returns the response without ids and other fields in which no two responses agree."""
    json = msgspec.json.encode(response.model_dump(exclude={"created_at"}))
    for number, item in enumerate(response.output):
        if item.type == "function_call":
            json = json.replace(item.call_id.encode(), b"CALL %d" % number)
    parsed: dict[str, Any] = msgspec.json.decode(json.replace(response.id.removeprefix("resp_").encode(), b"ID"))
    return parsed


def assert_nothing_more(model: BaseModel) -> None:
    """`store`, and `bytes` of a delta's log-probabilities, are OpenAI's fields too, but its client leaves them out."""
    assert set(model.model_extra or ()) <= {"bytes", "store"}, model
    for name in type(model).model_fields:
        value = getattr(model, name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, BaseModel):
                assert_nothing_more(inner)
