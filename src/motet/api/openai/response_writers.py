"""A Response as bytes, unstreamed or as events: its items (`response_output`), its states, and the members of the
request that it repeats."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from motet.api.generation.answer_writer import GroupsWriter, NamedEvent
from motet.api.generation.json_pieces import PIECE_BYTES, Buffer, EncodedJson, encode_json, joined_pieces
from motet.api.generation.plan import AnswerHead
from motet.api.http.failure import error_body, invalid_value
from motet.api.openai.response_output import INCOMPLETE, ItemStatus, Members, ResponseOutput
from motet.api.openai.responses_schema import BuiltInTool, NamespaceTool, ResponsesRequest, shown
from motet.text.text_group import GroupStep
from motet.types import FinishReason, SamplingParams, Usage


class ResponseObject:
    """The Response in each of its states."""

    def __init__(self, head: AnswerHead, echo: bytes, *, output: ResponseOutput) -> None:
        """`echo`: the members of the request that the Response repeats, a JSON object."""
        self.output = output
        self._head = head
        self._echo = echo

    @property
    def status(self) -> ItemStatus:
        return ItemStatus.INCOMPLETE if self.output.finish in INCOMPLETE else ItemStatus.COMPLETED

    def ended(self, usage: Usage) -> EncodedJson:
        reason = INCOMPLETE.get(self.output.finish or FinishReason.STOP)
        details: Members | None = None if reason is None else {"reason": reason}
        return self.json(self.status, incomplete_details=details, usage=response_usage(usage))

    def json(self, status: ItemStatus, **members: Members | None) -> EncodedJson:
        """Returns the JSON of the Response with its output so far. `members`: values for members that are null here."""
        state = {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "model": self._head.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self.output.items,
            "usage": None,
        }
        *pieces, last = encode_json(state | members)
        return EncodedJson([*pieces, last[:-1], b",", self._echo[1:]])


class ResponseBody(GroupsWriter):
    content_type = "application/json"
    streams = False
    keeps_answer = True

    def __init__(self, response: ResponseObject) -> None:
        self._response = response

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        self._response.output.feed(steps)
        return b""

    @property
    def held_bytes(self) -> int:
        return self._response.output.num_bytes

    @property
    def close_is_long(self) -> bool:
        return self.held_bytes >= PIECE_BYTES

    def close(self, usage: Usage) -> Iterable[bytes]:
        return [*joined_pieces(self._response.ended(usage).pieces)]


class ResponseEvents(GroupsWriter):
    """Writes a Response as events: created, in_progress, the items' events, completed | incomplete | error, failed. The
    last events repeat the output several times, and are sent in pieces."""

    keeps_answer = True

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._num_sent = 0
        self._last: list[NamedEvent] = []
        """The items' events of the step in which the choice ended."""

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        events = self._opening()
        added = self._response.output.feed(steps)
        if self._response.output.finish is None:
            events += added
        else:
            self._last += added
        return b"".join(self._pieces(events))

    @property
    def held_bytes(self) -> int:
        return self._response.output.num_bytes

    def close(self, usage: Usage) -> Iterable[bytes]:
        ended = _state_event(self._response.status, self._response.ended(usage))
        return joined_pieces(self._pieces([*self._last, ended]))

    def fail(self, error: Exception) -> bytes:
        """Returns an `error` event with Motet's code, and the failed Response with OpenAI's only code that fits."""
        body = error_body(error)
        failed = self._response.json(ItemStatus.FAILED, error={"message": body.message, "code": "server_error"})
        event = NamedEvent("error", {"code": body.code, "message": body.message, "param": body.param})
        return b"".join(self._pieces([*self._opening(), event, _state_event(ItemStatus.FAILED, failed)]))

    def _opening(self) -> list[NamedEvent]:
        """Returns the first events of the stream, if none was sent."""
        if self._num_sent:
            return []
        empty = self._response.json(ItemStatus.IN_PROGRESS)
        return [_state_event("created", empty), _state_event("in_progress", empty)]

    def _pieces(self, events: Iterable[NamedEvent]) -> Iterator[Buffer]:
        for event in events:
            yield from event.pieces(sequence_number=self._num_sent)
            self._num_sent += 1


def _state_event(state: str, json: EncodedJson) -> NamedEvent:
    return NamedEvent(f"response.{state}", {"response": json})


def response_writer(
    head: AnswerHead, body: ResponsesRequest, *, sampling: SamplingParams, output: ResponseOutput
) -> ResponseBody | ResponseEvents:
    """Returns the writer of a Response. Raises the errors of `echo_json`."""
    response = ResponseObject(head, echo_json(body, sampling), output=output)
    return ResponseEvents(response) if body.stream else ResponseBody(response)


def response_usage(usage: Usage) -> Members:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def echo_json(body: ResponsesRequest, sampling: SamplingParams) -> bytes:
    """Returns the members of the request that a Response repeats, with defaults where the request omits them, and
    constants for fields that this server does not have. Raises `RequestError` for a lone surrogate, which JSON can
    escape but an answer cannot repeat."""
    form, choice = body.text.format, body.tool_choice
    text = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    chosen = {name: value for name, value in (choice or {"type": "auto"}).items() if value is not None}
    fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "temperature": sampling.temperature,
        "text": {"format": text, "verbosity": body.text.verbosity},
        "tool_choice": chosen if len(chosen) > 1 else chosen["type"],
        "tools": [
            tool.members() if isinstance(tool, NamespaceTool) else shown(tool)
            for tool in body.tools
            if not isinstance(tool, BuiltInTool)
        ],
        "top_logprobs": body.top_logprobs,
        "top_p": sampling.top_p,
        "background": False,
        "max_tool_calls": None,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
    }
    for name, value in fields.items():
        try:
            msgspec.json.encode(value)
        except UnicodeEncodeError as error:
            raise invalid_value(name, f"it is not valid Unicode: {error.reason}") from error
    return msgspec.json.encode(fields)
