"""The parts of a `multipart/form-data` body that arrives in pieces, as events. `python-multipart` parses the body.

feed(piece) -> events      PartHead, then any number of bytes objects, then PartEnd; and so on
close()                    raises if the body has not ended"""

from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from motet.errors import RequestError

MAX_HEAD_LINE_BYTES = 8 * 1024
"""Maximum size of a line in the head of a part."""
MAX_PARTS = 32


class PartHead(NamedTuple):
    """The start of a part: the name of the form's field, and the name of the file, if it is one."""

    name: str
    filename: str | None


class PartEnd(NamedTuple):
    """The end of a part."""


PartEvent = PartHead | bytes | PartEnd


def invalid_form(why: str) -> RequestError:
    """Returns the error for a body that is not a valid form. `why`: the reason, without a full stop."""
    return RequestError(f"Invalid multipart/form-data body: {why}.", code="invalid_multipart_form_data")


class FormReader:
    """Reads one body."""

    def __init__(self, content_type: str) -> None:
        """Raises RequestError for a content type other than `multipart/form-data` with a boundary."""
        kind, parameters = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not parameters.get(b"boundary"):
            message = "The body must be multipart/form-data with a boundary, with the fields 'file' and 'purpose'."
            raise RequestError(message, code="invalid_content_type")
        self._events: list[PartEvent] = []
        self._head: dict[bytes, bytes] = {}
        self._name = self._value = b""
        """The header that is being read."""
        self._num_parts = 0
        self._ended = False
        try:
            self._parser = MultipartParser(
                parameters[b"boundary"],
                {
                    "on_part_begin": self._start_part,
                    "on_header_field": self._add_name,
                    "on_header_value": self._add_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_head,
                    "on_part_data": lambda data, start, end: self._events.append(data[start:end]),
                    "on_part_end": lambda: self._events.append(PartEnd()),
                    "on_end": self._end,
                },
                max_header_size=MAX_HEAD_LINE_BYTES,
            )
        except FormParserError as error:
            raise invalid_form(str(error)) from error

    def feed(self, piece: bytes) -> list[PartEvent]:
        """Returns the events of the next piece. Raises RequestError for an invalid body. Text after the end of the body
        is ignored."""
        if self._ended:
            return []
        self._events = []
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise invalid_form(str(error)) from error
        return self._events

    def close(self) -> None:
        """Raises RequestError if the body has not ended."""
        if not self._ended:
            raise invalid_form("it has no end")

    def _start_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise invalid_form(f"it can have at most {MAX_PARTS} parts")
        self._head = {}

    def _add_name(self, data: bytes, *span: int) -> None:
        self._name += data[slice(*span)]

    def _add_value(self, data: bytes, *span: int) -> None:
        self._value += data[slice(*span)]

    def _end_header(self) -> None:
        self._head[self._name.lower()] = self._value
        self._name = self._value = b""

    def _end_head(self) -> None:
        kind, parameters = parse_options_header(self._head.get(b"content-disposition"))
        if kind != b"form-data" or not parameters.get(b"name"):
            raise invalid_form("a part has no name")
        filename = parameters.get(b"filename")
        self._events.append(PartHead(_text(parameters[b"name"]), _text(filename) if filename else None))

    def _end(self) -> None:
        self._ended = True


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
