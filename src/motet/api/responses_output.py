"""The output of one Response: what its choice wrote, as items, one after the other.

    Reasoning ─► reasoning item      Content ─► message      ToolCallBegin, ToolCallArguments ─► function_call

An item ends when something of another kind begins, or with the choice. Whole and streamed answers are made here alike,
so they cannot differ.
"""

from collections.abc import Sequence

from motet.api.chat_extras import ChatExtras
from motet.api.responses_events import Event
from motet.api.responses_items import OpenCall, OpenItem, OpenMessage, OpenReasoning
from motet.api.responses_logprobs import PartLogprobs
from motet.api.responses_shape import OutputItem, Status
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import ChatLogprob, chat_logprobs
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.tokenizer import Tokenizer
from motet.types import FinishReason

CUT = (FinishReason.LENGTH, FinishReason.CONTENT_FILTER)
"""Ends that leave an item incomplete."""


class ResponseOutput:
    """Feed it the events of the choice."""

    def __init__(self, name: str, tokenizer: Tokenizer, extras: ChatExtras) -> None:
        """`name`: makes the ids of items their own."""
        self.finish: FinishReason | None = None
        self._name = name
        self._tokenizer = tokenizer
        self._extras = extras
        self._logprobs = PartLogprobs()
        self._done: list[OutputItem] = []
        self._open: OpenItem | None = None

    @property
    def items(self) -> tuple[OutputItem, ...]:
        """So far."""
        return tuple(self._done if self._open is None else [*self._done, self._open.item(Status.INCOMPLETE)])

    def feed(self, event: ChoiceEvent) -> list[Event]:
        if self._extras.num_top is not None:
            self._logprobs.feed(event)
        shown: Sequence[Part] = ((Content(event.text),) if event.text else ()) if event.parts is None else event.parts
        events = [told for part in shown for told in self._add(part)]
        if event.finish is not None:
            self.finish = event.finish
            events += self._close(Status.INCOMPLETE if event.finish in CUT else Status.COMPLETED)
        return events

    def _add(self, part: Part) -> list[Event]:
        match part:
            case Reasoning(text):
                self._taken(text)
                return self._think(text) if self._extras.reasoning else []
            case Content(text):
                return self._say(text, self._taken(text))
            case ToolCallBegin():
                return self._begin(OpenCall(self._next, self._item_name, call_id=part.id, function=part.name))
            case ToolCallArguments(_, text):
                if not isinstance(self._open, OpenCall):
                    raise ValueError(f"arguments of call {part.number} come outside of a call")
                return self._open.add(text)

    def _think(self, text: str) -> list[Event]:
        thoughts, begun = self._open, list[Event]()
        if not isinstance(thoughts, OpenReasoning):
            thoughts = OpenReasoning(self._next, self._item_name)
            begun = self._begin(thoughts)
        return begun + thoughts.add(text)

    def _say(self, text: str, logprobs: Sequence[ChatLogprob]) -> list[Event]:
        message, begun = self._open, list[Event]()
        if not isinstance(message, OpenMessage):
            message = OpenMessage(self._next, self._item_name)
            begun = self._begin(message)
        return begun + message.add(text, logprobs)

    def _begin(self, item: OpenItem) -> list[Event]:
        closed = self._close(Status.COMPLETED)
        self._open = item
        return closed + item.begin()

    def _close(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        self._done.append(self._open.item(status))
        events, self._open = self._open.end(status), None
        return events

    @property
    def _next(self) -> int:
        """The place of the next item in the output."""
        return len(self._done) + (self._open is not None)

    @property
    def _item_name(self) -> str:
        return f"{self._name}_{self._next}"

    def _taken(self, text: str) -> list[ChatLogprob]:
        if self._extras.num_top is None:
            return []
        return chat_logprobs(self._tokenizer, self._logprobs.take(text), num_top=self._extras.num_top)
