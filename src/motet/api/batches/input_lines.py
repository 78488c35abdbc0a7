"""The lines of an input file, read and checked in pieces that take a few milliseconds each."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from motet.api.batches.records import BatchProblem
from motet.batch.line_reader import read_lines
from motet.batch.lines import BatchLine, LineError, duplicate_custom_id, is_blank, parse_line

PIECE_BYTES, PIECE_LINES = 256 * 1024, 256
"""Number of bytes and of lines after which a piece ends, with the line that reaches it."""
MAX_PROBLEMS = 50
"""Maximum number of errors of one batch. A file with more is not read to its end."""
FRAME_BYTES = 8 * 1024
"""Maximum size of a line without its body: the other fields take at most 7 KB, with every character escaped."""


@dataclass(frozen=True)
class Place:
    """The start of a line in a file."""

    offset: int = 0
    num_lines: int = 0
    """Number of lines before it, also blank ones."""


class InputLine(NamedTuple):
    number: int
    """Number of the line in the file, from 1."""
    content: BatchLine | LineError


@dataclass(frozen=True)
class InputPiece:
    """Some lines that are not blank."""

    lines: Sequence[InputLine]
    next: Place | None
    """None at the end of the file."""


def id_digest(custom_id: str) -> bytes:
    """Returns a short form of an id, for sets of many thousand ids."""
    return blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()


def read_piece(path: Path, place: Place, *, endpoint: str, max_body_bytes: int) -> InputPiece:
    """Reads the next lines. A line that is too long is an error and ends the file."""
    found: list[InputLine] = []
    limit = max_body_bytes + FRAME_BYTES
    with path.open("rb") as content:
        for line in read_lines(content, max_bytes=limit, start=place.offset):
            number = place.num_lines + line.number
            if line.text is None:
                why = f"This line has more than {limit} bytes, the maximum of this server (--max-body-bytes)."
                return InputPiece([*found, InputLine(number, LineError("line_too_long", why))], None)
            if not is_blank(line.text):
                found.append(InputLine(number, parse_line(line.text, endpoint=endpoint)))
            if line.end >= place.offset + PIECE_BYTES or line.number == PIECE_LINES:
                return InputPiece(found, Place(line.end, number))
    return InputPiece(found, None)


class InputCheck:
    """The counts and errors of the lines that have been read."""

    def __init__(self, *, max_lines: int) -> None:
        self._max_lines = max_lines
        self._ids: set[bytes] = set()
        self._models: set[str | None] = set()
        self._num_lines = 0
        self.problems: list[BatchProblem] = []

    @property
    def total(self) -> int:
        """Number of requests."""
        return len(self._ids)

    @property
    def model(self) -> str | None:
        """The model that all lines name; None if they name several or none."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    @property
    def complete(self) -> bool:
        """True if more lines would not change the result: there are too many errors, or too many lines."""
        return len(self.problems) >= MAX_PROBLEMS or self._num_lines > self._max_lines

    def add(self, piece: InputPiece) -> None:
        for number, line in piece.lines:
            self._num_lines += 1
            if self._num_lines > self._max_lines:
                maximum = f"{self._max_lines} lines, the maximum of this server (--batch-max-lines)"
                why = f"This file has more than {maximum}."
                self.problems.append(BatchProblem(code="too_many_lines", message=why, param="input_file_id"))
            elif isinstance(line, LineError):
                self.problems.append(_problem(line, number))
            elif (digest := id_digest(line.custom_id)) in self._ids:
                self.problems.append(_problem(duplicate_custom_id(line.custom_id), number))
            else:
                self._ids.add(digest)
                if len(self._models) < 2:
                    self._models.add(line.model)
            if self.complete:
                return
        if piece.next is None and not self._num_lines:
            why = "This file has no lines."
            self.problems.append(BatchProblem(code="empty_file", message=why, param="input_file_id"))


def _problem(error: LineError, number: int) -> BatchProblem:
    return BatchProblem(code=error.code, message=error.message, param=error.param, line=number)
