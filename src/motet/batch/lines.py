"""The lines of batch files, in OpenAI's format: requests of an input file, results of an output file.

    input    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    result   {"id": "batch_req_...", "custom_id": "a",
              "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}
    error    {"id": "batch_req_...", "custom_id": "a", "response": null, "error": {"code": "...", "message": "..."}}

A refusal of the server is a result with its status code and its body. An error is a line without a response: a request
that no server answered, or an input line that is not a request. This module does no I/O. A body stays JSON text: only
the server knows its schema. Lines can be hostile: no work here is recursive, or more than linear in their size."""

from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from motet.log import cut, escaped

BATCH_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/decisions", "/v1/score")
"""Routes that a line can name. All of them answer a request with one JSON object."""
METHOD = "POST"
MAX_LINE_BYTES = 64 * 2**20
"""Maximum size of an input line. The default limit of a server's bodies is 8 MiB."""
MAX_CUSTOM_ID_CHARS = 512
MAX_SHOWN_CHARS = 100
"""Number of characters of a value that a message quotes."""
BOM = b"\xef\xbb\xbf"
ID_PREFIX = "batch_req_"
MISSING = "missing_required_parameter"
"""Code of the error for a line without a required field."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch."""

    custom_id: str
    url: str
    """One of `BATCH_URLS`."""
    body: bytes
    """JSON object, as the line has it."""
    model: str | None = None
    """The model that the body names; None if it names none."""

    @property
    def id(self) -> str:
        """Id of the line's result. Equal requests have equal ids, so that a result shows which request it answers."""
        digest = blake2b(digest_size=16)
        for part in (self.custom_id.encode(), self.url.encode(), self.body):
            digest.update(len(part).to_bytes(8))
            digest.update(part)
        return ID_PREFIX + digest.hexdigest()


@dataclass(frozen=True, slots=True)
class LineError:
    """The reason why an input line is not a request, with OpenAI's codes."""

    code: str
    message: str
    param: str | None = None
    custom_id: str | None = None
    """The line's id, if it has a valid one."""


