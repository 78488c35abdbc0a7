"""What a process prints on standard error: text by default, one JSON object per line with `--log-format json`.

    notice          progress for people: a line without time and name in text, silent if `--log-level` is above info
    setup_logging   the lines of Motet's loggers
    capture_process the lines of other libraries, Python's warnings and uncaught exceptions, in the same format

Values that come from clients and workers are escaped, so that they cannot start a new line, move a terminal's cursor
or change the writing direction. Code logs with `logging.getLogger(__name__)` and passes values as
`extra={"fields": {...}}`; both formats show them."""

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import Any, TextIO

import msgspec

MAX_FIELD_CHARS = 2_000
"""Maximum length of a text among the fields of a line; the rest is cut off."""

ONCE_A_MINUTE = {"once_a_minute": True}
"""`extra` of a line that is logged at most once a minute."""
REPEAT_INTERVAL_S = 60.0
RED, PLAIN = "\x1b[31m", "\x1b[0m"
"""Escape sequences of a terminal."""


class RepeatFilter(logging.Filter):
    """Drops a line if a line with the same key was logged less than a minute ago."""

    def __init__(self, key: Callable[[logging.LogRecord], str | None]) -> None:
        """`key`: returns the key of a line; None for a line that is never dropped."""
        super().__init__()
        self._key = key
        self._next_s: dict[str, float] = {}
        """Time from which the next line with a key is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        if (key := self._key(record)) is None:
            return True
        if (now_s := time.monotonic()) < self._next_s.get(key, now_s):
            return False
        self._next_s[key] = now_s + REPEAT_INTERVAL_S
        return True


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


LOG_LEVELS = ("debug", "info", "warning", "error")
MOTET = logging.getLogger("motet")
NOTICES = logging.getLogger("motet.notice")
FOR_PEOPLE = {"for_people": True}
"""`extra` of a line that has neither time, level nor name in the text format."""


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to `sys.stderr` as it is when a line is logged: programs and tests can replace it later."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def setup_logging(
    *,
    format: str = LogFormat.TEXT,
    level: str = "info",
    stream: TextIO | None = None,
    color: bool = False,
    notices_only: bool = False,
) -> None:
    """Sends the lines of Motet's loggers to `stream`, by default standard error; loggers of other libraries are not
    changed, unless `capture_process` was called. `color`: show errors for people in red. `notices_only`: of the lines
    below a warning, show only notices, since the command is not a server."""
    handler = StderrHandler() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if format == LogFormat.JSON else TextFormatter(color=color))
    handler.addFilter(RepeatFilter(lambda line: line.msg if getattr(line, "once_a_minute", False) else None))
    others = logging.getLogger()
    for former in MOTET.handlers:
        if former in others.handlers:
            others.removeHandler(former)
            others.addHandler(handler)
    MOTET.handlers = [handler]
    MOTET.setLevel(level.upper())
    NOTICES.setLevel(MOTET.level if notices_only else logging.NOTSET)
    if notices_only and level in ("debug", "info"):
        MOTET.setLevel(logging.WARNING)
    MOTET.propagate = False


def capture_process() -> None:
    """Sends log lines of other libraries, Python's warnings and uncaught exceptions to Motet's handler, until the
    process ends. Called once, by Motet's own processes, after `setup_logging`."""
    for handler in MOTET.handlers:
        logging.getLogger().addHandler(handler)
    warnings.showwarning = _log_warning
    sys.excepthook = _log_uncaught


def _log_warning(  # sizes: called by Python
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    logging.getLogger("py.warnings").warning("%s: %s", category.__name__, message)


def _log_uncaught(  # sizes: called by Python
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    MOTET.critical("this process ends with an unexpected error: %r", error, exc_info=(kind, error, trace))


def notice(text: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Prints a line for people on standard error, through logging. In JSON, the object also has the `fields`."""
    NOTICES.log(level, "%s", text, extra={**FOR_PEOPLE, "fields": fields})


def failure(text: str) -> None:
    """Prints the reason for which a command ends, as `motet: REASON`, through logging."""
    MOTET.error("%s", text, extra=FOR_PEOPLE)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Returns the fields of a line; empty if it has none."""
    fields: object = record.__dict__.get("fields")
    return fields if isinstance(fields, dict) else {}


def cut(text: str, max_chars: int) -> str:
    """Returns the first `max_chars` characters of a text, followed by its length if it was cut."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"


def escaped(text: str, *, keep: str = "") -> str:
    """Escapes control characters, invisible characters and lone surrogates, except the characters in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def _shown(value: object) -> str:
    """Returns a field's value for a line of text, in quotes if it has spaces, quotes or equals signs."""
    text = cut(str(value), MAX_FIELD_CHARS)
    return json.dumps(text, ensure_ascii=False) if any(mark in text for mark in ' ="') else text


class TextFormatter(logging.Formatter):
    """`12:30:59 INFO motet.api: group finished request_id=... n=8`."""

    def __init__(self, line: str = "%(asctime)s %(levelname)s %(name)s: %(message)s", *, color: bool = False) -> None:
        super().__init__(line, datefmt="%H:%M:%S")
        self._color = color

    def formatMessage(self, record: logging.LogRecord) -> str:
        if getattr(record, "for_people", False):
            return self._for_people(record)
        pairs = "".join(f" {key}={_shown(value)}" for key, value in fields_of(record).items())
        return escaped(super().formatMessage(record) + pairs)

    def _for_people(self, record: logging.LogRecord) -> str:
        text = escaped(record.getMessage(), keep="\n")
        if record.levelno < logging.ERROR:
            return text
        return f"{RED}motet: {text}{PLAIN}" if self._color else f"motet: {text}"

    def formatException(self, ei: Any) -> str:
        return escaped(super().formatException(ei), keep="\n\t")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _readable(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = _readable(self.formatException(record.exc_info))
        for key, value in fields_of(record).items():
            line[key] = _readable(cut(value, MAX_FIELD_CHARS)) if isinstance(value, str) else value
        text = msgspec.json.encode(line, enc_hook=str).decode()
        return text if text.isprintable() else json.dumps(json.loads(text))


def json_line(logger: str, message: str, **fields: object) -> str:
    """Returns a message as a line of `--log-format json`, for another stream than the log."""
    record = logging.LogRecord(logger, logging.INFO, "", 0, message, None, None)
    record.fields = fields
    return JsonFormatter().format(record)


def _readable(text: str) -> str:
    """Returns a text without lone surrogates, which msgspec's encoder refuses."""
    return text.encode(errors="backslashreplace").decode()
