"""The content of one message of Anthropic's: its choice as a row of blocks, each streamed as events.

    Reasoning ─► thinking block      Content ─► text block      ToolCallBegin, ToolCallArguments ─► tool_use block

A block ends when something of another kind begins, or with the choice. Whole and streamed answers are made here alike,
so they cannot differ. The events of a block:

    content_block_start, content_block_delta ..., (thinking: signature_delta,) content_block_stop
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec
import pydantic_core

from motet.api.generation.answer import GroupsWriter
from motet.api.generation.plan import AnswerHead
from motet.api.http.failure import message_error
from motet.api.openai.converted_chat import MakeNames, NamedEvent, WholeOutput
from motet.text.choice import ChoiceEvent
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.text_group import GroupStep
from motet.types import FinishReason, Usage

SIGNATURE = "unsigned"
"""Stands where Anthropic signs thoughts. It is not empty, since some clients drop thoughts without a signature."""

STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
    FinishReason.ABORT: "pause_turn",
}
"""An answer that an operator has ended may be sent back, and goes on: Anthropic's word for that is `pause_turn`."""


class BlockKind(StrEnum):
    """The type of a block; the value of each is the member of a block with its text too, unless it is a call."""

    TEXT = "text"
    THINKING = "thinking"
    CALL = "tool_use"


DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.THINKING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}
"""The type of the pieces of a block, and the name of the member with their text."""


class OpenBlock:
    """A block while it is written. It makes the events of its begin, of its pieces, and of its end."""

    def __init__(self, kind: BlockKind, index: int, *, constant: Mapping[str, object]) -> None:
        """`index`: number of the block in the message. `constant`: the members that it has from the beginning."""
        self.kind = kind
        self._index = index
        self._constant = constant
        self._texts: list[str] = []

    def block(self) -> dict[str, object]:
        """Returns the block with all that has come."""
        text = "".join(self._texts)
        if self.kind is BlockKind.CALL:
            return {"type": self.kind, **self._constant, "input": input_of(text)}
        signed = {"signature": SIGNATURE} if self.kind is BlockKind.THINKING else {}
        return {"type": self.kind, self.kind.value: text, **signed}

    def begin(self) -> NamedEvent:
        empty: dict[str, object] = {"input": {}} if self.kind is BlockKind.CALL else {self.kind.value: ""}
        if self.kind is BlockKind.THINKING:
            empty["signature"] = ""
        return self._event("start", content_block={"type": self.kind, **self._constant, **empty})

    def add(self, text: str) -> NamedEvent:
        self._texts.append(text)
        kind, member = DELTAS[self.kind]
        return self._event("delta", delta={"type": kind, member: text})

    def end(self) -> list[NamedEvent]:
        signed = self._event("delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        return [*([signed] if self.kind is BlockKind.THINKING else ()), self._event("stop")]

    def _event(self, what: str, **fields: object) -> NamedEvent:
        return NamedEvent(f"content_block_{what}", {"index": self._index, **fields})


def input_of(arguments: str) -> object:
    """Returns the arguments of a call as an object. Of arguments that were cut it has what had come, as in the stream
    helper of the official client."""
    try:
        msgspec.json.decode(arguments, type=dict[str, object])
        return msgspec.Raw(arguments.encode())  # every digit stays as it was written
    except msgspec.MsgspecError:
        try:
            read = pydantic_core.from_json(arguments, allow_partial=True)
        except ValueError:
            read = None
        return msgspec.Raw(pydantic_core.to_json(read, inf_nan_mode="null")) if isinstance(read, dict) else {}


class MessageOutput:
    """Feed it the events of the choice."""

    def __init__(self, *, thoughts_shown: bool) -> None:
        self.stop_reason: str | None = None
        """None until the choice has ended."""
        self.stop_sequence: str | None = None
        self._thoughts_shown = thoughts_shown
        self._done: list[dict[str, object]] = []
        self._open: OpenBlock | None = None

    @property
    def content(self) -> list[dict[str, object]]:
        return self._done if self._open is None else [*self._done, self._open.block()]

    def feed(self, event: ChoiceEvent) -> list[NamedEvent]:
        parts: Sequence[Part] = (Content(event.text),) if event.parts is None else event.parts
        events = [told for part in parts for told in self._add(part)]
        if event.finish is not None:
            events += self._close()
            self.stop_reason = STOP_REASONS[event.finish]
            if event.finish is FinishReason.STOP and isinstance(event.stop_reason, str):
                self.stop_reason, self.stop_sequence = "stop_sequence", event.stop_reason
        return events

    def _add(self, part: Part) -> list[NamedEvent]:
        match part:
            case Reasoning(text):
                return self._write(text, BlockKind.THINKING) if text and self._thoughts_shown else []
            case Content(text):
                return self._write(text, BlockKind.TEXT) if text else []
            case ToolCallBegin(_, id, name):
                return self._begin(BlockKind.CALL, {"id": id, "name": name})
            case ToolCallArguments(number, text):
                if self._open is None or self._open.kind is not BlockKind.CALL:
                    raise ValueError(f"arguments of call {number} come outside of a call")
                return [self._open.add(text)]

    def _write(self, text: str, kind: BlockKind) -> list[NamedEvent]:
        """Adds a piece to the open block if that is of this kind, else to a new one."""
        begun = [] if self._open is not None and self._open.kind is kind else self._begin(kind, {})
        assert self._open is not None  # it has just begun, or was open
        return [*begun, self._open.add(text)]

    def _begin(self, kind: BlockKind, constant: Mapping[str, object]) -> list[NamedEvent]:
        closed = self._close()
        self._open = OpenBlock(kind, len(self._done), constant=constant)
        return [*closed, self._open.begin()]

    def _close(self) -> list[NamedEvent]:
        if self._open is None:
            return []
        self._done.append(self._open.block())
        events, self._open = self._open.end(), None
        return events


def message_usage(usage: Usage) -> dict[str, object]:
    """Returns the usage with the cached tokens of the prompt apart from the others, as Anthropic counts them."""
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens or 0},
    }


