"""Server-sent events of other people's servers, however their bytes were cut on the way. Pure.

Lines end in LF, CRLF or CR; comments, which keep connections alive, and fields other than `data` mean nothing here; the
`data` lines of one event are joined. An event that the end of the stream cuts off is none.
"""

from motet.errors import EngineError

MAX_EVENT_BYTES = 2**24


class EventReader:
    """`feed` returns the data of each event that has become complete."""

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
        if not data:
            return []
        rest_of_crlf = self._after_cr and data.startswith(b"\n")
        self._after_cr = data.endswith(b"\r")
        lines = (self._rest + data[rest_of_crlf:]).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        events = [event for line in lines if (event := self._line(line.rstrip(b"\r\n"))) is not None]
        if self._num_bytes + len(self._rest) > self._max_bytes:
            raise EngineError(f"an event of its stream is larger than {self._max_bytes} bytes")
        return events

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            event, self._data, self._num_bytes = self._data, [], 0
            return b"\n".join(event) if event else None
        name, _, value = line.partition(b":")
        if name.removeprefix(b"\xef\xbb\xbf") == b"data":
            self._data.append(value.removeprefix(b" "))
            self._num_bytes += len(value)
        return None
