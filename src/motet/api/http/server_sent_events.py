"""Server-sent events: the content type of a stream, its last event in OpenAI's API, and events that have a name."""

from collections.abc import Iterable, Mapping

import msgspec

EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


class NamedEvent(msgspec.Struct, frozen=True):
    """An event with a name, which its data repeats as `type`."""

    name: str
    fields: Mapping[str, object] = {}

    def encode(self, **numbers: int) -> bytes:
        """Returns the event's bytes. `numbers`: members that come first in its data."""
        data = msgspec.json.encode({**numbers, "type": self.name, **self.fields})
        return b"event: %b\ndata: %b\n\n" % (self.name.encode(), data)


def encode_events(events: Iterable[NamedEvent]) -> bytes:
    return b"".join(event.encode() for event in events)
