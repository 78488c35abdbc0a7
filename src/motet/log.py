"""Log lines: standard library logging, as text for people or one JSON object a line for machines.

A line may quote what a client, a worker or a side channel sent. Both forms escape all in it that could end the line,
move a terminal's cursor or turn the direction of its text.

Code logs with `logging.getLogger(__name__)` and passes figures as `extra={"fields": {...}}`; both forms show them.
"""

import logging
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO

import msgspec

_ODD = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, separators of lines, turns of direction, and halves of surrogate pairs, which are no UTF-8."""
_TURNS_LINE = frozenset("\n\t")


def _escaped(text: str, *, besides: frozenset[str] = frozenset()) -> str:
    """`besides`: characters to be left as they are."""
    if text.isascii() and text.isprintable():
        return text
    return _ODD.sub(lambda odd: odd[0] if odd[0] in besides else f"\\u{ord(odd[0]):04x}", text)


SELDOM = {"seldom": True}
"""`extra` of a line that would come over and over: it is written once a minute."""
SELDOM_S = 60.0


class _Seldom(logging.Filter):
    """Drops a line with `SELDOM` that was written less than a minute ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._written_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "seldom", False):
            return True
        now_s = self._clock()
        due = now_s >= self._written_s.get(record.msg, -SELDOM_S) + SELDOM_S
        if due:
            self._written_s[record.msg] = now_s
        return due


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def setup_logging(*, format: str = LogFormat.TEXT, level: str = "info", stream: TextIO = sys.stderr) -> None:
    """Sends the lines of Motet's loggers to `stream`; other libraries' loggers are left as they are."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if format == LogFormat.JSON else TextFormatter())
    handler.addFilter(_Seldom())
    logger = logging.getLogger("motet")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Returns the figures of a line, if it has any."""
    fields: object = record.__dict__.get("fields")
    return fields if isinstance(fields, dict) else {}


class TextFormatter(logging.Formatter):
    """`12:30:59 INFO motet.api: group finished request_id=... n=8`."""

    def __init__(self, line: str = "%(asctime)s %(levelname)s %(name)s: %(message)s") -> None:
        super().__init__(line, datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {key}={value}" for key, value in fields_of(record).items())
        return _escaped(super().formatMessage(record) + pairs)

    def formatException(self, ei: Any) -> str:
        return _escaped(super().formatException(ei), besides=_TURNS_LINE)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        told = {name: _readable(value) for name, value in (line | fields_of(record)).items()}
        return _escaped(msgspec.json.encode(told, enc_hook=str).decode())


def _readable(value: object) -> object:
    """Returns the value without halves of surrogate pairs, which JSON's encoder refuses."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
