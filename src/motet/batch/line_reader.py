"""Reads the lines of a file with bounded memory: a line that is too long is skipped, and its place is known."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FileLine:
    number: int
    """Number of the line, from 1."""
    text: bytes | None
    """The line with its line feed; None if it is longer than the reader allows."""
    end: int
    """Offset of the first byte after the line."""

    @property
    def is_complete(self) -> bool:
        """True if the line ends with a line feed. Only the last line of a file can lack it."""
        return self.text is None or self.text.endswith(b"\n")


def read_lines(file: BinaryIO, *, max_bytes: int, start: int = 0) -> Iterator[FileLine]:
    """Yields the lines of a file from the offset `start`, which is the start of line 1."""
    file.seek(start)
    number, end = 0, start
    while text := file.readline(max_bytes + 1):
        number += 1
        end += len(text)
        if len(text) <= max_bytes or text.endswith(b"\n"):
            yield FileLine(number, text, end)
            continue
        while piece := file.readline(PIECE_BYTES):
            end += len(piece)
            if piece.endswith(b"\n"):
                break
        yield FileLine(number, None, end)
