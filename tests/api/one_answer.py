"""Reads answers of `/v1/messages` and `/v1/responses` with the types of their official clients: no field is missing,
has another type, or is unknown to the client. Has texts of a model for the tests of both routes."""

import json
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter

from motet.testing.fake_engine import Script
from motet.text.choice import ChoiceEvent
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.text_group import GroupStep
from motet.types import ChoiceStart, FinishReason, GenerateRequest
from tests.api.calling import PARIS, CallingServing, called
from tests.tiny_tokenizer import fake_answer


class Event(Protocol):
    @property
    def type(self) -> str: ...


AnswerT = TypeVar("AnswerT", bound=BaseModel)
EventT = TypeVar("EventT", bound=Event)


class Reading(Generic[AnswerT, EventT]):
    """Reads the answers of one route."""

    def __init__(
        self, answer: type[AnswerT], events: TypeAdapter[EventT], *, passing: Sequence[str] = (), more: frozenset[str]
    ) -> None:
        """`passing`: events of the API that the client's types lack; the client drops them. `more`: fields of the API
        that they lack."""
        self._answer, self._events, self._passing, self._more = answer, events, passing, more

    def unstreamed(self, response: httpx.Response) -> AnswerT:
        assert response.status_code == 200, response.text
        return self.checked(response.content)

    def checked(self, data: bytes) -> AnswerT:
        parsed = self._answer.model_validate_json(data, strict=True)
        self._assert_nothing_more(parsed)
        return parsed

    def streamed(self, response: httpx.Response) -> list[EventT]:
        """Returns all events of a stream."""
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return self.events(response.content)

    def events(self, data: bytes) -> list[EventT]:
        """Returns the events, and checks the name of each."""
        *parts, rest = data.split(b"\n\n")
        assert rest == b""
        return [event for part in parts if (event := self._event(part)) is not None]

    def _event(self, part: bytes) -> EventT | None:
        name, data = part.split(b"\n")
        kind, payload = name.removeprefix(b"event: ").decode(), data.removeprefix(b"data: ")
        if kind in self._passing:
            assert payload == b'{"type":"%b"}' % kind.encode()
            return None
        event = self._events.validate_json(payload, strict=True)
        assert event.type == kind
        self._assert_nothing_more(event)
        return event

    def _assert_nothing_more(self, model: object) -> None:
        if isinstance(model, list):
            for inner in model:
                self._assert_nothing_more(inner)
        elif isinstance(model, BaseModel):
            assert set(model.model_extra or ()) <= self._more, model
            for name in type(model).model_fields:
                self._assert_nothing_more(getattr(model, name))


FIELDS_OF_CHATS = (
    *(".function", "response_format", "reasoning_effort", "continue_final_message", "'logprobs'"),
    *("max_completion_tokens", "parallel_tool_calls"),
)


def assert_no_words_of_chats(message: str, fields: object) -> None:
    """Checks that an error names no field that these routes lack, unless the client has sent it in `fields`."""
    sent = json.dumps(fields).replace('"', "'")
    assert [name for name in FIELDS_OF_CHATS if name in message and name not in sent] == []


REASONING_AND_TEXT: list[Part] = [Reasoning("let "), Reasoning("me see"), Content("It is "), Content("42.")]
TWO_CALLS: list[Part] = [
    Content("I look."),
    ToolCallBegin(0, "call_a", "weather"),
    ToolCallArguments(0, '{"city": '),
    ToolCallArguments(0, '"Paris"}'),
    ToolCallBegin(1, "call_b", "time"),
    ToolCallArguments(1, "{}"),
]


def steps(parts: Sequence[Part], finish: FinishReason, stop_reason: str | int | None = None) -> list[GroupStep]:
    """Returns one step for each part, and one for the end."""
    events = [ChoiceEvent(0, "", (), parts=(part,)) for part in parts]
    events.append(ChoiceEvent(0, "", (0,), parts=(), finish=finish, stop_reason=stop_reason))
    return [GroupStep((event,)) for event in events]


TIME = called("get_time", "{}")
ANSWERS = {
    "text": "It rains.",
    "nothing": "",
    "a call": PARIS,
    "thought, text and two calls": f"<think>Where?</think>I look. {PARIS}\n{TIME}",
    "text behind a call": f"{PARIS} and now I wait",
    "thought alone": "<think>I do not know",
    "no call": "<tool_call>\nweather, please\n</tool_call>",
    "odd letters": "<think>日本</think>" + called("get_weather", '{"city": "Zürich \\"日本\\" 😀"}'),
}


def weather_script(serve_tools: CallingServing) -> Script:
    """Returns reasoning and a tool call, until a tool has answered that it rains."""

    def script(request: GenerateRequest, _: ChoiceStart) -> list[int]:
        answered = "rain" in serve_tools.tokenizer.decode(request.prompt)
        return fake_answer("It is rain." if answered else f"<think>Where?</think>{PARIS}")

    return script
