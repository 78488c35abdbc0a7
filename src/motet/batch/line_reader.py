"""Reads the lines of a file with bounded memory: a line that is too long is skipped, and its place is known."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FileLine:
    number: int
    """Number of the line, from 1."""
    start: int
    """Offset of its first byte."""
    text: bytes | None
    """The line with its line feed; None if it is longer than the reader allows."""

    @property
    def end(self) -> int:
        """Offset of the first byte after the line, which has a text."""
        return self.start + len(self.text or b"")

    @property
    def is_complete(self) -> bool:
        """True if the line ends with a line feed. Only the last line of a file can lack it."""
        return self.text is None or self.text.endswith(b"\n")


def read_lines(file: BinaryIO, *, max_bytes: int, start: int = 0) -> Iterator[FileLine]:
    """Yields the lines of a file from the offset `start`, which is the start of line 1. A line that is too long is read
    to its end only if the next line is requested."""
    file.seek(start)
    number = 0
    while text := file.readline(max_bytes + 1):
        number += 1
        is_cut = len(text) > max_bytes and not text.endswith(b"\n")
        yield FileLine(number, start, None if is_cut else text)
        start += len(text)
        while is_cut and (piece := file.readline(PIECE_BYTES)):
            start += len(piece)
            is_cut = not piece.endswith(b"\n")
