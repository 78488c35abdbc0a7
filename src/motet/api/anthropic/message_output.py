"""The content of one message in Anthropic's API: the choice as a list of blocks, each streamed as events.

    Reasoning ─► thinking block      Content ─► text block      ToolCallBegin, ToolCallArguments ─► tool_use block

A block ends when a part of another kind starts, or with the choice. `MessageOutput` makes the blocks of streamed and
unstreamed answers, so the two cannot differ. The events of a block:

    content_block_start, content_block_delta ..., (thinking: signature_delta,) content_block_stop
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec
import pydantic_core

from motet.api.generation.answer_writer import GroupsWriter, NamedEvent, encode_events
from motet.api.generation.plan import AnswerHead
from motet.api.http.failure import message_error
from motet.text.choice import ChoiceEvent, WorkerReason
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.text_group import GroupStep
from motet.text.tools.tool_format import CALL_ID_CHARS, CALL_PREFIX
from motet.types import FinishReason, Usage

SIGNATURE = "unsigned"
"""The signature of thinking blocks, which Anthropic signs. Some clients drop a block whose signature is empty."""

STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
    FinishReason.ABORT: "pause_turn",
}
"""Anthropic's stop reasons. `pause_turn`: an operator ended the answer. It continues if the client sends it back."""


BLOCK_PREFIX = "toolu_"
"""Start of the ids of `tool_use` blocks."""


class BlockKind(StrEnum):
    """The type of a block. For text and thinking it is also the name of the member with the text."""

    TEXT = "text"
    THINKING = "thinking"
    CALL = "tool_use"


DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.THINKING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}
"""The type of a block's deltas, and the name of the member with their text."""


class OpenBlock:
    """A block that is being generated. Makes the events of its start, of its deltas, and of its end."""

    def __init__(self, kind: BlockKind, index: int, *, constant: Mapping[str, object]) -> None:
        """`index`: number of the block in the message. `constant`: the members that it has from the start."""
        self.kind = kind
        self._index = index
        self._constant = constant
        self._texts: list[str] = []

    def block(self) -> dict[str, object]:
        text = "".join(self._texts)
        if self.kind is BlockKind.CALL:
            return {"type": self.kind, **self._constant, "input": input_of(text)}
        signed = {"signature": SIGNATURE} if self.kind is BlockKind.THINKING else {}
        return {"type": self.kind, self.kind.value: text, **signed}

    def start(self) -> NamedEvent:
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

    def _event(self, phase: str, **fields: object) -> NamedEvent:
        return NamedEvent(f"content_block_{phase}", {"index": self._index, **fields})


def block_id(call_id: str) -> str:
    """Returns the id of a `tool_use` block: Anthropic's prefix in place of OpenAI's, as clients check it."""
    return BLOCK_PREFIX + call_id.removeprefix(CALL_PREFIX)


def call_id_of(block_id: str) -> str:
    """Returns the id of a call whose `block_id` this is, so that prompts have the ids that chats have. Ids of other
    lengths have no prefix: Mistral's templates reject it."""
    id = block_id.removeprefix(BLOCK_PREFIX)
    return CALL_PREFIX + id if id != block_id and len(id) == CALL_ID_CHARS else id


def input_of(arguments: str) -> object:
    """Returns a call's arguments as an object. Truncated arguments are read as far as they go, as Anthropic's client
    does in its stream helper."""
    try:
        msgspec.json.decode(arguments, type=dict[str, object])
        return msgspec.Raw(arguments.encode())  # keeps every digit of its numbers
    except msgspec.MsgspecError:
        try:
            read = pydantic_core.from_json(arguments, allow_partial=True)
        except ValueError:
            read = None
        return msgspec.Raw(pydantic_core.to_json(read, inf_nan_mode="null")) if isinstance(read, dict) else {}


