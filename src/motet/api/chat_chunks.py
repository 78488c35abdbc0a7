"""A streamed chat: one choice a chunk, a role chunk for each choice first, all chunks of a step in one piece.

an event as plain text    one chunk, the end of its choice in it
an event read as parts    a chunk a part, and one for the end of its choice
"""

from collections.abc import Callable, Sequence

import orjson

from motet.api.chat_extras import ChatExtras
from motet.api.event_bytes import EventBytes, ticket_json
from motet.api.open_groups import Step
from motet.api.part_deltas import NOTHING, PartDeltas
from motet.api.plan import Plan
from motet.api.usage_shape import chat_usage_json
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import chat_logprobs
from motet.text.tokenizer import Tokenizer
from motet.text.usage import Usage

NOTHING_BESIDE = b',"logprobs":null,"finish_reason":null}]'
AFTER_TEXT = b"}" + NOTHING_BESIDE


class ChatChunks:
    streams = True

    def __init__(self, plan: Plan, tokenizer: Tokenizer, extras: ChatExtras) -> None:
        self._bytes = EventBytes(plan.head, "chat.completion.chunk", plan, usage_json=chat_usage_json)
        self._size = plan.group_size
        self._prompt = plan.groups[0].prompt
        self._tokenizer = tokenizer
        self._extras = extras
        self._begun = False
        self._plain = extras.num_top is None and not extras.token_ids
        """Most chunks are text and nothing else."""
        self._before_text = [b'%b%d,"delta":{"content":' % (self._bytes.opening, i) for i in range(self._size)]
        self._deltas = [PartDeltas(extras) for _ in range(self._size)]

    def feed(self, steps: Sequence[Step], usage: Callable[[], Usage]) -> bytes:
        closing = self._bytes.closing(usage)
        chunks: list[bytes] = []
        if not self._begun:
            self._begun = True
            chunks += self._roles(closing)
        for step in steps:
            ending = closing if step.ticket is None else ticket_json(step.ticket) + closing
            for event in step.events.events:
                if event.parts is not None:
                    chunks += self._of_parts(event, ending)
                elif self._plain and event.finish is None:
                    chunks += (self._before_text[event.index], orjson.dumps(event.text), AFTER_TEXT, ending)
                else:
                    beside = self._beside(event, tokens=True, end=True)
                    chunks.append(self._chunk(event.index, _text_delta(event), beside, ending))
        return b"".join(chunks)

    def close(self, usage: Usage) -> bytes:
        return self._bytes.ending(usage)

    def _roles(self, closing: bytes) -> list[bytes]:
        prompt = b',"prompt_token_ids":' + orjson.dumps(self._prompt) if self._extras.token_ids else b""
        delta = b'{"role":"assistant","content":%b}' % (b"null" if self._extras.calls else b'""')
        return [self._chunk(index, delta, NOTHING_BESIDE, prompt + closing) for index in range(self._size)]

    def _of_parts(self, event: ChoiceEvent, closing: bytes) -> list[bytes]:
        """What goes with the tokens of the event stands in its first chunk."""
        told = self._deltas[event.index]
        deltas = told.feed(event.parts or ())
        if event.finish is not None:
            deltas.append(told.close())
        elif not deltas and not self._plain:
            deltas.append(NOTHING)
        if self._plain and event.finish is None:
            return [self._chunk(event.index, delta, NOTHING_BESIDE, closing) for delta in deltas]
        last = len(deltas) - 1
        return [
            self._chunk(event.index, delta, self._beside(event, tokens=place == 0, end=place == last), closing)
            for place, delta in enumerate(deltas)
        ]

    def _chunk(self, index: int, delta: bytes, beside: bytes, closing: bytes) -> bytes:
        return b'%b%d,"delta":%b%b%b' % (self._bytes.opening, index, delta, beside, closing)

    def _beside(self, event: ChoiceEvent, *, tokens: bool, end: bool) -> bytes:
        """What stands beside the delta: of the tokens, and of the end of the choice, if it has come."""
        finish = event.finish if end else None
        return b',"logprobs":%b,"finish_reason":%b%b}]' % (
            self._logprobs(event) if tokens else b"null",
            b'"%b","stop_reason":%b' % (finish.encode(), orjson.dumps(event.stop_reason)) if finish else b"null",
            b',"token_ids":' + orjson.dumps(event.token_ids) if tokens and self._extras.token_ids else b"",
        )

    def _logprobs(self, event: ChoiceEvent) -> bytes:
        if self._extras.num_top is None:
            return b"null"
        content = chat_logprobs(self._tokenizer, event.logprobs or (), num_top=self._extras.num_top)
        return orjson.dumps({"content": content, "refusal": None})


def _text_delta(event: ChoiceEvent) -> bytes:
    return b'{"content":%b}' % orjson.dumps(event.text) if event.text or not event.finish else NOTHING
