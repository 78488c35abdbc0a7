"""The output of one Response: its choice as a list of items, each streamed as events.

    Reasoning ─► reasoning item      Content ─► message      ToolCallBegin, ToolCallArguments ─► function_call,
                                                                                                 custom_tool_call

An item ends when a part of another kind starts, or with the choice. `ResponseOutput` makes the items of streamed and
unstreamed answers, so the two cannot differ. The events of an item:

    output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done, output_item.done
    output_item.added, function_call_arguments.delta ..., function_call_arguments.done, output_item.done
    output_item.added, custom_tool_call_input.delta, custom_tool_call_input.done, output_item.done
"""

from collections import deque
from collections.abc import Mapping, Sequence, Set
from enum import StrEnum
from typing import NamedTuple

import pydantic_core

from motet.api.generation.answer_writer import LOGPROB_BYTES, NamedEvent
from motet.api.generation.json_pieces import JsonArray
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import ChatLogprob, chat_logprobs
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.text_group import GroupStep
from motet.text.tokenizer import Tokenizer
from motet.types import FinishReason, TokenLogprob

INCOMPLETE = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
    FinishReason.ABORT: None,
}
"""Finish reasons of an incomplete Response, with `incomplete_details.reason`; None if OpenAI has no such reason."""


class ItemStatus(StrEnum):
    """The state of a Response, or of an item of its output; an item is never FAILED."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


Members = dict[str, object]
"""The members of a JSON object."""


class ItemKind(NamedTuple):
    """The names that items of one kind share."""

    type: str
    prefix: str
    event: str
    """The name of the events with an item's text, without `.delta` and `.done`."""
    part: str | None = None
    """The type of the only part of an item's content; None if items of this kind have no content."""


MESSAGE = ItemKind("message", "msg_", "response.output_text", "output_text")
REASONING = ItemKind("reasoning", "rs_", "response.reasoning_text", "reasoning_text")
CALL = ItemKind("function_call", "fc_", "response.function_call_arguments")
CUSTOM_CALL = ItemKind("custom_tool_call", "ctc_", "response.custom_tool_call_input")


class OpenItem:
    """An item that is being generated. Makes the events of its start, of its deltas, and of its end."""

    def __init__(self, kind: ItemKind, index: int, *, name: str, constant: Members) -> None:
        """`index`: number of the item in the output. `constant`: the members that it has from the start."""
        self.kind = kind
        self.id = f"{kind.prefix}{name}"
        self._index = index
        self._constant = constant
        self._texts: list[str] = []
        self._logprobs = JsonArray()

    def item(self, status: ItemStatus) -> Members:
        content = self._joined() if self.kind.part is None else {"content": [self._part()] if self._texts else []}
        state = {} if self.kind is CUSTOM_CALL else {"status": status}  # which OpenAI's custom calls do not have
        return {"type": self.kind.type, "id": self.id, **state, **self._constant, **content}

    def _joined(self) -> Members:
        """Returns the members of the `.done` event, which repeat what all `.delta` events have sent."""
        text = "".join(self._texts)
        if self.kind is CALL:
            return {"arguments": text}
        if self.kind is CUSTOM_CALL:
            return {"input": custom_input(text)}
        return {"text": text, "logprobs": self._logprobs.json()} if self.kind is MESSAGE else {"text": text}

    def _part(self) -> Members:
        more = {"annotations": [], "logprobs": self._logprobs.json()} if self.kind is MESSAGE else {}
        return {"type": self.kind.part, "text": "".join(self._texts), **more}

    def start(self) -> list[NamedEvent]:
        return [self._item_event("added", ItemStatus.IN_PROGRESS), *self._part_event("added")]

    def add(self, text: str, logprobs: Sequence[ChatLogprob] = ()) -> list[NamedEvent]:
        self._texts.append(text)
        self._logprobs.add(logprobs)
        if self.kind is CUSTOM_CALL:
            return []  # its input is a string inside the arguments, and is sent as a whole
        more = {"logprobs": logprobs} if self.kind is MESSAGE else {}
        return [self._event(f"{self.kind.event}.delta", {"delta": text, **more})]

    def end(self, status: ItemStatus) -> list[NamedEvent]:
        fields = self._joined()
        whole = [self._event(f"{self.kind.event}.delta", {"delta": text})] if (text := fields.get("input")) else []
        joined = self._event(f"{self.kind.event}.done", fields)
        return [*whole, joined, *self._part_event("done"), self._item_event("done", status)]

    def _item_event(self, phase: str, status: ItemStatus) -> NamedEvent:
        return NamedEvent(f"response.output_item.{phase}", {"output_index": self._index, "item": self.item(status)})

    def _part_event(self, phase: str) -> list[NamedEvent]:
        return [self._event(f"response.content_part.{phase}", {"part": self._part()})] if self.kind.part else []

    def _event(self, name: str, fields: Members) -> NamedEvent:
        place = {"content_index": 0} if self.kind.part else {}
        return NamedEvent(name, {"item_id": self.id, "output_index": self._index, **place, **fields})


def custom_input(arguments: str) -> str:
    """Returns the input of a custom tool: the only argument of its function, or the part of it that was generated.
    Returns other arguments as they are."""
    try:
        read = pydantic_core.from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    values = [*read.values()] if isinstance(read, dict) else [read]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments if values else ""


