"""Reads the answers of servers with OpenAI's API, such as vLLM: events of streams, lists of models. Pure."""

from typing import TypeVar

import msgspec

from motet.engines.wire import UNREADABLE
from motet.errors import EngineError, WorkerFaultError

T = TypeVar("T")

DONE = b"[DONE]"
"""The data of a stream's last event."""
MAX_EVENT_BYTES = 2**24
"""Maximum size of an event. A piece of an answer with 20 log-probabilities has a few thousand bytes."""

_DATA = (b"data:", b"\xef\xbb\xbfdata:")
"""The start of a `data` line. A stream can start with a byte order mark."""
_ENDS = (b"\n", b"\r")
_EMPTY = (b"\n", b"\r\n", b"\r")


class EventSplitter:
    """Splits the bytes of server-sent events into the data of complete events, wherever the bytes are divided.

    Lines end in LF, CRLF or CR. Comments, which keep connections alive, and fields other than `data` are ignored.
    The `data` lines of one event are joined, without surrounding blanks, since they are JSON or `[DONE]`. An incomplete
    event at the end of the stream is dropped. Raises WorkerFaultError for an event that is too long."""

    def __init__(self) -> None:
        self._rest = b""
        """The start of an incomplete line."""
        self._after_cr = False
        """True if a following LF belongs to the end of the last line."""
        self._data: list[bytes] = []
        """The `data` lines of an incomplete event."""
        self._num_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of each event that `data` completes, in order."""
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
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise WorkerFaultError(f"an event of a stream has more than {MAX_EVENT_BYTES} bytes")
        return events


def read_json(body: bytes, kind: type[T], *, what: str, error: type[EngineError] = EngineError) -> T:
    """Returns the decoded body. Raises `error`, with `what` in its message, if the body is not JSON of this type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as fault:
        raise error(f"{what} cannot be read: {fault}") from fault


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in `GET /v1/models`: OpenAI's fields, and fields that vLLM, SGLang, LMDeploy and llama.cpp add."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ListedModels(msgspec.Struct):
    data: tuple[ListedModel, ...]
