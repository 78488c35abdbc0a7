"""Streamed token ids, in vLLM's shape: one choice a chunk, all chunks of a step in one piece."""

from collections.abc import Callable, Sequence

import orjson

from motet.api.event_bytes import DONE, END, ticket_json
from motet.api.open_groups import Step
from motet.api.plan import Plan
from motet.api.token_logprobs import token_logprobs
from motet.api.usage_shape import usage_json
from motet.text.choice import ChoiceEvent
from motet.text.usage import Usage


class TokensChunks:
    streams = True

    def __init__(self, plan: Plan, request_id: str, *, num_top: int | None) -> None:
        self._constant = b'data: {"request_id":' + orjson.dumps(request_id)
        self._opening = self._constant + b',"choices":[{"index":'
        self._include_usage = plan.include_usage
        self._continuous = plan.continuous_usage
        self._num_top = num_top

    def feed(self, steps: Sequence[Step], usage: Callable[[], Usage]) -> bytes:
        closing = b',"usage":' + (usage_json(usage()) if self._continuous else b"null") + END
        chunks: list[bytes] = []
        for step in steps:
            ending = closing if step.ticket is None else ticket_json(step.ticket) + closing
            chunks.extend(self._chunk(event, ending) for event in step.events.events if event.token_ids or event.finish)
        return b"".join(chunks)

    def close(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return self._constant + b',"choices":[],"usage":' + usage_json(usage) + END + DONE

    def _chunk(self, event: ChoiceEvent, closing: bytes) -> bytes:
        logprobs = b"null"
        if self._num_top is not None:
            logprobs = orjson.dumps(token_logprobs(event.logprobs or (), num_top=self._num_top))
        return b'%b%d,"logprobs":%b,"finish_reason":%b,"token_ids":%b}]%b' % (
            self._opening,
            event.index,
            logprobs,
            b'"%b"' % event.finish.encode() if event.finish else b"null",
            orjson.dumps(event.token_ids),
            closing,
        )
