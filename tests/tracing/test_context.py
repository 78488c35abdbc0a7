"""W3C Trace Context: parsing and formatting of the two headers."""

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import TraceState

from motet.tracing.context import TraceContext, context_in, headers_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("sent", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-01", 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-03", 3),
        (f"cc-{TRACE}-{SPAN}-01-what-a-later-version-adds", 1),
        (f" 00-{TRACE}-{SPAN}-01 ", 1),
    ],
)
def test_a_valid_header_is_read(sent: str, flags: int) -> None:
    assert context_in(sent, "vendor=1") == TraceContext(TRACE, SPAN, flags, "vendor=1")


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\nx: y",
    ],
)
def test_an_invalid_header_is_ignored(sent: str) -> None:
    assert context_in(sent) is None


@pytest.mark.parametrize(
    "state",
    [
        "a=" + "x" * 511,
        "a=" + "x" * 257,
        "a=1\r\nx: y",
        "a=\u00e9",
        "a",
        "a=",
        "=1",
        "A=1",
        "a=1=2",
        "a=1,b",
        "a=1,a=2",
        "password hunter2",
        ",".join(f"a{index}=1" for index in range(100)),
    ],
)
def test_an_invalid_state_is_left_out(state: str) -> None:
    assert context_in(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, 1, "")


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("a=1 ,\t b@c=x:y;z,,", "a=1,b@c=x:y;z"),
        ("0a@b= 1", "0a@b= 1"),
        (" ", ""),
        (",".join(f"a{index}=1" for index in range(32)), ",".join(f"a{index}=1" for index in range(32))),
    ],
)
def test_a_state_is_passed_on_without_spaces_between_its_members(state: str, kept: str) -> None:
    assert context_in(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, 1, kept)


def test_parsed_headers_are_formatted_unchanged() -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1,b=2"}
    assert headers_of(context_in(headers["traceparent"], headers["tracestate"])) == headers
    assert headers_of(None) == {}


class LogLines(logging.Handler):
    """Keeps the log lines of OpenTelemetry."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def near(valid: str) -> st.SearchStrategy[str]:
    """Generates a valid header, and variants with a few changed characters."""
    changed = st.tuples(st.integers(0, len(valid)), st.integers(0, 3), st.text("0aF-,=@ \t\n\xe9", max_size=3))
    return st.just(valid) | changed.map(lambda drawn: valid[: drawn[0]] + drawn[2] + valid[drawn[0] + drawn[1] :])


@given(near(f"00-{TRACE}-{SPAN}-01"), near("a=1,b@c=x y,") | near("d=" + "x" * 255) | st.text(max_size=9))
def test_any_headers_of_a_client_are_passed_on_valid_and_without_log_lines(parent: str, state: str) -> None:
    sent = context_in(parent, state)
    if sent is None:
        return
    logger, lines = logging.getLogger("opentelemetry"), LogLines()
    logger.addHandler(lines)
    try:
        assert TraceState.from_header([sent.state] if sent.state else []).to_header() == sent.state
    finally:
        logger.removeHandler(lines)
    assert lines.lines == []
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", sent.headers["traceparent"])
    assert context_in(*sent.headers.values()) == sent
