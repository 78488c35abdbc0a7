"""Which lines of an input are sent, and in which order.

    survey     the first pass counts the lines, and compares the output file with them
    windows    the second pass yields the requests without a result, window by window

The requests of a window are sorted by their beginnings, so that requests with equal beginnings are sent one after the
other and the server computes the KV of a common beginning once. A window is bounded, so that memory is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import msgspec

from motet.batch.id_table import IdMark, IdTable
from motet.batch.lines import BatchLine, LineError, duplicate_custom_id
from motet.errors import ConfigError

WINDOW_LINES = 4096
WINDOW_BYTES = 64 * 2**20
"""Maximum size of the bodies of a window. A single body can be larger."""
KEY_BYTES = 8192
"""Number of bytes of a beginning that are compared."""


@dataclass(frozen=True, slots=True)
class NumberedLine:
    number: int
    """Number of the line in the input, from 1."""
    line: BatchLine | LineError


class BatchInput(Protocol):
    """An input that can be read more than once."""

    def read(self) -> Iterator[NumberedLine]: ...


class _Beginning(msgspec.Struct):
    """The fields of a body that determine the start of its prompts, in the order in which templates render them."""

    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_BEGINNING = msgspec.json.Decoder(_Beginning)


@dataclass(frozen=True)
class InputSurvey:
    """Totals of an input, compared with the results in its output file."""

    num_lines: int
    """Number of lines that are not blank."""
    num_finished: int
    """Number of lines with a result."""
    num_left: int
    """Number of requests that must be sent."""
    num_foreign: int
    """Number of results whose ids are not in the input."""


def survey(lines: BatchInput, finished: IdTable, *, output: str) -> InputSurvey:
    """Reads the input once. Raises ConfigError if the results belong to another input. `output`: name of the output
    file, for messages."""
    num_results = len(finished)
    num_lines = num_left = num_finished = num_changed = first_changed = 0
    for numbered in lines.read():
        num_lines += 1
        line = numbered.line
        if isinstance(line, LineError):
            continue
        before = finished.add(line.custom_id, IdMark.LISTED)
        num_left += before is IdMark.NONE
        if before is IdMark.FINISHED:  # the first line with this id
            num_finished += 1
            if not finished.is_of(line.custom_id, line.id):
                num_changed += 1
                first_changed = first_changed or numbered.number
    num_foreign = num_results - num_finished
    if num_changed:
        raise ConfigError(
            f"{output} has results of other requests with the same ids as {num_changed} lines of the input; the first "
            f"is line {first_changed}. Choose another output, or remove these results from it."
        )
    if num_results and not num_finished:
        raise ConfigError(f"{output} has {num_results} results, none of an id of the input: choose another output")
    return InputSurvey(num_lines, num_finished, num_left, num_foreign)


def windows(
    lines: BatchInput, finished: IdTable, *, max_lines: int = WINDOW_LINES, max_bytes: int = WINDOW_BYTES
) -> Iterator[Sequence[NumberedLine]]:
    """Yields the lines without a result, in bounded windows: first the errors of a window, then its requests, sorted by
    their beginnings. The second and later lines of an id are errors."""
    errors: list[NumberedLine] = []
    requests: list[tuple[bytes, NumberedLine]] = []
    num_bytes = 0
    for numbered in lines.read():
        line = numbered.line
        if isinstance(line, LineError):
            errors.append(numbered)
        elif (before := finished.add(line.custom_id, IdMark.SENT)) & IdMark.SENT:
            errors.append(NumberedLine(numbered.number, duplicate_custom_id(line.custom_id)))
        elif not before & IdMark.FINISHED:
            requests.append((beginning(line), numbered))
            num_bytes += len(line.body)
        if len(requests) + len(errors) >= max_lines or num_bytes >= max_bytes:
            yield _in_order(errors, requests)
            errors, requests, num_bytes = [], [], 0
    if errors or requests:
        yield _in_order(errors, requests)


def _in_order(errors: list[NumberedLine], requests: list[tuple[bytes, NumberedLine]]) -> Sequence[NumberedLine]:
    requests.sort(key=lambda request: request[0])
    return list(chain(errors, (numbered for _, numbered in requests)))


def beginning(line: BatchLine) -> bytes:
    """Returns the sort key of a request: equal for requests that can share the KV of their beginnings."""
    try:
        fields = _BEGINNING.decode(line.body)
    except (msgspec.DecodeError, RecursionError):
        return line.url.encode()
    parts = (fields.model, fields.tools, fields.instructions, fields.messages, fields.prompt, fields.input)
    return b"\0".join((line.url.encode(), *map(bytes, parts)))[:KEY_BYTES]
