"""A streamed chat: one choice a chunk, a role chunk for each choice first, all chunks of a step in one piece."""

from collections.abc import Callable, Sequence

import orjson

from motet.api.event_bytes import EventBytes, ticket_json
from motet.api.open_groups import Step
from motet.api.plan import Plan
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import chat_logprobs
from motet.text.tokenizer import Tokenizer
from motet.text.usage import Usage

AFTER_TEXT = b'},"logprobs":null,"finish_reason":null}]'
ROLE = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'


class ChatChunks:
    streams = True

    def __init__(self, plan: Plan, tokenizer: Tokenizer, *, num_top: int | None, token_ids: bool) -> None:
        """`num_top`: alternatives beside each token, None without log-probabilities."""
        self._bytes = EventBytes(plan.head, "chat.completion.chunk", plan)
        self._size = plan.group_size
        self._prompt = plan.groups[0].prompt
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._token_ids = token_ids
        self._begun = False
        self._plain = num_top is None and not token_ids
        """Most chunks are text and nothing else."""
        self._before_text = [b'%b%d,"delta":{"content":' % (self._bytes.opening, i) for i in range(self._size)]

    def feed(self, steps: Sequence[Step], usage: Callable[[], Usage]) -> bytes:
        closing = self._bytes.closing(usage)
        parts: list[bytes] = []
        if not self._begun:
            self._begun = True
            parts += self._roles(closing)
        for step in steps:
            ending = closing if step.ticket is None else ticket_json(step.ticket) + closing
            for event in step.events.events:
                if self._plain and event.finish is None:
                    parts += (self._before_text[event.index], orjson.dumps(event.text), AFTER_TEXT, ending)
                else:
                    parts.append(self._chunk(event, ending))
        return b"".join(parts)

    def close(self, usage: Usage) -> bytes:
        return self._bytes.ending(usage)

    def _roles(self, closing: bytes) -> list[bytes]:
        prompt = b',"prompt_token_ids":' + orjson.dumps(self._prompt) if self._token_ids else b""
        return [b"%b%d%b%b%b" % (self._bytes.opening, index, ROLE, prompt, closing) for index in range(self._size)]

    def _chunk(self, event: ChoiceEvent, closing: bytes) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (
            self._bytes.opening,
            event.index,
            b'{"content":%b}' % orjson.dumps(event.text) if event.text or not event.finish else b"{}",
            self._logprobs(event),
            b'"%b","stop_reason":%b' % (event.finish.encode(), orjson.dumps(event.stop_reason))
            if event.finish
            else b"null",
            b',"token_ids":' + orjson.dumps(event.token_ids) if self._token_ids else b"",
            closing,
        )

    def _logprobs(self, event: ChoiceEvent) -> bytes:
        if self._num_top is None:
            return b"null"
        content = chat_logprobs(self._tokenizer, event.logprobs or (), num_top=self._num_top)
        return orjson.dumps({"content": content, "refusal": None})
