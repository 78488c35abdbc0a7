"""Log lines: standard library logging, as text for people or one JSON object a line for machines.

Code logs with `logging.getLogger(__name__)` and passes figures as `extra={"fields": {...}}`; both forms show them.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

import msgspec

MAX_FIELD_CHARS = 2_000
"""A text among the figures of a line is cut to this many characters."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def setup_logging(*, format: str = LogFormat.TEXT, level: str = "info", stream: TextIO = sys.stderr) -> None:
    """Sends the lines of Motet's loggers to `stream`; other libraries' loggers are left as they are."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if format == LogFormat.JSON else TextFormatter())
    logger = logging.getLogger("motet")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Returns the figures of a line, if it has any."""
    fields: object = record.__dict__.get("fields")
    return fields if isinstance(fields, dict) else {}


def printable(text: str, *, most: int = MAX_FIELD_CHARS) -> str:
    """Returns a text as one line of at most `most` characters. Control characters, invisible ones and halves of
    surrogate pairs are escaped, so that no text from outside can end a line, or write to a terminal."""
    if len(text) > most:
        text = f"{text[:most]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _shown(value: object) -> str:
    """Returns a figure for a line of text, in quotes if it could be read as several."""
    text = printable(str(value))
    return json.dumps(text, ensure_ascii=False) if any(mark in text for mark in ' ="') else text


class TextFormatter(logging.Formatter):
    """`12:30:59 INFO motet.api: group finished request_id=... n=8`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {key}={_shown(value)}" for key, value in fields_of(record).items())
        return super().formatMessage(record) + pairs


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
        for key, value in fields_of(record).items():
            line[key] = printable(value) if isinstance(value, str) else value
        return msgspec.json.encode(line, enc_hook=str).decode()