class MessageOutput:
    """The message so far. Takes the events of its choice, and returns them as events of Anthropic's API."""

    def __init__(self, head: AnswerHead, *, reasoning_shown: bool) -> None:
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._head = head
        self._reasoning_shown = reasoning_shown
        self._done: list[dict[str, object]] = []
        self._open: OpenBlock | None = None

    @property
    def content(self) -> list[dict[str, object]]:
        return self._done if self._open is None else [*self._done, self._open.block()]

    def message(self, usage: Usage) -> dict[str, object]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": self.content,
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": message_usage(usage),
        }

    def feed(self, steps: Sequence[GroupStep]) -> list[NamedEvent]:
        return [event for step in steps for choice_event in step.events for event in self._feed(choice_event)]

    def _feed(self, event: ChoiceEvent) -> list[NamedEvent]:
        parts: Sequence[Part] = (Content(event.text),) if event.parts is None else event.parts
        events = [block_event for part in parts for block_event in self._add(part)]
        if event.finish is not None:
            events += self._close()
            self.stop_reason = STOP_REASONS[event.finish]
            stop = event.stop_reason
            if event.finish is FinishReason.STOP and isinstance(stop, str) and not isinstance(stop, WorkerReason):
                self.stop_reason, self.stop_sequence = "stop_sequence", stop
        return events

    def _add(self, part: Part) -> list[NamedEvent]:
        match part:
            case Reasoning(text):
                return self._add_text(text, BlockKind.THINKING) if text and self._reasoning_shown else []
            case Content(text):
                return self._add_text(text, BlockKind.TEXT) if text else []
            case ToolCallBegin(_, id, name):
                return self._start(BlockKind.CALL, {"id": block_id(id), "name": name})
            case ToolCallArguments(number, text):
                if self._open is None or self._open.kind is not BlockKind.CALL:
                    raise ValueError(f"arguments of call {number} come outside of a call")
                return [self._open.add(text)]

    def _add_text(self, text: str, kind: BlockKind) -> list[NamedEvent]:
        """Adds the text to the open block if the block is of this kind, else to a new one."""
        started = [] if self._open is not None and self._open.kind is kind else self._start(kind, {})
        assert self._open is not None  # it has just started, or was open
        return [*started, self._open.add(text)]

    def _start(self, kind: BlockKind, constant: Mapping[str, object]) -> list[NamedEvent]:
        closed = self._close()
        self._open = OpenBlock(kind, len(self._done), constant=constant)
        return [*closed, self._open.start()]

    def _close(self) -> list[NamedEvent]:
        if self._open is None:
            return []
        self._done.append(self._open.block())
        events, self._open = self._open.end(), None
        return events


def message_usage(usage: Usage) -> dict[str, object]:
    """Returns the usage as Anthropic counts it, with the cached tokens of the prompt separate from the others."""
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens or 0},
    }


class MessageBody(GroupsWriter):
    content_type = "application/json"
    streams = False

    def __init__(self, output: MessageOutput) -> None:
        self._output = output

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        self._output.feed(steps)
        return b""

    def close(self, usage: Usage) -> Sequence[bytes]:
        return [msgspec.json.encode(self._output.message(usage))]


class MessageEvents(GroupsWriter):
    """Writes a message as events: message_start, ping, the blocks' events, message_delta, message_stop | error."""

    def __init__(self, output: MessageOutput, *, request_id: str) -> None:
        self._output = output
        self._request_id = request_id
        self._started = False

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        return encode_events([*self._opening(usage), *self._output.feed(steps)])

    def close(self, usage: Usage) -> Sequence[bytes]:
        end = {"stop_reason": self._output.stop_reason, "stop_sequence": self._output.stop_sequence}
        last = NamedEvent("message_delta", {"delta": end, "usage": message_usage(usage)})
        return [encode_events([*self._opening(lambda: usage), last, NamedEvent("message_stop")])]

    def fail(self, error: Exception) -> bytes:
        body = message_error(error, self._request_id)
        return NamedEvent("error", {name: body[name] for name in ("error", "request_id")}).encode()

    def _opening(self, usage: Callable[[], Usage]) -> list[NamedEvent]:
        """Returns the events before the first block: the message without content."""
        if self._started:
            return []
        self._started = True
        empty: dict[str, object] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return [NamedEvent("message_start", {"message": self._output.message(usage()) | empty}), NamedEvent("ping")]


def message_writer(
    head: AnswerHead, *, stream: bool, request_id: str, reasoning_shown: bool
) -> MessageBody | MessageEvents:
    output = MessageOutput(head, reasoning_shown=reasoning_shown)
    return MessageEvents(output, request_id=request_id) if stream else MessageBody(output)
