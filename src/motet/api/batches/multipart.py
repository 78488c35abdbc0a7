"""A parser of `multipart/form-data` bodies that arrive in pieces (RFC 7578). It does no I/O and keeps no content:

    feed(piece) -> events      PartHead, then any number of bytes objects, then PartEnd; and so on
    close()                    raises if the body has not ended

Its buffer has at most one piece and one head of a part, and each byte is searched once."""

import re
from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

from motet.errors import RequestError

MAX_HEAD_BYTES = 8 * 1024
"""Maximum size of the head of a part."""
MAX_PARTS = 32
_BOUNDARY = re.compile(r"""boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))""", re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(\w+)="((?:[^"\\]|\\.)*)"')
_DISPOSITION = re.compile(r"(?im)^content-disposition:[ \t]*form-data\b(.*)$")


class PartHead(NamedTuple):
    """The start of a part: the name of the form's field, and the name of the file, if it is one."""

    name: str
    filename: str | None


class PartEnd(NamedTuple):
    """The end of a part."""


PartEvent = PartHead | bytes | PartEnd


class _State(Enum):
    PREAMBLE = auto()
    HEAD = auto()
    CONTENT = auto()
    AFTER_DELIMITER = auto()
    END = auto()


def invalid_form(why: str) -> RequestError:
    """`why`: the end of a sentence, without the full stop."""
    return RequestError(f"Invalid multipart/form-data body: {why}.", code="invalid_multipart_form_data")


class MultipartParser:
    def __init__(self, content_type: str) -> None:
        """Raises RequestError for a content type other than `multipart/form-data` with a boundary."""
        kind, _, parameters = content_type.partition(";")
        found = _BOUNDARY.search(parameters)
        if kind.strip().lower() != "multipart/form-data" or found is None:
            message = "The body must be multipart/form-data with a boundary, with the fields 'file' and 'purpose'."
            raise RequestError(message, code="invalid_content_type")
        self._delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1", errors="replace")
        self._buffer = b"\r\n"  # the first delimiter needs no line break before it
        self._state = _State.PREAMBLE
        self._num_parts = 0

    def feed(self, piece: bytes) -> Iterator[PartEvent]:
        """Yields the events of the next piece. Raises RequestError for an invalid body."""
        self._buffer += piece
        while (events := self._step()) is not None:
            yield from events

    def close(self) -> None:
        """Raises RequestError if the body has not ended."""
        if self._state is not _State.END:
            raise invalid_form("it has no end")

    def _step(self) -> list[PartEvent] | None:
        """Returns the events up to the next change of state; None if it needs more bytes."""
        match self._state:
            case _State.PREAMBLE | _State.CONTENT:
                return self._content()
            case _State.AFTER_DELIMITER:
                return self._after_delimiter()
            case _State.HEAD:
                return self._head()
            case _State.END:
                self._buffer = b""  # the epilogue is ignored
                return None

    def _content(self) -> list[PartEvent] | None:
        in_part, at = self._state is _State.CONTENT, self._buffer.find(self._delimiter)
        found = at >= 0
        end = at if found else max(0, len(self._buffer) - len(self._delimiter) + 1)
        content, self._buffer = self._buffer[:end], self._buffer[end + (len(self._delimiter) if found else 0) :]
        events: list[PartEvent] = [content] if in_part and content else []
        if not found:
            return events or None
        self._state = _State.AFTER_DELIMITER
        return [*events, PartEnd()] if in_part else events

    def _after_delimiter(self) -> list[PartEvent] | None:
        if self._buffer.startswith(b"--"):
            self._state = _State.END
            return []
        line, found, rest = self._buffer.partition(b"\r\n")
        if line.strip(b" \t\r") or len(line) > MAX_HEAD_BYTES:
            if self._buffer == b"-":
                return None
            raise invalid_form("a delimiter is followed by other text")
        if not found:
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise invalid_form(f"it can have at most {MAX_PARTS} parts")
        self._buffer, self._state = rest, _State.HEAD
        return []

    def _head(self) -> list[PartEvent] | None:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD_BYTES:
            raise invalid_form(f"the head of a part is larger than {MAX_HEAD_BYTES} bytes")
        if not found:
            return None
        self._buffer, self._state = rest, _State.CONTENT
        return [_head_of(head.decode(errors="replace"))]


def _head_of(head: str) -> PartHead:
    found = _DISPOSITION.search(head.replace("\r", ""))
    parameters = dict(_PARAMETER.findall(found[1])) if found else {}
    if "name" not in parameters:
        raise invalid_form("a part has no name")
    return PartHead(_unquoted(parameters["name"]), _unquoted(name) if (name := parameters.get("filename")) else None)


def _unquoted(text: str) -> str:
    """Returns a parameter as it was before quoting: with escapes (RFC 2616), or as browsers send it (`%22`)."""
    return re.sub(r"\\(.)", r"\1", text).replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
