"""Server-sent events, put together however the bytes were cut on their way. Pure.

What a line may end with in the standard and in no server's output, a lone carriage return, is not looked for.
"""

from motet.errors import EngineError

MAX_LINE_BYTES = 2**24
"""A piece of an answer with 20 log-probabilities has a few thousand bytes."""


class EventSplitter:
    """Bytes in, the data of whole events out. Raises EngineError for a line that goes on without an end."""

    def __init__(self) -> None:
        self._rest = b""
        """Of a line that has not ended."""
        self._data: list[bytes] = []
        """Of an event that has not ended."""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that `data` completes, in order."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            if len(self._rest) > MAX_LINE_BYTES:
                raise EngineError(f"a line of a stream has more than {MAX_LINE_BYTES} bytes")
            return []
        lines, self._rest = (self._rest + data[:end]).split(b"\n"), data[end:]
        lines.pop()  # behind the last line end
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif line in (b"", b"\r") and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