class ResponseOutput:
    """The output items so far. Turns the events of the choice into events of OpenAI's API."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        *,
        num_top: int | None,
        reasoning_shown: bool,
        origins: Mapping[str, Members],
        custom: Set[str] = frozenset(),
    ) -> None:
        """`name`: part of the items' ids, unique to the Response. `num_top`: number of alternatives to each token, None
        for no log-probabilities. `origins`: see `responses.origins`. `custom`: names of the functions that stand for
        custom tools."""
        self.finish: FinishReason | None = None
        self.num_bytes = 0
        """Approximate memory of the output so far."""
        self._name = name
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._reasoning_shown = reasoning_shown
        self._origins = origins
        self._custom = custom
        self._logprobs = PartLogprobs()
        self._done: list[Members] = []
        self._open: OpenItem | None = None

    @property
    def items(self) -> list[Members]:
        """The items so far; an item that has not ended is incomplete."""
        return self._done if self._open is None else [*self._done, self._open.item(ItemStatus.INCOMPLETE)]

    def feed(self, steps: Sequence[GroupStep]) -> list[NamedEvent]:
        return [event for step in steps for choice_event in step.events for event in self._feed(choice_event)]

    def _feed(self, event: ChoiceEvent) -> list[NamedEvent]:
        self.num_bytes += len(event.text)
        if self._num_top is not None:
            self._logprobs.feed(event)
            self.num_bytes += LOGPROB_BYTES * sum(1 + len(token.top) for token in event.logprobs or ())
        shown: Sequence[Part] = ((Content(event.text),) if event.text else ()) if event.parts is None else event.parts
        events = [item_event for part in shown for item_event in self._add(part)]
        if event.finish is not None:
            self.finish = event.finish
            events += self._close(ItemStatus.INCOMPLETE if event.finish in INCOMPLETE else ItemStatus.COMPLETED)
        return events

    def _add(self, part: Part) -> list[NamedEvent]:
        match part:
            case Reasoning(text):
                self._take_logprobs(text)
                # There is no summary, since the item has the reasoning itself.
                return self._add_text(text, REASONING, constant={"summary": []}) if self._reasoning_shown else []
            case Content(text):
                logprobs = self._take_logprobs(text)
                return self._add_text(text, MESSAGE, constant={"role": "assistant"}, logprobs=logprobs)
            case ToolCallBegin():
                kind = CUSTOM_CALL if part.name in self._custom else CALL
                return self._start(kind, {"call_id": part.id, **self._origins.get(part.name, {"name": part.name})})
            case ToolCallArguments(_, text):
                if self._open is None or self._open.kind not in (CALL, CUSTOM_CALL):
                    raise ValueError(f"arguments of call {part.number} come outside of a call")
                return self._open.add(text)

    def _add_text(
        self, text: str, kind: ItemKind, *, constant: Members, logprobs: Sequence[ChatLogprob] = ()
    ) -> list[NamedEvent]:
        """Adds the text to the open item if the item is of this kind, else to a new one."""
        started = [] if self._open is not None and self._open.kind is kind else self._start(kind, constant)
        assert self._open is not None  # it has just started, or was open
        return started + self._open.add(text, logprobs)

    def _start(self, kind: ItemKind, constant: Members) -> list[NamedEvent]:
        closed, index = self._close(ItemStatus.COMPLETED), len(self._done)
        self._open = OpenItem(kind, index, name=f"{self._name}_{index}", constant=constant)
        return closed + self._open.start()

    def _close(self, status: ItemStatus) -> list[NamedEvent]:
        if self._open is None:
            return []
        self._done.append(self._open.item(status))
        events, self._open = self._open.end(status), None
        return events

    def _take_logprobs(self, text: str) -> list[ChatLogprob]:
        if self._num_top is None:
            return []
        return chat_logprobs(self._tokenizer, self._logprobs.take(text), num_top=self._num_top)


class PartLogprobs:
    """Finds the tokens of a message. A choice has log-probabilities for all its tokens, including the tokens of tags,
    reasoning and calls; a message has log-probabilities only for its own text.

    Call `feed` with an event of the choice, then `take` for each part of the event, in order. The parts are consecutive
    pieces of the choice's text, with other text between them, such as tags.

    A part can start in text of earlier events, which the parser held back. It always ends in text of the last event, so
    earlier text that equals the part is not found. If the last event itself has such text before the part, as only an
    event with several tokens can, the wrong tokens are returned."""

    def __init__(self) -> None:
        self._text = ""
        """The text of the choice, from character `_start` on."""
        self._start = 0
        self._before = 0
        """Number of characters of the choice before the last event."""
        self._tokens: deque[tuple[int, TokenLogprob]] = deque()
        """(start of the token's text, token) for each token that no part has taken."""

    def feed(self, event: ChoiceEvent) -> None:
        self._before = self._start + len(self._text)
        self._text += event.text
        self._tokens.extend(zip(event.offsets or (), event.logprobs or (), strict=True))

    def take(self, part: str) -> list[TokenLogprob]:
        """Returns the tokens of the next part: tokens that end in it and that the previous part has not taken."""
        found = self._text.find(part, max(self._before - len(part) - self._start, 0))
        if not part or found < 0:
            return []
        start, end = self._start + found, self._start + found + len(part)
        taken = []
        while self._tokens and self._tokens[0][0] < end:
            token_start, token = self._tokens.popleft()
            until = self._tokens[0][0] if self._tokens else end
            if token_start >= start or until > start:
                taken.append(token)
        self._text, self._start = self._text[found + len(part) :], end
        return taken
