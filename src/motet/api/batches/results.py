"""The lines of the output and error file of a batch that runs (`batch.line_file`). All functions block.

An answer with many log-probabilities has a hundred megabytes. One call that decodes or copies that much holds the GIL,
and delays every stream, so a large answer is written in the pieces in which it was sent, and only its end is decoded.

A server that was killed can leave a line without its end. `scan` removes it, and everything after a line that cannot be
read, so that the lines in the files are exactly the requests that need not run again."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec

from motet.api.batches.input_lines import PIECE_BYTES, id_digest
from motet.api.batches.line_calls import LineAnswer
from motet.api.batches.records import BatchTokens
from motet.batch.line_file import LineFile
from motet.batch.lines import BatchLine, read_result, result_line

MAX_DECODED_BYTES = 2**20
"""Maximum size of an answer that is decoded as a whole."""
MAX_PLACES = 4
"""Maximum number of places in which the usage of a larger answer is searched."""
USAGE, BODY, NULL, END = b'"usage":', b',"body":', b"null", b'},"error":null}\n'


class _InputDetails(msgspec.Struct):
    cached_tokens: int = 0


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """The usage of an answer, with the names of chats and completions or of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _InputDetails | None = None
    input_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _LineResponse(msgspec.Struct):
    body: msgspec.Raw


_ANSWER = msgspec.json.Decoder(_Answer)
_RESPONSE = msgspec.json.Decoder(_LineResponse | None)


def result_pieces(line: BatchLine, answer: LineAnswer) -> Sequence[bytes]:
    """Returns the result of a line, in pieces. A large body is not checked: the application has made it, as JSON."""

    def made(body: bytes) -> bytes:
        return result_line(
            line.id, custom_id=line.custom_id, status_code=answer.status, request_id=answer.request_id, body=body
        )

    if answer.num_bytes <= MAX_DECODED_BYTES or any(b"\n" in piece or b"\r" in piece for piece in answer.pieces):
        return [made(b"".join(answer.pieces))]
    return [made(NULL).removesuffix(NULL + END), *answer.pieces, END]


def last_bytes(pieces: Sequence[bytes]) -> bytes:
    """Returns the body that pieces have, or a part of its end that is larger than `MAX_DECODED_BYTES`."""
    kept: list[bytes] = []
    num_bytes = 0
    for piece in reversed(pieces):
        kept.append(piece)
        num_bytes += len(piece)
        if num_bytes > MAX_DECODED_BYTES:
            break
    return b"".join(reversed(kept))


def tokens_in(body: bytes | memoryview | msgspec.Raw) -> BatchTokens:
    """Returns the usage in the body of an answer; zeros if it has none. Of a large body, only the end is needed."""
    view = memoryview(body)
    if len(view) <= MAX_DECODED_BYTES:
        return _tokens_of(bytes(view)) or BatchTokens()
    end = bytes(view[-MAX_DECODED_BYTES:])
    place = len(end)
    for _ in range(MAX_PLACES):
        if (place := end.rfind(USAGE, 0, place)) < 0:
            break
        # The rest of the body is a JSON object after "{" only if this is a member of the outermost object.
        if (tokens := _tokens_of(b"{" + end[place:])) is not None:
            return tokens
    return BatchTokens()


def _tokens_of(body: bytes) -> BatchTokens | None:
    """Returns the usage in a JSON object; None if it has none."""
    try:
        usage = _ANSWER.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if usage is None:
        return None
    read, made = usage.prompt_tokens_details or usage.input_tokens_details, usage.completion_tokens_details
    made = made or usage.output_tokens_details
    return BatchTokens(
        input_tokens=usage.prompt_tokens or usage.input_tokens,
        cached_tokens=read.cached_tokens if read else 0,
        output_tokens=usage.completion_tokens or usage.output_tokens,
        reasoning_tokens=made.reasoning_tokens if made else 0,
    )


def _read_line(line: bytes) -> tuple[str, BatchTokens] | None:
    """Returns the id and the usage of the result in a line; None if it is not complete. The body of a large line is not
    decoded."""
    start = line.find(BODY) + len(BODY)
    is_large = len(line) > MAX_DECODED_BYTES and start >= len(BODY) and line.endswith(END) and b"\0" not in line
    small = line[:start] + NULL + END if is_large else line
    result = read_result(small) if small.endswith(b"\n") else None
    if result is None or result.custom_id is None:
        return None
    if is_large:
        return result.custom_id, tokens_in(memoryview(line)[start : -len(END)])
    response = _RESPONSE.decode(result.response)
    return result.custom_id, BatchTokens() if response is None else tokens_in(response.body)


@dataclass(frozen=True)
class ScannedPiece:
    """Some of the lines that a file has."""

    ids: Sequence[bytes]
    """`id_digest` of each line's request."""
    tokens: BatchTokens
    next: int | None
    """Offset of the next line; None at the end of the file."""


def scan(file: LineFile, start: int) -> ScannedPiece:
    """Reads the next lines from an offset, and removes the rest of the file if it cannot be read."""
    ids: list[bytes] = []
    tokens, end = BatchTokens(), start
    with closing(file.read(start)) as lines:
        for line in lines:
            found = None if line.text is None else _read_line(line.text)
            if found is None:
                break
            ids.append(id_digest(found[0]))
            tokens, end = tokens.plus(found[1]), line.end
            if end >= start + PIECE_BYTES:
                return ScannedPiece(ids, tokens, end)
    file.cut(end)
    return ScannedPiece(ids, tokens, None)