class MessageBody(WholeOutput):
    """Writes a message in one piece."""

    def __init__(self, head: AnswerHead, *, request_id: str, thoughts_shown: bool, names: MakeNames) -> None:
        """`request_id`: that of the request, for its errors."""
        self._head = head
        self._request_id = request_id
        self._output = MessageOutput(thoughts_shown=thoughts_shown)
        super().__init__(self._output, names)

    def close(self, usage: Usage) -> Sequence[bytes]:
        return [msgspec.json.encode(self._message(usage))]

    def _message(self, usage: Usage) -> dict[str, object]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": self._output.content,
            "stop_reason": self._output.stop_reason,
            "stop_sequence": self._output.stop_sequence,
            "usage": message_usage(usage),
        }


class MessageEvents(MessageBody):
    """Writes a message as events: message_start, ping, those of its blocks, message_delta, message_stop | error."""

    content_type = GroupsWriter.content_type
    streams = True
    _begun = False

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        return _bytes([*self._opening(usage), *self._feed(steps)])

    def close(self, usage: Usage) -> Sequence[bytes]:
        output = self._output
        end = {"stop_reason": output.stop_reason, "stop_sequence": output.stop_sequence}
        last = NamedEvent("message_delta", {"delta": end, "usage": message_usage(usage)})
        return [_bytes([*self._opening(lambda: usage), last, NamedEvent("message_stop")])]

    def fail(self, error: Exception) -> bytes:
        told = message_error(error, self._request_id)
        return _bytes([NamedEvent("error", {name: told[name] for name in ("error", "request_id")})])

    def _opening(self, usage: Callable[[], Usage]) -> list[NamedEvent]:
        """Returns what comes before the first block: the message without content."""
        if self._begun:
            return []
        self._begun = True
        empty: dict[str, object] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return [NamedEvent("message_start", {"message": self._message(usage()) | empty}), NamedEvent("ping")]


def _bytes(events: Sequence[NamedEvent]) -> bytes:
    return b"".join(event.sent() for event in events)
