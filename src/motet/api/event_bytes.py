"""Server-sent events from prepared bytes: what is the same in every chunk of an answer is written as JSON once.

    data: {"id":"chatcmpl-1","object":"chat.completion.chunk", ... ,"choices":[{"index":  2 ... }]  }\\n\\n
    └─────────────────────────────── opening, once an answer ───────────────────────────┘         └ closing

Only strings that change go through a JSON encoder. The order of the keys is that of OpenAI's own chunks.
"""

from collections.abc import Callable

import msgspec
import orjson

from motet.api.failure import error_json
from motet.api.plan import Head, Plan
from motet.api.usage_shape import usage_json
from motet.text.usage import Usage
from motet.transfer.ticket import Ticket

DONE = b"data: [DONE]\n\n"
END = b"}\n\n"


def data_event(json: bytes) -> bytes:
    return b"data: " + json + b"\n\n"


def failure_events(error: Exception) -> bytes:
    """How a stream that has begun ends when it cannot go on."""
    return data_event(error_json(error)) + DONE


def ticket_json(ticket: Ticket) -> bytes:
    """What stands after the list of choices in the last chunk of a choice that came to a ticket."""
    return b',"kv_transfer_params":' + msgspec.json.encode(ticket)


class EventBytes:
    """Opening and closing of the chunks of one answer."""

    def __init__(self, head: Head, kind: str, plan: Plan, *, usage_json: Callable[[Usage], bytes] = usage_json) -> None:
        constant = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._constant = b"data: " + orjson.dumps(constant)[:-1]
        self.opening = self._constant + b',"choices":[{"index":'
        self._usage_json = usage_json
        self._include = plan.include_usage
        self._continuous = plan.continuous_usage
        self._without_usage = b',"usage":null' + END if plan.include_usage else END

    def closing(self, usage: Callable[[], Usage]) -> bytes:
        """What follows the list of choices: `usage` is null when it will come at the end, and then once."""
        return b',"usage":' + self._usage_json(usage()) + END if self._continuous else self._without_usage

    def ending(self, usage: Usage) -> bytes:
        """The chunk without choices that carries the usage, if asked for, and the end of the stream."""
        if not self._include:
            return DONE
        return self._constant + b',"choices":[],"usage":' + self._usage_json(usage) + END + DONE
