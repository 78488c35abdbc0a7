"""The input file of a batch: lines in OpenAI's format, read as often as needed."""

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from motet.batch.line_reader import read_lines
from motet.batch.lines import MAX_LINE_BYTES, MISSING, BatchLine, LineError, is_blank, parse_line, too_long_line
from motet.batch.requests import NumberedLine
from motet.batch.rows import BodyFields, short_line
from motet.errors import BatchStoppedError, ConfigError

LINE_FIELDS = "A line has custom_id, method, url and body, or only messages or prompt."


class JsonlInput:
    """A file whose lines are requests. Blank lines are skipped."""

    def __init__(self, path: Path, *, params: BodyFields) -> None:
        """`params`: fields of the bodies of lines without a body. Raises ConfigError if the file cannot be read again
        from its start."""
        self._path = path
        self._params = params
        try:
            self.status = os.stat(path)
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(self.status.st_mode):
            raise ConfigError(f"{path} is not a regular file: it must be readable twice")

    def read(self) -> Iterator[NumberedLine]:
        """Yields the lines. Raises BatchStoppedError if the file cannot be read to its end."""
        try:
            with self._path.open("rb", buffering=2**20) as file:
                for line in read_lines(file, max_bytes=MAX_LINE_BYTES):
                    if line.text is None:
                        yield NumberedLine(line.number, too_long_line())
                    elif not is_blank(line.text):
                        yield NumberedLine(line.number, self._request(line.text, line.number))
        except OSError as error:
            raise BatchStoppedError(f"{self._path} cannot be read: {error.strerror}") from error

    def _request(self, text: bytes, number: int) -> BatchLine | LineError:
        request = parse_line(text)
        if isinstance(request, LineError) and request.code == MISSING:
            short = short_line(text, number=number, params=self._params)
            return short or replace(request, message=f"{request.message} {LINE_FIELDS}")
        return request
