"""Server-sent events of other people's servers, put together however their bytes were cut on the way. Pure.

Lines end in LF, CRLF or CR; comments, which keep connections alive, and fields other than `data` mean nothing here; the
`data` lines of one event are joined, without the blanks around them, for they are JSON or the word of the end. An event
that the end of the stream cuts off is none.
"""

from motet.errors import EngineError

DONE = b"[DONE]"
"""How servers of OpenAI's API say that nothing more comes."""
MAX_EVENT_BYTES = 2**24
"""A piece of an answer with 20 log-probabilities has a few thousand bytes."""

_DATA = (b"data:", b"\xef\xbb\xbfdata:")
"""A stream may begin with a byte order mark."""
_ENDS = (b"\n", b"\r")
_EMPTY = (b"\n", b"\r\n", b"\r")


class EventSplitter:
    """Bytes in, the data of whole events out. Raises EngineError for an event that goes on without an end."""

    def __init__(self, *, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        """What has come of a line that is not complete."""
        self._after_cr = False
        """Whether an LF that comes next is the rest of a line's end."""
        self._data: list[bytes] = []
        """Of the event that is not complete."""
        self._num_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that `data` completes, in order."""
        if not data:
            return []
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        lines = (self._rest + data).splitlines(keepends=True)
        self._rest = lines.pop() if data and not data.endswith(_ENDS) else b""
        events = []
        for line in lines:
            if line.startswith(_DATA):
                self._data.append(line.partition(b":")[2].strip())
                self._num_bytes += len(line)
            elif self._data and line in _EMPTY:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._num_bytes = 0
        if self._num_bytes + len(self._rest) > self._max_bytes:
            raise EngineError(f"an event of a stream has more than {self._max_bytes} bytes")
        return events
