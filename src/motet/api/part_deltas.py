"""The parts of a choice as the deltas of a streamed chat: prepared JSON around what changes."""

from collections.abc import Sequence

import orjson

from motet.api.chat_extras import ChatExtras
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin

NOTHING = b"{}"
NO_TEXT = b'{"content":""}'


class PartDeltas:
    """Of one choice. Its deltas, joined, are the message of the same answer in one piece."""

    def __init__(self, extras: ChatExtras) -> None:
        self._extras = extras
        self._answered = not extras.calls
        """Whether its content is known to be a string, or to stay null beside calls."""

    def feed(self, parts: Sequence[Part]) -> list[bytes]:
        deltas = []
        for part in parts:
            if isinstance(part, Content | Reasoning) and not part.text:
                continue
            if isinstance(part, Reasoning):
                if self._extras.reasoning:
                    deltas.append(b'{"reasoning_content":%b,"reasoning":%b}' % ((orjson.dumps(part.text),) * 2))
                continue
            self._answered = True
            deltas.append(_delta(part))
        return deltas

    def close(self) -> bytes:
        return NOTHING if self._answered else NO_TEXT


def _delta(part: Content | ToolCallBegin | ToolCallArguments) -> bytes:
    match part:
        case Content():
            return b'{"content":%b}' % orjson.dumps(part.text)
        case ToolCallBegin():
            return b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]}' % (
                part.number,
                orjson.dumps(part.id),
                orjson.dumps(part.name),
            )
        case ToolCallArguments():
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (
                part.number,
                orjson.dumps(part.text),
            )
