"""A Response in one piece, and as a stream of events."""

from collections.abc import Callable, Sequence

import msgspec

from motet.api.chat_extras import ChatExtras
from motet.api.failure import error_body
from motet.api.open_groups import Step
from motet.api.plan import Head
from motet.api.responses_events import Completed, Created, Error, Event, Failed, Incomplete, InProgress, event_bytes
from motet.api.responses_output import ResponseOutput
from motet.api.responses_shape import (
    IncompleteDetails,
    ResponseError,
    ResponseState,
    Status,
    response_usage,
)
from motet.text.tokenizer import Tokenizer
from motet.text.usage import Usage
from motet.types import FinishReason

ID_PREFIX = "resp_"


class ResponseText:
    """The JSON of one Response at every state it goes through."""

    def __init__(self, head: Head, echo: bytes, tokenizer: Tokenizer, extras: ChatExtras) -> None:
        """`echo`: what it repeats of its request, an object."""
        self._head = head
        self._echo = echo
        self.output = ResponseOutput(head.id.removeprefix(ID_PREFIX), tokenizer, extras)

    def begun(self) -> bytes:
        return self._json(Status.IN_PROGRESS)

    def failed(self, message: str) -> bytes:
        return self._json(Status.FAILED, error=ResponseError(message))

    def ended(self, usage: Usage) -> bytes:
        return self._json(
            Status.COMPLETED if self.incomplete is None else Status.INCOMPLETE, usage=usage, incomplete=self.incomplete
        )

    @property
    def incomplete(self) -> IncompleteDetails | None:
        """Why, if it is."""
        match self.output.finish:
            case FinishReason.LENGTH:
                return IncompleteDetails("max_output_tokens")
            case FinishReason.CONTENT_FILTER:
                return IncompleteDetails("content_filter")
            case _:
                return None

    def _json(
        self,
        status: Status,
        *,
        error: ResponseError | None = None,
        incomplete: IncompleteDetails | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        state = ResponseState(
            id=self._head.id,
            created_at=self._head.created,
            model=self._head.model,
            status=status,
            error=error,
            incomplete_details=incomplete,
            output=self.output.items,
            usage=None if usage is None else response_usage(usage),
        )
        return msgspec.json.encode(state)[:-1] + b"," + self._echo[1:]


class ResponseBody:
    streams = False

    def __init__(self, response: ResponseText) -> None:
        self._response = response

    def feed(self, steps: Sequence[Step], usage: Callable[[], Usage]) -> bytes:
        for step in steps:
            for event in step.events.events:
                self._response.output.feed(event)
        return b""

    def close(self, usage: Usage) -> bytes:
        return self._response.ended(usage)


class ResponseEvents:
    streams = True

    def __init__(self, response: ResponseText) -> None:
        self._response = response
        self._sent = 0

    def feed(self, steps: Sequence[Step], usage: Callable[[], Usage]) -> bytes:
        told: list[Event] = [] if self._sent else self._begin()
        for step in steps:
            for event in step.events.events:
                told += self._response.output.feed(event)
        return self._bytes(told)

    def close(self, usage: Usage) -> bytes:
        end = Completed if self._response.incomplete is None else Incomplete
        return self._bytes([end(response=msgspec.Raw(self._response.ended(usage)))])

    def fail(self, error: Exception) -> bytes:
        """How the stream ends when it cannot go on."""
        body = error_body(error)
        return self._bytes(
            [
                Error(code=body.code, message=body.message, param=body.param),
                Failed(response=msgspec.Raw(self._response.failed(body.message))),
            ]
        )

    def _begin(self) -> list[Event]:
        response = msgspec.Raw(self._response.begun())
        return [Created(response=response), InProgress(response=response)]

    def _bytes(self, events: Sequence[Event]) -> bytes:
        numbered = enumerate(events, start=self._sent)
        self._sent += len(events)
        return b"".join([event_bytes(event, number) for number, event in numbered])