class _LineFields(msgspec.Struct):
    custom_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    method: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    url: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _BodyFields(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct, omit_defaults=True):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class _ResultLine(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


class ReadResult(msgspec.Struct):
    """The fields of a line in an output file."""

    id: str
    custom_id: str | None
    response: msgspec.Raw
    error: msgspec.Raw


_FIELDS = msgspec.json.Decoder(_LineFields)
_BODY_FIELDS = msgspec.json.Decoder(_BodyFields)
_TEXT = msgspec.json.Decoder(str)
_RAW = msgspec.json.Decoder(msgspec.Raw)
_RESULT = msgspec.json.Decoder(ReadResult)
_ENCODER = msgspec.json.Encoder()


def is_blank(line: bytes) -> bool:
    """Returns True for a line that has no text. Such lines are not requests, and not errors either."""
    return not line or line.isspace() or line.removeprefix(BOM).strip() == b""


def parse_line(line: bytes, *, endpoint: str | None = None) -> BatchLine | LineError:
    """Returns the request of an input line, or the reason why it is not one. A byte order mark, and white space around
    the line, are ignored.

    `endpoint`: the only URL that the line can have; None for every URL of `BATCH_URLS`."""
    if len(line) > MAX_LINE_BYTES:
        return too_long_line()
    line = line.removeprefix(BOM)
    try:
        str(line, "utf-8")
        fields = _FIELDS.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineError("invalid_json_line", f"This line is not a valid JSON object: {_reason(error)}.")
    custom_id = _text("custom_id", fields.custom_id)
    if isinstance(custom_id, LineError):
        return custom_id
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id has {len(custom_id)} characters: it must have 1 to {MAX_CUSTOM_ID_CHARS}."
        return LineError("invalid_value", message, "custom_id")
    method, url = _text("method", fields.method, custom_id=custom_id), _text("url", fields.url, custom_id=custom_id)
    if isinstance(method, LineError):
        return method
    if isinstance(url, LineError):
        return url
    if method != METHOD:
        return LineError("invalid_method", f"method is {_quoted(method)}: it must be {METHOD}.", "method", custom_id)
    if url not in BATCH_URLS:
        listed = ", ".join(BATCH_URLS)
        return LineError("invalid_url", f"url is {_quoted(url)}: it must be one of {listed}.", "url", custom_id)
    if endpoint is not None and url != endpoint:
        return LineError("url_mismatch", f"url is {url}: the endpoint of this batch is {endpoint}.", "url", custom_id)
    return _with_body(fields.body, custom_id=custom_id, url=url)


def _with_body(body: msgspec.Raw | msgspec.UnsetType, *, custom_id: str, url: str) -> BatchLine | LineError:
    if isinstance(body, msgspec.UnsetType):
        return _missing("body", custom_id)
    raw = bytes(body)
    if not raw.startswith(b"{"):
        return LineError("invalid_type", "body must be an object.", "body", custom_id)
    fields = _BODY_FIELDS.decode(raw)
    if (stream := bytes(fields.stream)) not in (b"null", b"false"):
        message = f"body.stream is {_quoted(stream.decode())}: a batch has complete answers. Remove the field."
        return LineError("unsupported_value", message, "body.stream", custom_id)
    model = None if bytes(fields.model) == b"null" else _text("body.model", fields.model, custom_id=custom_id)
    if isinstance(model, LineError):
        return model
    return BatchLine(custom_id, url, raw, model)


def too_long_line() -> LineError:
    """Returns the error of a line that a reader did not keep because of its size."""
    return LineError("line_too_long", f"This line has more than {MAX_LINE_BYTES} bytes, the maximum.")


def duplicate_custom_id(custom_id: str) -> LineError:
    """Returns the error of a line whose `custom_id` an earlier line has."""
    message = f"custom_id {_quoted(custom_id)} is the id of an earlier line: ids must be unique in a batch."
    return LineError("duplicate_custom_id", message, "custom_id", custom_id)


def result_line(line_id: str, *, custom_id: str, status_code: int, request_id: str, body: bytes) -> bytes:
    """Returns the result of a request as a line with its line feed. A `body` that is not JSON becomes a string."""
    response = _Response(status_code, request_id, msgspec.Raw(one_line_json(body)))
    return _ENCODER.encode(_ResultLine(line_id, custom_id, response, None)) + b"\n"


def error_line(error: LineError, *, line_id: str | None = None, number: int | None = None) -> bytes:
    """Returns an error as a line with its line feed.

    `line_id`: id of the request; None if the line has none. `number`: number of the input line, from 1."""
    shown = _Error(error.code, error.message, error.param, number)
    line_id = line_id or f"{ID_PREFIX}line_{number}"
    return _ENCODER.encode(_ResultLine(line_id, error.custom_id, None, shown)) + b"\n"


def read_result(line: bytes) -> ReadResult | None:
    """Returns what a line of an output file says; None if it is not a result or an error of a batch."""
    try:
        return _RESULT.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def one_line_json(body: bytes) -> bytes:
    """Returns JSON without line feeds. A body that is not JSON becomes a JSON string."""
    if not is_json(body):
        return _ENCODER.encode(body.decode(errors="replace"))
    return msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body


def is_json(body: bytes) -> bool:
    try:
        str(body, "utf-8")
        _RAW.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _text(name: str, value: msgspec.Raw | msgspec.UnsetType, *, custom_id: str | None = None) -> str | LineError:
    """Returns the value of a required field, which must be a string."""
    if isinstance(value, msgspec.UnsetType):
        return _missing(name, custom_id)
    try:
        return _TEXT.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return LineError("invalid_type", f"{name} must be a valid string.", name, custom_id)


def _missing(name: str, custom_id: str | None) -> LineError:
    return LineError(MISSING, f"Missing required parameter: {name}.", name, custom_id)


def _quoted(text: str) -> str:
    return f"'{escaped(cut(text, MAX_SHOWN_CHARS))}'"


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it has too many levels"
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
