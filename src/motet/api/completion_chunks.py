"""Streamed completions: prompts x n choices numbered prompt-major, one choice a chunk, a step in one piece."""

from collections.abc import Callable, Sequence

import orjson

from motet.api.echo import Echoes
from motet.api.event_bytes import EventBytes, ticket_json
from motet.api.open_groups import Step
from motet.api.plan import Plan
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import completion_logprobs
from motet.text.tokenizer import Tokenizer
from motet.text.usage import Usage

AFTER_TEXT = b',"logprobs":null,"finish_reason":null}]'


class CompletionChunks:
    streams = True

    def __init__(
        self, plan: Plan, tokenizer: Tokenizer, *, num_top: int | None, token_ids: bool, echoes: Echoes | None
    ) -> None:
        """`num_top`: alternatives beside each token, None without log-probabilities. `echoes`: prompts to repeat."""
        self._bytes = EventBytes(plan.head, "text_completion", plan)
        self._plan = plan
        self._size = plan.group_size
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._token_ids = token_ids
        self._echoes = echoes
        self._plain = num_top is None and not token_ids
        """Most chunks are text and nothing else."""
        self._before_text = [
            b'%b%d,"text":' % (self._bytes.opening, index) for index in range(len(plan.groups) * plan.group_size)
        ]
        self._begun: set[int] = set()
        """Prompts whose first step has come."""

    def feed(self, steps: Sequence[Step], usage: Callable[[], Usage]) -> bytes:
        closing = self._bytes.closing(usage)
        parts: list[bytes] = []
        for step in steps:
            first = step.group * self._size
            if step.group not in self._begun:
                self._begun.add(step.group)
                parts += self._openings(step, closing)
            ending = closing if step.ticket is None else ticket_json(step.ticket) + closing
            for event in step.events.events:
                if self._plain and event.finish is None:
                    parts += (self._before_text[first + event.index], orjson.dumps(event.text), AFTER_TEXT, ending)
                else:
                    parts.append(self._chunk(step.group, event, ending))
        return b"".join(parts)

    def close(self, usage: Usage) -> bytes:
        return self._bytes.ending(usage)

    def _openings(self, step: Step, closing: bytes) -> list[bytes]:
        """What each choice of a prompt begins with: the echo, and the prompt's token ids, where asked for."""
        if self._echoes is None and not self._token_ids:
            return []
        text, logprobs = "", b"null"
        if self._echoes is not None:
            text = self._echoes.text(step.group)
            logprobs = orjson.dumps(self._echoes.logprobs(step.group, step.events.prompt))
        tail = b""
        if self._token_ids:
            tail = b',"prompt_token_ids":%b,"token_ids":[]' % orjson.dumps(self._plan.groups[step.group].prompt)
        constant = b',"text":%b,"logprobs":%b,"finish_reason":null%b}]%b' % (
            orjson.dumps(text),
            logprobs,
            tail,
            closing,
        )
        first = step.group * self._size
        return [b"%b%d%b" % (self._bytes.opening, index, constant) for index in range(first, first + self._size)]

    def _chunk(self, group: int, event: ChoiceEvent, closing: bytes) -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (
            self._before_text[group * self._size + event.index],
            orjson.dumps(event.text),
            self._logprobs(group, event),
            b'"%b","stop_reason":%b' % (event.finish.encode(), orjson.dumps(event.stop_reason))
            if event.finish
            else b"null",
            b',"token_ids":' + orjson.dumps(event.token_ids) if self._token_ids else b"",
            closing,
        )

    def _logprobs(self, group: int, event: ChoiceEvent) -> bytes:
        if self._num_top is None:
            return b"null"
        base = len(self._echoes.text(group)) if self._echoes else 0
        return orjson.dumps(
            completion_logprobs(
                self._tokenizer, event.logprobs or (), event.offsets or (), num_top=self._num_top, base=base
            )
        )
