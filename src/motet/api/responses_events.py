"""The events of a streamed Response, as OpenAI writes them, less their numbers: those are the stream's to count.

created, in_progress
  output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done, output_item.done
  output_item.added, function_call_arguments.delta ..., function_call_arguments.done, output_item.done
completed | incomplete | (error, failed)
"""

import msgspec

from motet.api.responses_shape import OutputItem, OutputText, ReasoningText
from motet.text.logprobs import ChatLogprob


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class ResponseEvent(Event, frozen=True, kw_only=True):
    response: msgspec.Raw


class Created(ResponseEvent, frozen=True, tag="response.created"):
    pass


class InProgress(ResponseEvent, frozen=True, tag="response.in_progress"):
    pass


class Completed(ResponseEvent, frozen=True, tag="response.completed"):
    pass


class Incomplete(ResponseEvent, frozen=True, tag="response.incomplete"):
    pass


class Failed(ResponseEvent, frozen=True, tag="response.failed"):
    pass


class Error(Event, frozen=True, kw_only=True, tag="error"):
    code: str | None
    message: str
    param: str | None


class ItemEvent(Event, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(ItemEvent, frozen=True, tag="response.output_item.added"):
    pass


class ItemDone(ItemEvent, frozen=True, tag="response.output_item.done"):
    pass


class InsideItem(Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class InsidePart(InsideItem, frozen=True, kw_only=True):
    content_index: int = 0
    """An item has one part."""


class PartEvent(InsidePart, frozen=True, kw_only=True):
    part: OutputText | ReasoningText


class PartAdded(PartEvent, frozen=True, tag="response.content_part.added"):
    pass


class PartDone(PartEvent, frozen=True, tag="response.content_part.done"):
    pass


class TextDelta(InsidePart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: tuple[ChatLogprob, ...]


class TextDone(InsidePart, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: tuple[ChatLogprob, ...]


class ReasoningDelta(InsidePart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(InsidePart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(InsideItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(InsideItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    arguments: str


def event_bytes(event: Event, number: int) -> bytes:
    """As a server-sent event; `number`: of the event in its stream."""
    name = str(event.__struct_config__.tag).encode()
    return b'event: %b\ndata: {"sequence_number":%d,%b\n\n' % (name, number, msgspec.json.encode(event)[1:])
